"""The specification of attention over compressed entries: plain fp32 torch that rebuilds keys and values.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N tokens, M spans, n tokens of the longest
span, R components, m coordinates, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.kernels.operands import Coefficients
from kvcore.kernels.plane_operands import CoefficientPlanes, add_planes
from kvcore.kernels.reference import decode_attention
from kvcore.quant import QuantizedTensor


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
    """Attention over the tokens of spans kept as `U diag(gain) Vᵀ` (arXiv 2606.31145, 3.2).

    Args:
        query: [B, Hq, Q, d].
        key_factors: U of the keys, [B, Hkv, M, n, R]; rows beyond a span's length do not count.
        key_basis: Vᵀ of the keys, [B, Hkv, M, R, d].
        value_factors: U of the values, [B, Hkv, M, n, R'].
        value_basis: Vᵀ of the values, [B, Hkv, M, R', dv].
        lengths: [B, Hkv, M] tokens of each span; 0 is an empty place.
        scale: factor on the logits.
        key_gain: gated singular values g σ, [B, Hkv, M, R], or None for 1.
        value_gain: [B, Hkv, M, R'], or None for 1.
        span_bias: additive logits per span, broadcastable to [B, Hkv, G, Q, M]; -inf where a query head does not
            expand the span.

    Returns:
        Output [B, Hq, Q, dv] in the query's dtype and log-sum-exp [B, Hq, Q] in fp32, natural log.
    """
    keys = _rebuilt(key_factors, key_basis, key_gain)
    values = _rebuilt(value_factors, value_basis, value_gain)
    longest = key_factors.shape[3]
    live = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(-1)
    bias = None if span_bias is None else span_bias.float().repeat_interleave(longest, dim=-1)
    return decode_attention(query, keys, values, scale, bias, live.flatten(2)[:, :, None, None])


def _rebuilt(factors: Tensor, basis: Tensor, gain: Tensor | None) -> Tensor:
    """Token-level vectors [B, Hkv, M * n, d]."""
    gained = factors.float() if gain is None else factors.float() * gain.float().unsqueeze(3)
    return torch.matmul(gained, basis.float()).flatten(2, 3)


def depth_attention(
    query: Tensor, key: Coefficients, value: Coefficients, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over tokens whose keys and values are shared depth coefficients (arXiv 2607.06519, eq. 1).

    Args:
        query: [B, Hq, Q, d].
        key: coefficients, basis, mean and residuals of the layer's keys.
        value: the same of the values, over the same tokens in the same order.
        scale: factor on the logits.
        bias: additive logits, broadcastable to [B, Hkv, G, Q, N].

    Returns:
        Output [B, Hq, Q, d] in the query's dtype and log-sum-exp [B, Hq, Q] in fp32, natural log.
    """
    return decode_attention(query, _expanded(key), _expanded(value), scale, bias)


def _expanded(x: Coefficients) -> Tensor:
    """[B, Hkv, N, d]."""
    numbers = torch.cat([band.values() for band in x.bands], dim=2)
    tokens = torch.matmul(numbers.transpose(-1, -2), x.basis.float())
    if x.mean is not None:
        tokens = tokens + x.mean.float().unsqueeze(2)
    if x.residual is not None:
        residual = x.residual.float()
        if x.residual_basis is not None:
            residual = torch.matmul(residual, x.residual_basis.float())
        tokens[:, :, : residual.shape[2]] += residual
    return tokens


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
    """Attention over quantised tokens and an exact window (KIVI, arXiv 2402.02750).

    Args:
        query: [B, Hq, Q, d].
        key: [B, Hkv, N, d], quantised along tokens (one scale per channel and group of tokens).
        value: [B, Hkv, N, d], quantised along channels (one scale per token and group of channels).
        scale: factor on the logits.
        bias: additive logits of the quantised tokens, broadcastable to [B, Hkv, G, Q, N].
        window_key, window_value: [B, Hkv, W, d] exact tokens, or None.
        window_bias: additive logits of the window, broadcastable to [B, Hkv, G, Q, W].

    Returns:
        Output [B, Hq, Q, d] in the query's dtype and log-sum-exp [B, Hq, Q] in fp32, natural log.
    """
    keys, values = key.dequantize(), value.dequantize()
    if window_key is None or window_value is None:
        return decode_attention(query, keys, values, scale, bias)
    shape = (query.shape[0], keys.shape[1], query.shape[1] // keys.shape[1], query.shape[2])
    parts = []
    for part, length in ((bias, keys.shape[2]), (window_bias, window_key.shape[2])):
        zeros = torch.zeros(*shape, length, device=query.device)
        parts.append(zeros if part is None else zeros + part.float())
    keys = torch.cat([keys, window_key.float()], dim=2)
    values = torch.cat([values, window_value.float()], dim=2)
    return decode_attention(query, keys, values, scale, torch.cat(parts, dim=-1))


def coordinate_logits(query: Tensor, codes: Tensor, parts: list[tuple[int, int]], offset: Tensor) -> Tensor:
    """Estimated logits of tokens that are kept as a few coordinates of low precision (sekv.md, section 2).

    Args:
        query: [B, Hq, Q, m], the query's own coordinates times the scale of the logits and the steps of the codes.
        codes: uint8 [B, Hkv, bytes, N]. A part of n bytes a token keeps coordinate j in the highest bits of byte j,
            coordinate n + j in the next ones, and so on; parts follow one another.
        parts: (coordinates, bits) of every part, bits 2, 4 or 8.
        offset: [B, Hq, Q], added to the logits of all tokens.

    Returns:
        fp32 [B, Hq, Q, N].
    """
    pieces, byte = [], 0
    for dims, bits in parts:
        packed = codes[:, :, byte : byte + dims * bits // 8].int()
        pieces += [(packed >> shift) & (2**bits - 1) for shift in range(8 - bits, -1, -bits)]
        byte += dims * bits // 8
    coordinates = torch.cat(pieces, dim=2).float()  # [B, Hkv, m, N]
    repeated = coordinates.repeat_interleave(query.shape[1] // codes.shape[1], dim=1)
    return torch.matmul(query.float(), repeated) + offset.float().unsqueeze(-1)


def plane_codes(codes: CoefficientPlanes) -> Tensor:
    """The codes themselves: uint8 [S, M, R]."""
    whole = codes.packed[0].new_zeros(codes.packed[0].shape[0], codes.lines.places, codes.num_coefficients)
    for packed, (width, runs) in zip(codes.packed, codes.layout, strict=True):
        fields = torch.cat([(packed >> place) & (2**width - 1) for place in range(0, 8, width)], dim=1)
        add_planes(whole, fields, ((width, runs),))
    return codes.lines.to_tokens(whole.mT).mT


def plane_logits(rows: Tensor, codes: CoefficientPlanes) -> Tensor:
    """Products of rows with codes that are kept as planes: what a query gives every token (freqdepth.md, section 4).

    Args:
        rows: [S, P, R].
        codes: [S, M, R] in planes.

    Returns:
        fp32 [S, P, M].
    """
    return torch.matmul(rows.float(), plane_codes(codes).float().mT)


def plane_mix(weights: Tensor, codes: CoefficientPlanes) -> Tensor:
    """Weights [S, P, M] times codes that are kept as planes: fp32 [S, P, R]. See `plane_logits`."""
    return torch.matmul(weights.float(), plane_codes(codes).float())
