"""The specification: plain fp32 torch, written to be checked by eye. Never used on a fast path.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N entries, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of Q query tokens over N entries, and its log-sum-exp.

    Args:
        query: [B, Hq, Q, d], post-RoPE.
        key: [B, Hkv, N, d], post-RoPE.
        value: [B, Hkv, N, dv].
        scale: factor on the logits, usually 1 / sqrt(d).
        bias: additive logits, broadcastable to [B, Hkv, G, Q, N]; -inf hides an entry.
        mask: boolean, broadcastable to the same; False hides an entry.

    Returns:
        Output [B, Hq, Q, dv] in the query's dtype (0 where nothing is visible) and log-sum-exp [B, Hq, Q]
        in fp32, natural log (-inf where nothing is visible).
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    logits = torch.einsum("bhgqd,bhnd->bhgqn", grouped, key.float()) * scale
    if bias is not None:
        logits = logits + bias.float()
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1))
    output = torch.einsum("bhgqn,bhnd->bhgqd", weights, value.float())
    return (
        output.reshape(batch, num_heads, num_queries, -1).to(query.dtype),
        lse.reshape(batch, num_heads, num_queries),
    )


def merge_states(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attentions over disjoint entries into the attention over their union.

    Args:
        outputs: partial outputs [B, Hq, Q, dv].
        lses: their log-sum-exps [B, Hq, Q], natural log.

    Returns:
        The merged output in the first output's dtype and the merged log-sum-exp in fp32.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(lse.isfinite(), lse, 0.0))
    output = sum(w.unsqueeze(-1) * o.float() for w, o in zip(weights, outputs, strict=True))
    assert isinstance(output, Tensor)
    return output.to(outputs[0].dtype), lse


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, padding: list[int], window: int | None = None
) -> Tensor:
    """Causal attention of the last Q of N tokens, with left padding and an optional sliding window.

    Args:
        query: [B, Hq, Q, d]; they are the newest Q tokens.
        key: [B, Hkv, N, d].
        value: [B, Hkv, N, dv].
        scale: factor on the logits.
        padding: left-padding tokens of each row, among the N.
        window: tokens a query may look back on, itself included; None means all.

    Returns:
        [B, Hq, Q, dv]; 0 at padding positions.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    positions = torch.arange(num_keys, device=key.device)
    query_positions = positions[num_keys - num_queries :]
    visible = positions[None, :] <= query_positions[:, None]
    if window is not None:
        visible &= positions[None, :] > query_positions[:, None] - window
    first = torch.tensor(padding, device=key.device)
    visible = visible[None] & (positions[None, None, :] >= first[:, None, None])
    bias = torch.zeros(visible.shape, device=key.device).masked_fill(~visible, float("-inf"))
    output, _ = decode_attention(query, key, value, scale, bias[:, None, None])
    real = query_positions[None, :] >= first[:, None]
    return output * real[:, None, :, None]


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    page_size: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages (or single tokens) chosen per KV head.

    Args:
        query: [B, Hq, Q, d].
        key: [B, Hkv, N, d].
        value: [B, Hkv, N, dv].
        index: integers [B, Hkv, P], pages of `page_size` neighbouring tokens; -1 is an empty place. The last page may
            be short.
        scale: factor on the logits.
        page_size: tokens of a page.
        bias: additive logits, broadcastable to [B, Hkv, G, Q, P * page_size].

    Returns:
        Output [B, Hq, Q, dv] and log-sum-exp [B, Hq, Q], as `decode_attention`.
    """
    offsets = torch.arange(page_size, device=index.device)
    tokens = (index.long().unsqueeze(-1) * page_size + offsets).flatten(2)
    live = (tokens >= 0) & (tokens < key.shape[2])
    where = tokens.clamp(0, max(key.shape[2] - 1, 0)).unsqueeze(-1)
    keys = key.gather(2, where.expand(-1, -1, -1, key.shape[3]))
    values = value.gather(2, where.expand(-1, -1, -1, value.shape[3]))
    return decode_attention(query, keys, values, scale, bias, live[:, :, None, None])


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
    """Coarse logits and routing scores of every span, from one pass over the mean keys (arXiv 2606.31145, 3.2-3.3).

    `coarse = scale q·k̄ + log n`, `score = gain (scale p·k̄) + ½ curvature Σ_i (scale p·v_i)² + log n`, p the routing
    query: first order without directions, second order with them.

    Args:
        query: [B, Hq, Q, d], post-RoPE.
        mean_key: [B, Hkv, S, d].
        lengths: [B, S] tokens of each span; 0 is padding.
        scale: factor on the dot products.
        routing_query: p, [B, Hq, Q, d]; None is the query itself.
        routing_gain: [B, Hq, S] factor on the first-order term (the published 1 / ‖W k̄‖), or None.
        directions: [B, Hkv, S, r, d] principal directions times σ / sqrt(n), or None.
        curvature: [Hq] factor on the second-order term, or None.

    Returns:
        coarse logits and scores, each [B, Hq, Q, S] in fp32; -inf for padding.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = mean_key.shape[1]
    routing = query if routing_query is None else routing_query

    def dot(queries: Tensor, equation: str, keys: Tensor) -> Tensor:
        grouped = queries.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads, num_queries, -1)
        return torch.einsum(equation, grouped * scale, keys.float()).flatten(1, 2)

    log_length = torch.where(lengths > 0, lengths.float(), 0.0).log()[:, None, None]
    coarse = dot(query, "bhgqd,bhsd->bhgqs", mean_key)
    score = dot(routing, "bhgqd,bhsd->bhgqs", mean_key)
    if routing_gain is not None:
        score = score * routing_gain.float().unsqueeze(2)
    if directions is not None:
        second = 0.5 * dot(routing, "bhgqd,bhsrd->bhgqsr", directions).square().sum(-1)
        score = score + (second if curvature is None else second * curvature.float()[:, None, None])
    return coarse + log_length, score + log_length


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """Sums over runs of neighbouring entries: the mass of every span from those of its tokens (sekv.md, section 2).

    Args:
        values: fp32 [B, Hq, Q, n].
        starts: int64 [B, S + 1], first entry of each run, and the end of the last; rising, at most n.

    Returns:
        fp32 [B, Hq, Q, S], 0 for empty runs.
    """
    place = torch.arange(values.shape[-1], device=values.device)
    inside = (place >= starts[:, :-1, None]) & (place < starts[:, 1:, None])  # [B, S, n]
    return torch.einsum("bhqn,bsn->bhqs", values.float(), inside.float())
