"""The specification: plain fp32 torch, written to be checked by eye. Never used on a fast path.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N entries, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of Q query tokens over N entries, and its log-sum-exp.

    Args:
        query: [B, Hq, Q, d], post-RoPE.
        key: [B, Hkv, N, d], post-RoPE.
        value: [B, Hkv, N, dv].
        scale: factor on the logits, usually 1 / sqrt(d).
        bias: additive logits, broadcastable to [B, Hkv, G, Q, N]; -inf hides an entry.

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
