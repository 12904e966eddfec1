"""Routing: how much attention mass a query is expected to give each span, and whether to zoom into it.

The one implementation used by training and by the cache. arXiv 2606.31145, sections 3.2 and 3.3.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, S spans, N tokens of the spans,
d head dimension, r second-order directions, m sketch dimensions, k rank of the maps, R rank of the factors.
Queries are scaled by the attention scale (1 / sqrt(d)) before they arrive here; keys are post-RoPE; logs are natural.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sekv.gates import RankGate

MapKind = Literal["none", "tied", "untied"]
SummaryKind = Literal["mean", "second_order", "sketch"]
Decision = Literal["probability", "mass"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Shape and form of a router.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: the backbone's L, Hq, Hkv, d.
        maps: `none` (the plain attention logit of the summary), `tied` (published: one W for query and key, the
            projected key normalised), `untied` (query and key maps of their own, added to the plain logit).
        summary: `mean`, `second_order` (mean + directions), `sketch` (low-bit coordinates of every key).
        decision: `probability` (published: sigmoid of the score against tau) or `mass` (expected attention mass per
            token, in multiples of the uniform share 1 / tokens, against tau: the number of spans follows the query).
        map_rank: d' of the tied map (published 32), k of the untied maps.
        directions: r, second-order directions per span.
        global_threshold: one tau for all layers and heads instead of one each.
        initial_tau: first value of tau; the published 0.05 is a probability, mass thresholds are multiples of 1 / N.
        temperature: of the straight-through estimator (published 0.1); for `mass` it applies to log multiples.
        max_rank: R, most components of a span's factors.
        gates: whether the rank gate decides which components survive.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    maps: MapKind = "untied"
    summary: SummaryKind = "sketch"
    decision: Decision = "mass"
    map_rank: int = 32
    directions: int = 1
    global_threshold: bool = False
    initial_tau: float = 0.5
    temperature: float = 1.0
    max_rank: int = 32
    gates: bool = False

    def __post_init__(self) -> None:
        for name, kinds in (("maps", MapKind), ("summary", SummaryKind), ("decision", Decision)):
            if getattr(self, name) not in get_args(kinds):
                valid = ", ".join(get_args(kinds))
                raise ValueError(f"{name} must be one of {valid}; received {getattr(self, name)!r}")
        if self.initial_tau <= 0 or (self.decision == "probability" and self.initial_tau >= 1):
            raise ValueError(f"initial_tau must be > 0, and < 1 for probabilities; received {self.initial_tau}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0; received {self.temperature}")


@dataclass
class Summary:
    """What routing knows of the spans of one layer. Padding spans have length 0.

    Attributes:
        lengths: [B, S] tokens of each span (float).
        mean_key: [B, Hkv, S, d] (weighted) mean key; None for `sketch`.
        directions: [B, Hkv, S, r, d], principal directions of the centred keys times sigma / sqrt(n); or None.
        coordinates: [B, Hkv, N, m] (dequantised) coordinates of every key on `basis`; or None.
        basis: [B, Hkv, m, d], rows; or None.
        centre: [B, Hkv, d], what was subtracted from the keys before projecting; or None.
        span_of_token: [B, N] index of each token's span (int64), S for padding tokens; or None.
    """

    lengths: Tensor
    mean_key: Tensor | None = None
    directions: Tensor | None = None
    coordinates: Tensor | None = None
    basis: Tensor | None = None
    centre: Tensor | None = None
    span_of_token: Tensor | None = None


class Router(nn.Module):
    """Maps, thresholds and rank gate of every layer; freshly built, it is the good untrained router."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self._plain = False
        layers, heads, dim, rank = config.num_layers, config.num_heads, config.head_dim, config.map_rank
        generator = torch.Generator().manual_seed(0)
        if config.maps == "tied":
            self.tied_map = nn.Parameter(torch.randn(layers, heads, rank, dim, generator=generator) * dim**-0.5)
        if config.maps == "untied":
            # the query side starts near zero: the map adds next to nothing until it is trained
            small = torch.randn(layers, heads, rank, dim, generator=generator) * (1e-3 * dim**-0.5)
            self.query_map = nn.Parameter(small)
            self.key_map = nn.Parameter(torch.randn(layers, heads, rank, dim, generator=generator) * dim**-0.5)
        if config.maps != "tied":
            self.log_gain = nn.Parameter(torch.zeros(layers, heads))
        if config.summary == "second_order":
            self.log_curvature = nn.Parameter(torch.zeros(layers, heads))
        shape = (1, 1) if config.global_threshold else (layers, heads)
        first = torch.full(shape, config.initial_tau)
        self.raw_tau = nn.Parameter(first.logit() if config.decision == "probability" else first.log())
        if config.gates:
            self.gate = RankGate(config.head_dim, config.max_rank)

    def freeze(self) -> Router:
        """For inference: no gradients; a query that routing would not change is passed on as it is."""
        self.requires_grad_(False).eval()
        self._plain = self.config.maps == "none" and not bool(self.log_gain.any())
        return self

    # --- scores
    def routed_query(self, layer: int, query: Tensor) -> Tensor:
        """The query whose plain dot product with a key is the routing score: (I + key_mapᵀ query_map) q, or WᵀW q.

        Folding the maps into the query means that routing stores nothing beside the summary itself.

        Args:
            query: [B, Hq, Q, d], scaled.

        Returns:
            [B, Hq, Q, d].
        """
        if self._plain:
            return query
        if self.config.maps == "none":
            return query * self.log_gain[layer].exp().to(query.dtype)[:, None, None]
        if self.config.maps == "tied":
            weight = self.tied_map[layer].to(query.dtype)
            return (query @ weight.mT) @ weight
        mapped = (query @ self.query_map[layer].to(query.dtype).mT) @ self.key_map[layer].to(query.dtype)
        return (query + mapped) * self.log_gain[layer].exp().to(query.dtype)[:, None, None]

    def scores(self, layer: int, query: Tensor, summary: Summary) -> Tensor:
        """Score [B, Hq, Q, S] of every span, in fp32; -inf for padding spans.

        `tied` (published, sekv.md 1.6): (W q)·(W k̄) / ‖W k̄‖ / sqrt(d') + log n. Otherwise the expected
        log of the span's unnormalised attention mass.
        """
        routed = self.routed_query(layer, query)
        if self.config.summary == "sketch":
            return self.span_mass(token_logits(routed, summary), summary)
        log_length = summary.lengths.log()[:, None, None]
        assert summary.mean_key is not None
        score = dot(routed, summary.mean_key).float()
        if self.config.maps == "tied":
            # undo the attention scale: the published score divides by sqrt(d') instead
            score = score * self.config.head_dim**0.5 / self.key_norm(layer, summary.mean_key) * self._tied_scale
        if summary.directions is not None:
            score = score + self._curvature(layer, routed, summary.directions)
        return score + log_length

    @property
    def _tied_scale(self) -> float:
        return self.config.map_rank**-0.5

    def key_norm(self, layer: int, mean_key: Tensor) -> Tensor:
        """‖W k̄‖ of every query head: [B, Hq, 1, S]."""
        batch, num_kv_heads, spans, dim = mean_key.shape
        weight = self.tied_map[layer].float().view(num_kv_heads, -1, self.config.map_rank, dim)
        projected = torch.einsum("hgkd,bhsd->bhgsk", weight, mean_key.float())
        return projected.norm(dim=-1).clamp_min(1e-6).reshape(batch, -1, 1, spans)

    def _curvature(self, layer: int, routed: Tensor, directions: Tensor) -> Tensor:
        """½ Σ_i (q·v_i)² σ_i²/n [B, Hq, Q, S]: the second-order term of log Σ_t exp(q·k_t)."""
        batch, num_kv_heads, spans, rank, dim = directions.shape
        along = dot(routed, directions.reshape(batch, num_kv_heads, spans * rank, dim)).float()
        term = 0.5 * along.unflatten(-1, (spans, rank)).square().sum(-1)
        return term * self.log_curvature[layer].exp()[:, None, None]

    def span_mass(self, logits: Tensor, summary: Summary) -> Tensor:
        """log Σ exp of the token logits [B, Hq, Q, N] inside every span: [B, Hq, Q, S]."""
        assert summary.span_of_token is not None
        spans = summary.lengths.shape[1]
        top = logits.detach().amax(dim=-1, keepdim=True)
        mass = torch.exp(logits - top)
        index = summary.span_of_token[:, None, None].expand(*logits.shape)
        total = mass.new_zeros(*logits.shape[:3], spans + 1).scatter_add(-1, index, mass)[..., :spans]
        return (total.clamp_min(1e-30).log() + top).masked_fill(summary.lengths[:, None, None] == 0, float("-inf"))

    # --- decisions
    def tau(self, layer: int) -> Tensor:
        """Thresholds [Hq, 1, 1] of a layer: probabilities, or multiples of the uniform share."""
        raw = self.raw_tau[0 if self.config.global_threshold else layer]
        return (raw.sigmoid() if self.config.decision == "probability" else raw.exp())[:, None, None]

    def level(self, layer: int, scores: Tensor, tokens: Tensor, resident_lse: Tensor) -> Tensor:
        """What a token's estimated logit must reach to be zoomed into, [B, Hq, Q, 1] (decision `mass`).

        Args:
            scores: [B, Hq, Q, S] from `scores`, or token logits; they make up the total mass with the resident part.
            tokens: [B] tokens that the query looks back on.
            resident_lse: [B, Hq, Q] log-sum-exp of the exactly kept entries.
        """
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), resident_lse)
        return (total + self.tau(layer)[..., 0].log() - tokens.log()[:, None, None]).unsqueeze(-1)

    def margin(
        self, layer: int, scores: Tensor, lengths: Tensor | None, tokens: Tensor, resident_lse: Tensor
    ) -> Tensor:
        """How far every span is above its threshold [B, Hq, Q, S]: zoomed where >= 0, -inf for padding spans.

        `probability`: sigmoid(score) - tau. `mass`: log(share of the attention mass per token * tokens) - log tau.

        Args:
            lengths: [B, S] tokens of each span; None when every unit is one token.
            scores, tokens, resident_lse: see `level`.
        """
        if self.config.decision == "probability":
            return (scores.sigmoid() - self.tau(layer)).masked_fill(scores == float("-inf"), float("-inf"))
        margin = scores - self.level(layer, scores, tokens, resident_lse)
        return margin if lengths is None else margin - lengths.clamp_min(1).log()[:, None, None]

    def multiples(self, layer: int, shares: Tensor, tokens: Tensor) -> Tensor:
        """Shares [B, Hq, Q, n] of the attention mass in multiples of the threshold: zoomed where >= 1. This is `margin`
        of single tokens (decision `mass`) without its logarithm.

        Args:
            tokens: [B] tokens that the query looks back on.
        """
        return shares * (tokens[:, None, None, None] / self.tau(layer))

    def zoom(self, margin: Tensor) -> Tensor:
        """Straight-through zoom decisions z [B, Hq, Q, S]: exactly 0 or 1 forward, the relaxed gradient backward."""
        return straight_through(margin / self.config.temperature)

    def rank_gates(self, sigma: Tensor, mean_key: Tensor) -> Tensor:
        """Gates [..., R] in (0, 1) of factor components; ones when the form has no gates."""
        return self.gate(sigma, mean_key) if self.config.gates else torch.ones_like(sigma)


def straight_through(margin: Tensor) -> Tensor:
    """1 where margin >= 0 else 0, with the gradient of sigmoid(margin)."""
    soft = margin.sigmoid()
    return (margin >= 0).to(soft.dtype) + (soft - soft.detach())


def token_logits(routed: Tensor, summary: Summary) -> Tensor:
    """Estimated attention logits [B, Hq, Q, N] of every token from its sketch, in fp32; -inf for padding tokens."""
    assert summary.coordinates is not None and summary.basis is not None and summary.centre is not None
    on_basis = dot(routed, summary.basis)
    logits = dot(on_basis, summary.coordinates).float()
    logits = logits + dot(routed, summary.centre.unsqueeze(2)).float()
    assert summary.span_of_token is not None
    return logits.masked_fill((summary.span_of_token == summary.lengths.shape[1])[:, None, None], float("-inf"))


def dot(query: Tensor, keys: Tensor) -> Tensor:
    """[B, Hq, Q, x] · [B, Hkv, n, x] -> [B, Hq, Q, n]; each key is read once per KV head."""
    batch, num_heads, num_queries, width = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, width)
    return (grouped @ keys.to(query.dtype).mT).view(batch, num_heads, num_queries, -1)
