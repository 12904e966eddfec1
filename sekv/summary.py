"""Summaries of spans, computed once at prefill and without gradient. arXiv 2606.31145, section 3.2.

Legend: B batch rows, Hkv KV heads, G query heads per KV head, S spans, N tokens, d head dimension, r directions,
m sketch dimensions. `span_of_token` [B, N] (int64) is S where a token belongs to no span. Keys are post-RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.lowrank import check_finite

METRIC_FLOOR = 1e-5  # smallest eigenvalue of a query metric, relative to its largest


def span_lengths(span_of_token: Tensor, num_spans: int) -> Tensor:
    """Tokens of each span [B, S] (float)."""
    ones = torch.ones(span_of_token.shape, device=span_of_token.device)
    return ones.new_zeros(span_of_token.shape[0], num_spans + 1).scatter_add(1, span_of_token, ones)[:, :num_spans]


def span_means(rows: Tensor, span_of_token: Tensor, num_spans: int, weights: Tensor | None = None) -> Tensor:
    """(Weighted) mean [B, Hkv, S, d] of the rows [B, Hkv, N, d] of each span, in fp32; 0 for empty spans.

    Args:
        weights: [B, N] >= 0 (surprisal, section 3.2); where they sum to 0 inside a span they count as uniform.
    """
    if weights is None:
        weights = torch.ones(span_of_token.shape, device=rows.device)
    total = _sum_spans(weights[:, None, :, None], span_of_token, num_spans)
    flat = total <= 0
    if bool(flat.any()):
        uniform = torch.cat([flat[:, 0, :, 0], flat.new_ones(flat.shape[0], 1)], dim=1).gather(1, span_of_token)
        weights = torch.where(uniform, 1.0, weights)
        total = _sum_spans(weights[:, None, :, None], span_of_token, num_spans)
    sums = _sum_spans(rows.float() * weights[:, None, :, None], span_of_token, num_spans)
    return sums / total.clamp_min(1e-30)


def _sum_spans(rows: Tensor, span_of_token: Tensor, num_spans: int) -> Tensor:
    """Sums [B, H, S, x] of rows [B, H, N, x] over the tokens of each span."""
    index = span_of_token[:, None, :, None].expand(*rows.shape)
    out = rows.new_zeros(*rows.shape[:2], num_spans + 1, rows.shape[3])
    return out.scatter_add(2, index, rows)[:, :, :num_spans]


def span_directions(keys: Tensor, span_of_token: Tensor, mean_key: Tensor, rank: int) -> Tensor:
    """Top `rank` principal directions of each span's centred keys, times σ / sqrt(n): [B, Hkv, S, rank, d].

    They are the eigenvectors of the span's d x d covariance, so spans of any length go through one batched call.
    """
    batch, num_kv_heads, tokens, dim = keys.shape
    spans = mean_key.shape[2]
    result = keys.new_zeros(batch, num_kv_heads, spans, rank, dim, dtype=torch.float32)
    lengths = span_lengths(span_of_token, spans)
    for row in range(batch):
        order = span_of_token[row].argsort(stable=True)
        starts = (lengths[row].cumsum(0) - lengths[row]).long()
        width = int(lengths[row].max()) if spans else 0
        slot = torch.arange(width, device=keys.device)
        live = slot[None] < lengths[row][:, None]
        index = order[(starts[:, None] + slot[None]).clamp_max(tokens - 1)]  # [S, width]
        centred = (keys[row].float()[:, index] - mean_key[row][:, :, None]) * live[None, :, :, None]
        scale = lengths[row].clamp_min(1).rsqrt()[None, :, None, None]
        _, sigma, basis = torch.linalg.svd(centred * scale, full_matrices=False)
        kept = min(rank, sigma.shape[-1])
        result[row, :, :, :kept] = (sigma.unsqueeze(-1) * basis)[:, :, :kept]
    return result


def sketch_basis(
    keys: Tensor, visible: Tensor, query_moment: Tensor | None, dims: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The m directions of a head's keys that matter most for its logits.

    With key covariance C and query second moment M = E[q qᵀ], the rank-m approximation of the logits (q·k) with the
    least mean squared error keeps the top eigenvectors of M^½ C M^½; without M these are the principal directions.

    Args:
        keys: [B, Hkv, N, d].
        visible: [B, N] tokens that count.
        query_moment: [B, Hkv, d, d] second moment of the group's queries, or None for plain principal directions.
        dims: m.

    Returns:
        centre [B, Hkv, d], analysis rows [B, Hkv, m, d] (coordinates = rows · (k - centre)) and synthesis rows
        [B, Hkv, m, d] (k ≈ centre + Σ coordinate · row), all fp32.
    """
    weight = visible[:, None, :, None].float()
    count = weight.sum(dim=2).clamp_min(1.0)
    centre = (keys.float() * weight).sum(dim=2) / count
    centred = (keys.float() - centre.unsqueeze(2)) * weight
    covariance = centred.mT @ centred / count.unsqueeze(-1)
    if query_moment is None:
        vectors = _leading(covariance, dims).mT
        return centre, vectors, vectors
    root, inverse = _roots(query_moment.float())
    vectors = _leading(root @ covariance @ root, dims)
    return centre, (root @ vectors).mT, (inverse @ vectors).mT


def _leading(matrix: Tensor, count: int) -> Tensor:
    """Leading eigenvectors [..., d, count] of symmetric matrices, the largest entry of each positive."""
    vectors = torch.linalg.eigh(matrix)[1].flip(-1)[..., :count]
    largest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root and inverse square root of positive semi-definite [..., d, d], floored."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp_min(1e-12).maximum(values.amax(-1, keepdim=True) * METRIC_FLOOR)
    root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT
    inverse = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    return root, inverse


def check_keys(keys: Tensor, layer: int) -> None:
    """Refuse keys that are not finite.

    Raises:
        ValueError: naming the layer.
    """
    check_finite(keys, f"layer {layer}, keys")
