"""Vectorised torch path of the kernels over compressed entries: products in factor space, codes unpacked a tile at a
time (tiles bound the memory and keep the codes in the processor's cache).

Legend: B batch, Hq query heads, Hkv KV heads, Hc coefficient heads, G = Hq / Hkv, Q query tokens, N tokens, M spans,
n tokens of the longest span, R coefficients, P = G * Q rows of a KV head, J bytes of one eighth of a line, d head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.kernels.operands import DENSE_BITS, Band, Coefficients, check_lines
from kvcore.kernels.torch_path import decode_attention, group_queries, merge_states, softmax_weights
from kvcore.kernels.unpacking import Unpacker, tile_length, tiles
from kvcore.quant import QuantizedTensor, decode_scales


def lowrank_attention(
    query: Tensor,
    key_factors: Tensor,
    key_basis: Tensor,
    value_factors: Tensor,
    value_basis: Tensor,
    lengths: Tensor,
    scale: float,
    key_gain: Tensor | None = None,
    value_gain: Tensor | None = None,
    span_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference_compressed.lowrank_attention`. No token-level key or value exists."""
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads, num_spans, longest, rank = key_factors.shape[1:]
    rows = group_queries(query, num_kv_heads) * scale
    # all spans' bases side by side: one product per KV head gives every span's coordinates of the query
    turned = torch.matmul(rows, key_basis.flatten(2, 3).mT).unflatten(-1, (num_spans, rank)).transpose(2, 3)
    if key_gain is not None:
        turned = turned * key_gain.to(turned.dtype).unsqueeze(3)
    logits = torch.matmul(turned, key_factors.mT).float()  # [B, Hkv, M, P, n]
    live = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(-1)
    logits = logits.masked_fill(~live.unsqueeze(3), float("-inf"))
    group_size = num_heads // num_kv_heads
    logits = logits.transpose(2, 3).unflatten(2, (group_size, num_queries))  # [B, Hkv, G, Q, M, n]
    if span_bias is not None:
        logits = logits + span_bias.unsqueeze(-1)
    weights, lse = softmax_weights(logits.flatten(4))
    weights = weights.to(value_factors.dtype).flatten(2, 3).unflatten(-1, (num_spans, longest)).transpose(2, 3)
    mixed = torch.matmul(weights, value_factors)  # [B, Hkv, M, P, R']
    if value_gain is not None:
        mixed = mixed * value_gain.to(mixed.dtype).unsqueeze(3)
    output = torch.matmul(mixed.transpose(2, 3).flatten(3), value_basis.flatten(2, 3))
    return output.to(query.dtype).view(batch, num_heads, num_queries, -1), lse.view(batch, num_heads, num_queries)


@dataclass(frozen=True)
class PackedProducts:
    """The two products with packed lines, which is all that differs between the paths of `depth_attention`.

    Attributes:
        logits: rows [B, Hc, P, R], codes, bits, N -> fp32 [B, Hc, P, N].
        mix: weights [B, Hc, P, N] (fp32), codes, bits, dtype that products may be computed in -> fp32 [B, Hc, P, R].
    """

    logits: Callable[[Tensor, Tensor, int, int], Tensor]
    mix: Callable[[Tensor, Tensor, int, torch.dtype], Tensor]


def depth_attention(
    query: Tensor,
    key: Coefficients,
    value: Coefficients,
    scale: float,
    products: PackedProducts,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference_compressed.depth_attention`. The basis is absorbed into the query and the output."""
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.basis.shape[1]
    rows = group_queries(query, num_kv_heads) * scale  # [B, Hkv, P, d]
    logits = _depth_logits(rows, key, products).unflatten(2, (num_heads // num_kv_heads, num_queries))
    weights, lse = softmax_weights(logits if bias is None else logits + bias)
    output = _depth_output(weights.flatten(2, 3), value, query.dtype, products)
    return output.to(query.dtype).view(batch, num_heads, num_queries, -1), lse.view(batch, num_heads, num_queries)


def _depth_logits(rows: Tensor, key: Coefficients, products: PackedProducts) -> Tensor:
    """fp32 logits [B, Hkv, P, N] of scaled rows [B, Hkv, P, d]."""
    turned = torch.matmul(rows, key.basis.to(rows.dtype).mT)
    streams = turned.reshape(rows.shape[0], key.num_streams, -1, turned.shape[-1])
    logits = band_logits(streams, key.bands, products).view(*rows.shape[:3], -1)
    if key.mean is not None:
        logits = logits.add_(torch.matmul(rows.float(), key.mean.float().unsqueeze(-1)))
    if key.residual is None:
        return logits
    if key.residual_basis is not None:
        rows = torch.matmul(rows, key.residual_basis.to(rows.dtype).mT)
    first = torch.matmul(rows, key.residual.to(rows.dtype).mT).float()
    logits[..., : first.shape[-1]] += first
    return logits


def _depth_output(weights: Tensor, value: Coefficients, dtype: torch.dtype, products: PackedProducts) -> Tensor:
    """Output [B, Hkv, P, d] of fp32 weights [B, Hkv, P, N]."""
    streams = weights.reshape(weights.shape[0], value.num_streams, -1, weights.shape[-1])
    mixed = band_mix(streams, value.bands, dtype, products).view(*weights.shape[:3], -1)
    output = torch.matmul(mixed.to(dtype), value.basis.to(dtype))
    if value.mean is not None:
        output = output + weights.sum(-1, keepdim=True).to(dtype) * value.mean.to(dtype).unsqueeze(2)
    if value.residual is not None:
        first = torch.matmul(weights[..., : value.residual.shape[2]].to(dtype), value.residual.to(dtype))
        if value.residual_basis is not None:
            first = torch.matmul(first, value.residual_basis.to(dtype))
        output = output + first
    return output


def band_logits(rows: Tensor, bands: list[Band], products: PackedProducts) -> Tensor:
    """fp32 products [B, Hc, P, N] of rows [B, Hc, P, R] with coefficients: steps are folded into the rows."""
    total: Tensor | None = None
    start = 0
    for band in bands:
        mine = rows[..., start : start + band.num_coefficients]
        if band.step is not None:
            mine = (mine.float() * band.step.unsqueeze(2)).to(rows.dtype)
        if band.bits == DENSE_BITS:
            part = torch.matmul(mine, band.codes[..., : band.num_tokens].to(rows.dtype)).float()
        else:
            check_lines(band)
            part = products.logits(mine, band.codes, band.bits, band.num_tokens)
        if band.offset:
            part = part.add_(band.offset * mine.float().sum(-1, keepdim=True))
        total = part if total is None else total.add_(part)
        start += band.num_coefficients
    assert total is not None
    return total


def _product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Codes become fp32 on a CPU: rows and weights stay unrounded, at about the speed of bf16"""
    return torch.float32 if x.device.type == "cpu" else dtype


def packed_logits(rows: Tensor, codes: Tensor, bits: int, num_tokens: int) -> Tensor:
    """Products of rows with the raw codes of packed lines, a tile of tokens at a time.

    Args:
        rows: [B, Hc, P, R].
        codes: uint8 [B, Hc, R, bytes].
        bits: 1..8.
        num_tokens: N; what a line is padded with behind them is left out.

    Returns:
        fp32 [B, Hc, P, N].
    """
    batch, streams, count, num_coefficients = rows.shape
    rows = rows.to(_product_dtype(rows, rows.dtype))
    lines, pieces = rows.flatten(0, 1), codes.flatten(0, 1).unflatten(-1, (bits, -1))  # [L, P, R], [L, R, bits, J]
    eighth = pieces.shape[-1]
    logits = torch.empty(batch * streams, count, 8, eighth, dtype=torch.float32, device=rows.device)
    unpacker = Unpacker(rows.dtype, rows.device)
    for some, run in tiles(batch * streams, 8 * num_coefficients, eighth):
        numbers = unpacker(pieces[some, ..., run], bits)
        logits[some, ..., run] = torch.bmm(lines[some], numbers.flatten(-2)).unflatten(-1, (8, -1))
    return logits.flatten(-2)[..., :num_tokens].unflatten(0, (batch, streams))


def band_mix(weights: Tensor, bands: list[Band], dtype: torch.dtype, products: PackedProducts) -> Tensor:
    """fp32 mixed coefficients [B, Hc, P, R] of fp32 weights [B, Hc, P, N]; products are computed in `dtype`."""
    total = weights.sum(-1, keepdim=True)
    mixed = []
    for band in bands:
        if band.bits == DENSE_BITS:
            part = torch.matmul(weights.to(dtype), band.codes[..., : band.num_tokens].to(dtype).mT).float()
        else:
            check_lines(band)
            part = products.mix(weights, band.codes, band.bits, dtype)
        if band.offset:
            part = part + band.offset * total
        mixed.append(part if band.step is None else part * band.step.float().unsqueeze(2))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=-1)


def packed_mix(weights: Tensor, codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Weighted sums of the raw codes of packed lines, a tile of tokens at a time.

    Args:
        weights: [B, Hc, P, N].
        codes: uint8 [B, Hc, R, bytes].
        bits: 1..8.
        dtype: that weights are rounded to on a GPU.

    Returns:
        fp32 [B, Hc, P, R].
    """
    batch, streams, count, num_tokens = weights.shape
    weights = weights.to(_product_dtype(weights, dtype))
    pieces = codes.flatten(0, 1).unflatten(-1, (bits, -1))  # [L, R, bits, J]
    num_coefficients, eighth = codes.shape[2], pieces.shape[-1]
    eighths = F.pad(weights.flatten(0, 1), (0, 8 * eighth - num_tokens)).unflatten(-1, (8, eighth))
    mixed = torch.zeros(batch * streams, count, num_coefficients, dtype=torch.float32, device=weights.device)
    unpacker = Unpacker(weights.dtype, weights.device)
    for some, run in tiles(batch * streams, 8 * num_coefficients, eighth):
        numbers = unpacker(pieces[some, ..., run], bits)
        mixed[some] += torch.bmm(eighths[some, ..., run].flatten(-2), numbers.flatten(-2).mT)
    return mixed.unflatten(0, (batch, streams))


TORCH_PRODUCTS = PackedProducts(packed_logits, packed_mix)


def quantised_attention(
    query: Tensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    scale: float,
    bias: Tensor | None = None,
    window_key: Tensor | None = None,
    window_value: Tensor | None = None,
    window_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference_compressed.quantised_attention`."""
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.codes.shape[1]
    rows = group_queries(query, num_kv_heads) * scale
    logits = _grouped_key_logits(rows, key).unflatten(2, (num_heads // num_kv_heads, num_queries))
    weights, lse = softmax_weights(logits if bias is None else logits + bias)
    output = _grouped_value_mix(weights.flatten(2, 3), value, query.dtype)
    output = output.to(query.dtype).view(batch, num_heads, num_queries, -1)
    lse = lse.view(batch, num_heads, num_queries)
    if window_key is None or window_value is None:
        return output, lse
    near = decode_attention(query, window_key, window_value, scale, window_bias)
    return merge_states([output, near[0]], [lse, near[1]])


def _grouped_key_logits(rows: Tensor, key: QuantizedTensor) -> Tensor:
    """fp32 logits [B, Hkv, P, N] of scaled rows with keys quantised along tokens."""
    batch, num_kv_heads, count, dim = rows.shape
    groups, size = key.codes.shape[3], key.group_size
    step, zero = decode_scales(key.scale, key.zero, rows.dtype)  # [B, Hkv, d, groups]
    pieces = key.codes.unflatten(-1, (key.bits, -1))  # [B, Hkv, d, groups, bits, J]
    logits = torch.empty(batch, num_kv_heads, count, groups, size, dtype=torch.float32, device=rows.device)
    unpacker = Unpacker(rows.dtype, rows.device)
    tile = tile_length(batch * num_kv_heads * dim * size, groups)
    for first in range(0, groups, tile):
        some = slice(first, first + tile)
        numbers = unpacker(pieces[:, :, :, some], key.bits).flatten(-2)
        numbers.mul_(step[:, :, :, some].unsqueeze(-1))
        logits[:, :, :, some] = torch.matmul(rows, numbers.flatten(-2)).unflatten(-1, (-1, size))
    # a group's zero point adds the same to all its tokens
    logits += torch.matmul(rows, zero).float().unsqueeze(-1)
    return logits.flatten(-2)[..., : key.length]


def _grouped_value_mix(weights: Tensor, value: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Weighted sums [B, Hkv, P, d] (fp32) of values quantised along channels: steps are folded into the weights."""
    batch, num_kv_heads, count, tokens = weights.shape
    groups, size = value.codes.shape[3], value.group_size
    step, zero = decode_scales(value.scale, value.zero, torch.float32)  # [B, Hkv, N, groups]
    scaled = (weights.unsqueeze(3) * step.permute(0, 1, 3, 2).unsqueeze(2)).to(dtype).transpose(2, 3)
    pieces = value.codes.unflatten(-1, (value.bits, -1))  # [B, Hkv, N, groups, bits, J]
    mixed = torch.zeros(batch, num_kv_heads, groups, count, size, dtype=torch.float32, device=weights.device)
    unpacker = Unpacker(dtype, weights.device)
    tile = tile_length(batch * num_kv_heads * groups * size, tokens)
    for first in range(0, tokens, tile):
        some = slice(first, first + tile)
        numbers = unpacker(pieces[:, :, some], value.bits).flatten(-2)  # [B, Hkv, n, groups, size]
        mixed += torch.matmul(scaled[..., some], numbers.permute(0, 1, 3, 2, 4))
    # a token's zero point adds the same to all channels of a group
    mixed += torch.matmul(weights, zero).transpose(2, 3).unsqueeze(-1)
    return mixed.transpose(2, 3).flatten(3)[..., : value.length]
