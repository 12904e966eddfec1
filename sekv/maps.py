"""The coarse side of a layer: what it routes with, what it decides in one decode step, and what stands for the rest.

`TokenMap` (default) zooms into single tokens by their sketch; `SpanMap` (published) zooms into whole spans.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, S spans, N tokens of the map, C slots, M fetched
tokens, d head dimension, r directions. Queries are scaled; index N means "no token", span S means "no span".
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.state import BatchedState
from sekv.attention import Part
from sekv.routing import Router, Summary, dot
from sekv.sketch import Sketch

HIDDEN = float("-inf")


@dataclass
class StepView:
    """What a map may know in one decode step of one layer.

    Attributes:
        router, layer: trained routing and the layer's index.
        query: [B, Hq, 1, d], scaled.
        span_of_token: int64 [B, N + 1], the last column S.
        lengths: [B, S] tokens of each span.
        tokens: [B] tokens so far (float).
        slot_token: int64 [B, Hkv, C], N for empty slots.
        slot_logits: [B, Hq, 1, C], -inf for empty slots.
        recent_lse: [B, Hq, 1] log-sum-exp over the local window.
        room: [B] tokens per KV head that may be fetched.
        use_coarse: whether what is not zoomed into keeps an entry.
        ragged: whether some token is neither in a span nor in a slot for good (padding).
        count: whether to count what each query head zooms into.
    """

    router: Router
    layer: int
    query: Tensor
    span_of_token: Tensor
    lengths: Tensor
    tokens: Tensor
    slot_token: Tensor
    slot_logits: Tensor
    recent_lse: Tensor
    room: Tensor
    use_coarse: bool = True
    ragged: bool = True
    count: bool = True


class Decision:
    """What one step zooms into.

    Attributes:
        want: [B, Hkv, N] tokens to fetch where >= 0, the larger the sooner.
        slot_used: [B, Hkv, C] bool, slots whose tokens are zoomed into.
        zoomed: [B, Hq] units zoomed into by each query head (float), or None when they are not counted.
        slot_visible: [B, Hq, 1, C] bool, or None when every query head attends to every slot.
    """

    want: Tensor
    slot_used: Tensor
    zoomed: Tensor | None = None
    slot_visible: Tensor | None = None

    @abstractmethod
    def fetched_visible(self, token: Tensor) -> Tensor | None:
        """[B, Hq, 1, M] bool of the fetched tokens [B, Hkv, M] (N at padding); None when all heads see all."""

    @abstractmethod
    def tail(self, token: Tensor | None) -> Part | None:
        """The coarse entries once the tokens [B, Hkv, M] are fetched."""


class TokenMap(BatchedState):
    """Sketch of every token + one mean value per span.

    Attributes:
        sketch: logit estimates of every token.
        coarse_values: [B, Hkv, S, d].
    """

    def __init__(self, sketch: Sketch, coarse_values: Tensor) -> None:
        self.sketch, self.coarse_values = sketch, coarse_values

    def decide(self, view: StepView) -> TokenDecision:
        """Zoom into the tokens whose expected share of the attention mass reaches the threshold."""
        estimate = F.pad(self.sketch.logits(view.router.routed_query(view.layer, view.query)), (0, 1), value=HIDDEN)
        if view.ragged:
            outside = (view.span_of_token == view.lengths.shape[1])[:, None, None]
            estimate = estimate.masked_fill_(outside, HIDDEN)
        _hide_(estimate, view.slot_token)
        exact = torch.logaddexp(torch.logsumexp(view.slot_logits, dim=-1), view.recent_lse)
        level = view.router.level(view.layer, estimate, view.tokens, exact)
        return TokenDecision(self, view, estimate, level)

    def append(self, keys: Tensor, analysis: Tensor, coarse_values: Tensor) -> None:
        """Add tokens [B, Hkv, n, d] and the mean values [B, Hkv, s, d] of their spans."""
        self.sketch.append(keys, analysis)
        self.coarse_values = torch.cat([self.coarse_values, coarse_values.to(self.coarse_values.dtype)], dim=2)


class TokenDecision(Decision):
    """See `TokenMap`. A fetched token serves the whole query group."""

    def __init__(self, owner: TokenMap, view: StepView, estimate: Tensor, level: Tensor) -> None:
        self.owner, self.view, self.estimate = owner, view, estimate
        num_kv_heads = view.slot_token.shape[1]
        margin = (estimate - level).squeeze(2)
        slot_margin = (view.slot_logits - level).squeeze(2)
        # read before `tail` hides what is fetched
        self.want = margin.unflatten(1, (num_kv_heads, -1)).amax(2)[..., :-1]
        self.slot_used = slot_margin.unflatten(1, (num_kv_heads, -1)).amax(2) >= 0
        if view.count:
            self.zoomed = (margin >= 0).sum(-1).float() + (slot_margin >= 0).sum(-1)

    def fetched_visible(self, token: Tensor) -> Tensor | None:
        return None

    def tail(self, token: Tensor | None) -> Part | None:
        if not self.view.use_coarse or self.owner.coarse_values.shape[2] == 0:
            return None
        estimate = self.estimate if token is None else _hide_(self.estimate, token)
        values = self.owner.coarse_values.to(self.view.query.dtype)
        return Part(estimate, values, row_of_entry=self.view.span_of_token)


class SpanMap(BatchedState):
    """One summary and one mean value per span, whole spans zoomed into.

    Attributes:
        mean_key: [B, Hkv, S, d].
        directions: [B, Hkv, S, r, d] or None.
        coarse_values: [B, Hkv, S, d].
        mass_weighted: coarse entries carry the expected mass (second-order term included), not n · exp(q·k̄).
    """

    def __init__(self, mean_key: Tensor, directions: Tensor | None, coarse_values: Tensor, mass_weighted: bool) -> None:
        self.mean_key, self.directions, self.coarse_values = mean_key, directions, coarse_values
        self.mass_weighted = mass_weighted

    def summary(self, lengths: Tensor) -> Summary:
        """The form that `Router.scores` reads."""
        directions = None if self.directions is None else self.directions.float()
        return Summary(lengths=lengths, mean_key=self.mean_key.float(), directions=directions)

    def decide(self, view: StepView) -> SpanDecision:
        """Zoom into the spans above threshold, best first, while their missing tokens fit."""
        scores = view.router.scores(view.layer, view.query.float(), self.summary(view.lengths))
        spans = view.lengths.shape[1]
        slot_span = view.span_of_token[:, None].expand(*view.slot_token.shape[:2], -1).gather(-1, view.slot_token)
        pinned = (slot_span == spans).repeat_interleave(view.query.shape[1] // slot_span.shape[1], dim=1).unsqueeze(2)
        kept = torch.logsumexp(view.slot_logits.masked_fill(~pinned, HIDDEN), dim=-1)
        exact = torch.logaddexp(kept, view.recent_lse)
        margin = view.router.margin(view.layer, scores, view.lengths, view.tokens, exact)
        return SpanDecision(self, view, scores, margin, slot_span)

    def append(self, mean_key: Tensor, directions: Tensor | None, coarse_values: Tensor) -> None:
        """Add spans."""
        self.mean_key = torch.cat([self.mean_key, mean_key.to(self.mean_key.dtype)], dim=2)
        if self.directions is not None and directions is not None:
            self.directions = torch.cat([self.directions, directions.to(self.directions.dtype)], dim=2)
        self.coarse_values = torch.cat([self.coarse_values, coarse_values.to(self.coarse_values.dtype)], dim=2)


class SpanDecision(Decision):
    """See `SpanMap`. A span is fetched if any head of the group expands it; each head follows its own decision."""

    def __init__(self, owner: SpanMap, view: StepView, scores: Tensor, margin: Tensor, slot_span: Tensor) -> None:
        self.owner, self.view, self.scores = owner, view, scores
        num_kv_heads, spans = slot_span.shape[1], scores.shape[-1]
        self.group = scores.shape[1] // num_kv_heads
        group_margin = margin.squeeze(2).unflatten(1, (num_kv_heads, -1)).amax(2)  # [B, Hkv, S]
        taken = self._fitting(group_margin, slot_span, spans)
        heads_taken = taken.repeat_interleave(self.group, dim=1).unsqueeze(2)
        self.expand = F.pad((margin >= 0) & heads_taken, (0, 1), value=True)  # [B, Hq, 1, S + 1]
        self.slot_visible = self._of_span(slot_span)
        self.slot_used = F.pad(taken, (0, 1)).gather(-1, slot_span)
        self.zoomed = self.expand[..., :-1].squeeze(2).sum(-1).float()
        want = F.pad(group_margin.masked_fill(~taken, HIDDEN), (0, 1), value=HIDDEN)
        token_span = view.span_of_token[:, None].expand(-1, num_kv_heads, -1)
        # tokens already in a slot need no fetch
        self.want = want.gather(-1, token_span).scatter(-1, view.slot_token, HIDDEN)[..., :-1]

    def _fitting(self, margin: Tensor, slot_span: Tensor, spans: int) -> Tensor:
        """[B, Hkv, S] spans to expand, in order of routing score while their missing tokens fit."""
        cached = torch.zeros(*slot_span.shape[:2], spans + 1, device=margin.device)
        cached.scatter_add_(-1, slot_span, torch.ones(slot_span.shape, device=margin.device))
        missing = (self.view.lengths[:, None] - cached[..., :-1]).masked_fill(margin < 0, 0.0)
        ordered, order = margin.sort(dim=-1, descending=True, stable=True)
        fits = (missing.gather(-1, order).cumsum(-1) <= self.view.room[:, None, None]) & (ordered >= 0)
        return torch.zeros_like(fits).scatter(-1, order, fits)

    def _of_span(self, span: Tensor) -> Tensor:
        """[B, Hq, 1, n] decisions of the spans [B, Hkv, n] of some tokens; true for tokens of no span."""
        index = span.repeat_interleave(self.group, dim=1).unsqueeze(2)
        return self.expand.gather(-1, index)

    def fetched_visible(self, token: Tensor) -> Tensor | None:
        span = self.view.span_of_token[:, None].expand(*token.shape[:2], -1).gather(-1, token)
        return self._of_span(span)

    def tail(self, token: Tensor | None) -> Part | None:
        if not self.view.use_coarse or self.owner.coarse_values.shape[2] == 0:
            return None
        query = self.view.query
        if self.owner.mass_weighted:
            logits = self.scores
        else:
            logits = dot(query, self.owner.mean_key.to(query.dtype)).float() + self.view.lengths.log()[:, None, None]
        logits = logits.masked_fill(self.expand[..., :-1], HIDDEN)
        return Part(logits, self.owner.coarse_values.to(query.dtype))


def _hide_(logits: Tensor, token: Tensor) -> Tensor:
    """Hide, in place, the tokens [B, Hkv, n] (N: nowhere) in the logits [B, Hq, 1, N + 1] of their query groups."""
    grouped = logits.view(logits.shape[0], token.shape[1], -1, logits.shape[-1])
    grouped.scatter_(-1, token.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1), HIDDEN)
    return logits
