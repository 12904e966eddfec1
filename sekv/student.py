"""Routing and mixed-resolution attention of training queries, all positions of a block at once, with gradients.

Decisions are the router's and the attention is `sekv.attention`'s, as in decoding; only the loop over steps is gone.
Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, P queries of a block, Q query tokens, E exact entries,
N tokens of the map, S spans, d head dimension. Queries are scaled by the attention scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.attention import Part, mixed_attention, span_parts, token_parts
from sekv.routing import Router, dot, token_logits
from sekv.training_memory import LayerMemory

HIDDEN = float("-inf")


@dataclass
class Routing:
    """What the router makes of some queries.

    Attributes:
        scores: [B, Hq, P, S] estimated log masses; -inf outside the map. S are the units: spans, or tokens.
        valid: bool [B, 1 or Hq, 1, S], the units that are decided about.
        lengths: [B, S] tokens of each unit.
        resident: [B, Hq, P] log mass of what is attended exactly.
        log_odds: [B, Hq, P, S] of the zoom probability.
        zoom: [B, Hq, P, S] decisions, straight-through.
        exact: [B, Hq, P, E] logits of the exact entries.
    """

    scores: Tensor
    valid: Tensor
    lengths: Tensor
    resident: Tensor
    log_odds: Tensor
    zoom: Tensor
    exact: Tensor


def route(router: Router, layer: int, query: Tensor, own: Tensor, memory: LayerMemory) -> Routing:
    """Scores and decisions of queries [B, Hq, P, d].

    Args:
        own: [B, Hq, P, Q] logits among the query tokens, the future hidden.
    """
    exact = dot(query, memory.exact_keys).float()
    if memory.exact_hidden is not None:
        exact = exact.masked_fill(memory.exact_hidden, HIDDEN)
    resident = torch.logaddexp(exact.logsumexp(-1), own.logsumexp(-1)).detach()
    group = query.shape[1] // memory.keys.shape[1]
    if memory.by_token:
        outside = memory.outside.repeat_interleave(group, dim=1)
        scores = token_logits(router.routed_query(layer, query), memory.summary).masked_fill(outside, HIDDEN)
        valid, lengths = ~outside, torch.ones_like(memory.span_of_token, dtype=torch.float32)
    else:
        scores = router.scores(layer, query, memory.summary)
        lengths = memory.summary.lengths
        valid = (lengths > 0)[:, None, None]
    margin = router.margin(layer, scores, None if memory.by_token else lengths, memory.tokens, resident)
    decided = margin
    if memory.by_token:  # a fetched token serves the whole query group
        best = margin.unflatten(1, (-1, group)).amax(dim=2, keepdim=True)
        decided = best.expand(-1, -1, group, -1, -1).flatten(1, 2)
    # the published loss supervises the probability itself, not its distance from the threshold
    log_odds = scores if router.config.decision == "probability" else margin / router.config.temperature
    return Routing(scores, valid, lengths, resident, log_odds, router.zoom(decided), exact)


def causal_logits(query: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, Hq, P, Q] (fp32) of queries at `positions` [P] over the query tokens' keys [B, Hkv, Q, d]."""
    future = torch.arange(keys.shape[2], device=keys.device) > positions[:, None]
    return dot(query, keys).float().masked_fill(future, HIDDEN)


def student_attention(
    router: Router,
    layer: int,
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    memory: LayerMemory,
) -> Tensor:
    """Mixed-resolution attention of a block of query tokens over the memory and, causally, the query tokens.

    Args:
        query: [B, Hq, P, d].
        positions: [P], their places among the query tokens.
        keys, values: [B, Hkv, Q, d] of all query tokens.
        memory: of the context.

    Returns:
        [B, Hq, P, d].
    """
    own = causal_logits(query, keys, positions)
    routing = route(router, layer, query, own, memory)
    rows = (memory.keys, memory.values)
    if memory.factors is not None:
        rows = memory.factors.rows(router, *rows)
    zoomed = dot(query, rows[0].to(query.dtype)).float()
    zoomed_values = rows[1].to(values.dtype)
    group = query.shape[1] // keys.shape[1]
    zoomed = zoomed.masked_fill(memory.outside.repeat_interleave(group, dim=1), HIDDEN)
    if memory.by_token:
        entries = (zoomed, zoomed_values, routing.scores, memory.coarse_values, routing.zoom, memory.span_of_token)
        parts = token_parts(*entries)
    else:
        coarse = routing.scores if memory.mass_weighted else _published_coarse(query, memory)
        coarse = coarse.masked_fill(~routing.valid, HIDDEN)
        parts = span_parts(zoomed, zoomed_values, coarse, memory.coarse_values, routing.zoom, memory.span_of_token)
    return mixed_attention([Part(own, values), Part(routing.exact, memory.exact_values), *parts])


def _published_coarse(query: Tensor, memory: LayerMemory) -> Tensor:
    """q·k̄ + log n [B, Hq, P, S] (article, section 3.3)."""
    assert memory.summary.mean_key is not None
    lengths = memory.summary.lengths
    return dot(query, memory.summary.mean_key.to(query.dtype)).float() + lengths.clamp_min(1).log()[:, None, None]
