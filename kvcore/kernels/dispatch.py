"""The public functions: one each, the backend chosen here, callers never branch. Signatures as in the reference.

Legend: see `reference.py` and `reference_compressed.py`, which hold the shapes.
"""

from __future__ import annotations

from torch import Tensor

from kvcore.kernels import torch_compressed, torch_path
from kvcore.kernels.operands import Coefficients
from kvcore.quant import QuantizedTensor


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a few tokens over N entries: output [B, Hq, Q, dv], log-sum-exp [B, Hq, Q] (natural log).

    See `reference.decode_attention`.
    """
    return torch_path.decode_attention(query, key, value, scale, bias, mask)


def merge_states(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attentions over disjoint entries. See `reference.merge_states`."""
    return torch_path.merge_states(outputs, lses)


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
    """Coarse logits and routing scores [B, Hq, Q, S] of every span. See `reference.span_scores`."""
    return torch_path.span_scores(query, mean_key, lengths, scale, routing_query, routing_gain, directions, curvature)


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    page_size: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages or tokens chosen per KV head. See `reference.gather_attention`."""
    return torch_path.gather_attention(query, key, value, index, scale, page_size, bias)


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
    """Attention over factorised spans, in factor space. See `reference_compressed.lowrank_attention`."""
    return torch_compressed.lowrank_attention(
        query, key_factors, key_basis, value_factors, value_basis, lengths, scale, key_gain, value_gain, span_bias
    )


def depth_attention(
    query: Tensor, key: Coefficients, value: Coefficients, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over shared depth coefficients. See `reference_compressed.depth_attention`."""
    return torch_compressed.depth_attention(query, key, value, scale, bias)


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
    """Attention over quantised tokens and an exact window. See `reference_compressed.quantised_attention`."""
    return torch_compressed.quantised_attention(query, key, value, scale, bias, window_key, window_value, window_bias)
