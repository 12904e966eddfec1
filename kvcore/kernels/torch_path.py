"""Vectorised torch path of the kernels: the fast path on CPUs and the fallback on any device.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N entries, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.kernels.operands import grouped_logits_bias

# Queries per block where a mask has to exist: bounds the mask to 512 x N booleans.
QUERY_BLOCK = 512
# Keys of a head from which on they are the left factor of their products where that pays.
LONG_KEYS = 4096


def group_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, Q, d] -> [B, Hkv, G * Q, d], so that one matrix product reads each key once per KV head."""
    batch, num_heads, num_queries, head_dim = query.shape
    return query.reshape(batch, num_kv_heads, num_heads // num_kv_heads * num_queries, head_dim)


def causal_bias(num_queries: int, device: torch.device) -> Tensor | None:
    """Additive causal bias [Q, Q] of the new tokens among themselves; None for a single token."""
    if num_queries == 1:
        return None
    return torch.full((num_queries, num_queries), float("-inf"), device=device).triu_(1)


def _logits(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, group_size: int) -> Tensor:
    """fp32 logits [B, Hkv, G, Q, N] of grouped queries [B, Hkv, G * Q, d]."""
    batch, num_kv_heads, rows, _ = query.shape
    logits = _products_with_keys(query * scale, key).float()
    logits = logits.view(batch, num_kv_heads, group_size, rows // group_size, key.shape[2])
    return logits if bias is None else logits + bias


def _products_with_keys(rows: Tensor, key: Tensor) -> Tensor:
    """`rows @ keyᵀ` [B, Hkv, P, N]. On CPUs torch copies long keys transposed when there is but one matrix, and in fp32
    it is twice as fast (32K keys) with the keys as the left factor."""
    alone = key.shape[0] * key.shape[1] == 1
    if key.device.type == "cpu" and key.shape[2] >= LONG_KEYS and (alone or key.dtype == torch.float32):
        return torch.matmul(key, rows.mT).mT.contiguous()
    return torch.matmul(rows, key.mT)


def softmax_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp (natural log); overwrites the logits when it may.

    Args:
        logits: fp32 [..., N], owned by the caller and not used afterwards.

    Returns:
        Weights [..., N] (0 where nothing is visible) and log-sum-exp [...] (-inf there).
    """
    if logits.requires_grad or not logits.shape[-1]:
        lse = torch.logsumexp(logits, dim=-1)
        return torch.exp(logits - lse.nan_to_num(neginf=0.0).unsqueeze(-1)), lse
    top = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(top.nan_to_num(neginf=0.0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    return weights.mul_(total.reciprocal().nan_to_num_(posinf=0.0)), lse


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`."""
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    bias = grouped_logits_bias(bias, mask)
    logits = _logits(group_queries(query, num_kv_heads), key, scale, bias, num_heads // num_kv_heads)
    weights, lse = softmax_weights(logits)
    output = torch.matmul(weights.flatten(2, 3).to(value.dtype), value)
    return output.to(query.dtype).view(batch, num_heads, num_queries, -1), lse.view(batch, num_heads, num_queries)


def merge_states(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merge_states`."""
    stacked = torch.stack(lses)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.nan_to_num(neginf=0.0)).unsqueeze(-1)
    output = (weights * torch.stack(outputs).float()).sum(0)
    return output.to(outputs[0].dtype), lse


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    page_size: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.gather_attention`. Whole pages are copied at once where the layout allows it."""
    batch, num_kv_heads, num_keys, _ = key.shape
    offsets = torch.arange(page_size, device=index.device)
    tokens = (index.long().unsqueeze(-1) * page_size + offsets).flatten(2)
    live = (tokens >= 0) & (tokens < num_keys)
    paged = num_keys % page_size == 0 and key.is_contiguous() and value.is_contiguous()
    step = page_size if paged else 1
    line = (index.long() if paged else tokens).clamp(0, max(num_keys // step - 1, 0))
    head = torch.arange(batch * num_kv_heads, device=index.device).view(batch, num_kv_heads, 1)
    line = (line + head * (num_keys // step)).flatten()
    picked = [
        x.reshape(-1, step * x.shape[-1]).index_select(0, line).view(batch, num_kv_heads, -1, x.shape[-1])
        for x in (key, value)
    ]
    return decode_attention(query, picked[0], picked[1], scale, bias, live[:, :, None, None])


def span_scores(
    query: Tensor,
    mean_key: Tensor,
    lengths: Tensor,
    scale: float,
    routing_query: Tensor | None = None,
    routing_gain: Tensor | None = None,
    directions: Tensor | None = None,
    curvature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.span_scores`. Query and routing query share one product with the mean keys."""
    num_kv_heads, num_spans = mean_key.shape[1:3]
    log_length = lengths.float().log()[:, None, None]
    rows = group_queries(query, num_kv_heads) * scale
    routing = rows if routing_query is None else group_queries(routing_query, num_kv_heads) * scale
    both = rows if routing_query is None else torch.cat([rows, routing], dim=2)
    products = torch.matmul(both, mean_key.mT).float().split(rows.shape[2], dim=2)
    shape = (*query.shape[:3], num_spans)
    coarse, score = products[0].reshape(shape), products[-1].reshape(shape)
    if routing_gain is not None:
        score = score * routing_gain.unsqueeze(2)
    if directions is not None:
        along = torch.matmul(routing, directions.flatten(2, 3).mT).float().unflatten(-1, directions.shape[2:4])
        second = along.square().sum(-1).reshape(shape)
        score = score + (0.5 * second if curvature is None else 0.5 * curvature[:, None, None] * second)
    return coarse + log_length, score + log_length


def attend_parts(query: Tensor, parts: list[tuple[Tensor, Tensor, Tensor | None]], scale: float) -> Tensor:
    """One softmax over several parts: their logits are laid side by side, keys and values are not copied.

    Args:
        query: [B, Hq, Q, d], post-RoPE.
        parts: (key [B, Hkv, N_i, d], value [B, Hkv, N_i, dv], bias or None), bias as in `decode_attention`.
        scale: factor on the logits.

    Returns:
        [B, Hq, Q, dv] in the query's dtype. Every query must see at least one entry.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = parts[0][0].shape[1]
    grouped = group_queries(query, num_kv_heads)
    group_size = num_heads // num_kv_heads
    logits = [_logits(grouped, key, scale, bias, group_size) for key, _, bias in parts]
    weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1).flatten(2, 3)
    output: Tensor | None = None
    for weight, (_, value, _) in zip(weights.split([p[0].shape[2] for p in parts], dim=-1), parts, strict=True):
        partial = torch.matmul(weight.to(value.dtype), value)
        output = partial if output is None else output + partial
    assert output is not None
    return output.to(query.dtype).view(batch, num_heads, num_queries, -1)


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, padding: list[int], window: int | None = None
) -> Tensor:
    """See `reference.prefill_attention`. Rows are sliced past their padding, so no T x T mask ever exists."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    start = num_keys - num_queries
    if not any(padding):
        return _causal_row(query, key, value, scale, window)
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for row, pad in enumerate(padding):
        first = max(pad - start, 0)
        if first < num_queries:
            one = slice(row, row + 1)
            output[one, :, first:] = _causal_row(
                query[one, :, first:], key[one, :, pad:], value[one, :, pad:], scale, window
            )
    return output


def _causal_row(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of rows without padding."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if num_queries == num_keys and (window is None or window >= num_keys):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    blocks = []
    for begin in range(0, num_queries, QUERY_BLOCK):
        block = query[:, :, begin : begin + QUERY_BLOCK]
        last = num_keys - num_queries + begin + block.shape[2]
        first = 0 if window is None else max(0, last - block.shape[2] - window + 1)
        keys, values = key[:, :, first:last], value[:, :, first:last]
        positions = torch.arange(first, last, device=key.device)
        rows = positions[-block.shape[2] :, None]
        visible = positions[None, :] <= rows
        if window is not None:
            visible &= positions[None, :] > rows - window
        blocks.append(
            F.scaled_dot_product_attention(block, keys, values, attn_mask=visible, scale=scale, enable_gqa=gqa)
        )
    return torch.cat(blocks, dim=2)


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """See `reference.segment_sums`; on a GPU this is torch's own kernel."""
    rows = values.flatten(1, -2).shape[1]
    offsets = starts[:, None].expand(-1, rows, -1).flatten(0, 1)
    sums = torch.segment_reduce(values.flatten(0, -2), "sum", offsets=offsets, axis=1, unsafe=True)
    return sums.view(*values.shape[:-1], -1)
