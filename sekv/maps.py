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
from sekv.attention import softmax_and_unit
from sekv.routing import Router, Summary, dot
from sekv.shared import SpanTable
from sekv.sketch import Sketch
from sekv.window import Block, write_columns

HIDDEN = float("-inf")


@dataclass
class StepView:
    """What a map may know in one decode step of one layer.

    Attributes:
        router, layer: trained routing and the layer's index.
        query: [B, Hq, 1, d] fp32, scaled.
        spans: the spans of every row, as far as the layer knows them.
        tokens: [B] tokens so far (float).
        slot_token: int64 [B, Hkv, C], N for empty slots.
        slots: [B, Hq, 1, C] logits of the slots, -inf for empty ones.
        recent: [B, Hq, 1, W] logits of the local window.
        room: [B] tokens per KV head that may be fetched.
        use_coarse: whether what is not zoomed into keeps an entry.
        ragged: whether some token is neither in a span nor in a slot for good (padding).
        count: whether to count what each query head zooms into.
    """

    router: Router
    layer: int
    query: Tensor
    spans: SpanTable
    tokens: Tensor
    slot_token: Tensor
    slots: Tensor
    recent: Tensor
    room: Tensor
    use_coarse: bool = True
    ragged: bool = True
    count: bool = True


@dataclass
class Shares:
    """Masses of everything but the fetched tokens, in units of exp(unit).

    Attributes:
        recent: [B, Hq, 1, W].
        slots: [B, Hq, 1, C].
        spans: [B, Hq, 1, S], what of each span is neither in a slot nor fetched; None without coarse entries.
        mass: [B, Hq, 1, 1], all of these.
        unit: [B, Hq, 1, 1], natural log.
    """

    recent: Tensor
    slots: Tensor
    spans: Tensor | None
    mass: Tensor
    unit: Tensor

    @classmethod
    def of(cls, recent: Tensor, slots: Tensor, spans: Tensor | None = None) -> Shares:
        """From the logits of all parts."""
        parts = [recent, slots] if spans is None else [recent, slots, spans]
        masses, unit = softmax_and_unit(torch.cat(parts, dim=-1))
        split = masses.split([part.shape[-1] for part in parts], dim=-1)
        return cls(split[0], split[1], None if spans is None else split[2], torch.ones_like(unit), unit)


class Decision:
    """What one step zooms into.

    Attributes:
        want: [B, Hkv, N] tokens to fetch where >= 1, the larger the sooner.
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
    def shares(self, token: Tensor | None) -> Shares:
        """What is left to window, slots and coarse entries once the tokens [B, Hkv, M] are fetched."""


class Map(BatchedState):
    """What both kinds of map have.

    Args:
        coarse_values: [B, Hkv, S, d] mean value of every span.
        tokens, spans: int64 [B], tokens and spans of each row; the others are padding.
        width: N, tokens of the longest row.
    """

    def __init__(self, coarse_values: Tensor, tokens: Tensor, spans: Tensor, width: int) -> None:
        self.coarse_values, self.tokens, self.spans, self.width = coarse_values, tokens.clone(), spans.clone(), width

    @abstractmethod
    def decide(self, view: StepView) -> Decision:
        """What to zoom into."""

    def _append_spans(self, block: Block, coarse_values: Tensor) -> None:
        """Each row of the block has one span more, of mean value [m, Hkv, 1, d]."""
        self.coarse_values = write_columns(
            self.coarse_values, 2, block.rows, self.spans[block.rows], coarse_values[:, :, 0]
        )
        self.tokens = self.tokens.index_add(0, block.rows, block.sizes)
        self.width = max(self.width, int(self.tokens.max()))
        self.spans = self.spans.index_add(0, block.rows, torch.ones_like(block.rows))

    def forget(self, rows: Tensor) -> None:
        """The batch rows `rows` (bool [B]) have no map any more."""
        self.tokens, self.spans = self.tokens.masked_fill(rows, 0), self.spans.masked_fill(rows, 0)


class TokenMap(Map):
    """Sketch of every token + one mean value per span; see `Map`.

    Args:
        sketch: logit estimates of every token.
    """

    def __init__(self, sketch: Sketch, coarse_values: Tensor, tokens: Tensor, spans: Tensor) -> None:
        super().__init__(coarse_values, tokens, spans, sketch.codes.shape[-1])
        self.sketch = sketch

    def decide(self, view: StepView) -> TokenDecision:
        """Zoom into the tokens whose expected share of the attention mass reaches the threshold."""
        estimate = self.sketch.logits(view.router.routed_query(view.layer, view.query))
        if view.ragged:
            place = torch.arange(estimate.shape[-1], device=estimate.device)
            estimate = estimate.masked_fill_(place >= self.tokens[:, None, None, None], HIDDEN)
        none = estimate.new_full((*estimate.shape[:3], 1), HIDDEN)
        logits = torch.cat([estimate, none, view.slots, view.recent], dim=-1)
        _fill_(logits[..., : estimate.shape[-1] + 1], view.slot_token, HIDDEN)
        return TokenDecision(self, view, *softmax_and_unit(logits))

    def append(self, block: Block, analysis: Tensor, coarse_values: Tensor) -> None:
        """Add the tokens of a block and the mean values [m, Hkv, 1, d] of their spans."""
        codes = self.sketch.encoded(block.keys, analysis, block.rows)[block.member, :, :, block.column]
        place = self.tokens[block.row] + block.column
        self.sketch.codes = write_columns(self.sketch.codes, 3, block.row, place, codes)
        self._append_spans(block, coarse_values)


class TokenDecision(Decision):
    """See `TokenMap`. A fetched token serves the whole query group.

    Args:
        masses: [B, Hq, 1, N + 1 + C + W] shares of everything: tokens of the map by estimate, nothing, slots, window.
        unit: [B, Hq, 1, 1].
    """

    def __init__(self, owner: TokenMap, view: StepView, masses: Tensor, unit: Tensor) -> None:
        self.owner, self.view, self.masses, self.unit = owner, view, masses, unit
        self.tail = masses.shape[-1] - view.slots.shape[-1] - view.recent.shape[-1]  # N + 1
        not_recent = masses[..., : masses.shape[-1] - view.recent.shape[-1]]
        multiples = view.router.multiples(view.layer, not_recent, view.tokens).squeeze(2)
        best = multiples.unflatten(1, (view.slot_token.shape[1], -1)).amax(2)
        self.want, self.slot_used = best[..., : self.tail - 1], best[..., self.tail :] >= 1
        if view.ragged:  # rows without a map keep what came last, as they do alone
            self.slot_used &= (owner.tokens > 0)[:, None, None]
        if view.count:
            self.zoomed = (multiples >= 1).sum(-1).float()

    def fetched_visible(self, token: Tensor) -> Tensor | None:
        return None

    def shares(self, token: Tensor | None) -> Shares:
        if token is not None:
            _fill_(self.masses[..., : self.tail], token, 0.0)
        coarse = self.view.use_coarse and self.owner.coarse_values.shape[2] > 0
        counted = self.masses if coarse else self.masses[..., self.tail :]
        slots = self.tail + self.view.slots.shape[-1]
        return Shares(
            recent=self.masses[..., slots:],
            slots=self.masses[..., self.tail : slots],
            spans=self._span_masses() if coarse else None,
            mass=counted.sum(dim=-1, keepdim=True),
            unit=self.unit,
        )

    def _span_masses(self) -> Tensor:
        """Masses [B, Hq, 1, S]; tokens between two spans are in slots for good and add nothing."""
        batch, num_heads = self.masses.shape[:2]
        starts = self.view.spans.starts[:, None].expand(-1, num_heads, -1).flatten(0, 1)
        masses = torch.segment_reduce(self.masses.flatten(0, 2), "sum", offsets=starts, axis=1, unsafe=True)
        return masses.view(batch, num_heads, 1, -1)


class SpanMap(Map):
    """One summary and one mean value per span, whole spans zoomed into; see `Map`.

    Args:
        mean_key: [B, Hkv, S, d].
        directions: [B, Hkv, S, r, d] or None.
        mass_weighted: coarse entries carry the expected mass (second-order term included), not n · exp(q·k̄).
    """

    def __init__(
        self,
        mean_key: Tensor,
        directions: Tensor | None,
        coarse_values: Tensor,
        mass_weighted: bool,
        tokens: Tensor,
        spans: Tensor,
        width: int,
    ) -> None:
        super().__init__(coarse_values, tokens, spans, width)
        self.mean_key, self.directions, self.mass_weighted = mean_key, directions, mass_weighted

    def summary(self, lengths: Tensor) -> Summary:
        """The form that `Router.scores` reads."""
        directions = None if self.directions is None else self.directions.float()
        return Summary(lengths=lengths, mean_key=self.mean_key.float(), directions=directions)

    def decide(self, view: StepView) -> SpanDecision:
        """Zoom into the spans above threshold, best first, while their missing tokens fit."""
        if view.ragged:
            number = torch.arange(view.spans.lengths.shape[1], device=self.spans.device)
            view.spans.lengths = view.spans.lengths.masked_fill(number >= self.spans[:, None], 0.0)
        lengths = view.spans.lengths
        scores = view.router.scores(view.layer, view.query, self.summary(lengths))
        spans = lengths.shape[1]
        slot_span = view.spans.of_token[:, None].expand(*view.slot_token.shape[:2], -1).gather(-1, view.slot_token)
        pinned = (slot_span == spans).repeat_interleave(view.query.shape[1] // slot_span.shape[1], dim=1).unsqueeze(2)
        kept = torch.logsumexp(view.slots.masked_fill(~pinned, HIDDEN), dim=-1)
        exact = torch.logaddexp(kept, torch.logsumexp(view.recent, dim=-1))
        margin = view.router.margin(view.layer, scores, lengths, view.tokens, exact)
        return SpanDecision(self, view, scores, margin, slot_span)

    def append(self, block: Block, mean_key: Tensor, directions: Tensor | None, coarse_values: Tensor) -> None:
        """Add one span per row of the block: [m, Hkv, 1, ...] each."""
        place = self.spans[block.rows]
        self.mean_key = write_columns(self.mean_key, 2, block.rows, place, mean_key[:, :, 0])
        if self.directions is not None and directions is not None:
            self.directions = write_columns(self.directions, 2, block.rows, place, directions[:, :, 0])
        self._append_spans(block, coarse_values)


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
        self.slot_visible: Tensor = self._of_span(slot_span)
        self.slot_used = F.pad(taken, (0, 1)).gather(-1, slot_span)
        self.zoomed = self.expand[..., :-1].squeeze(2).sum(-1).float()
        want = F.pad((group_margin + 1).masked_fill(~taken, HIDDEN), (0, 1), value=HIDDEN)
        token_span = view.spans.of_token[:, None].expand(-1, num_kv_heads, -1)
        # tokens already in a slot need no fetch
        self.want = want.gather(-1, token_span).scatter(-1, view.slot_token, HIDDEN)[..., :-1]

    def _fitting(self, margin: Tensor, slot_span: Tensor, spans: int) -> Tensor:
        """[B, Hkv, S] spans to expand, in order of routing score while their missing tokens fit."""
        cached = torch.zeros(*slot_span.shape[:2], spans + 1, device=margin.device)
        cached.scatter_add_(-1, slot_span, torch.ones(slot_span.shape, device=margin.device))
        missing = (self.view.spans.lengths[:, None] - cached[..., :-1]).masked_fill(margin < 0, 0.0)
        ordered, order = margin.sort(dim=-1, descending=True, stable=True)
        fits = (missing.gather(-1, order).cumsum(-1) <= self.view.room[:, None, None]) & (ordered >= 0)
        return torch.zeros_like(fits).scatter(-1, order, fits)

    def _of_span(self, span: Tensor) -> Tensor:
        """[B, Hq, 1, n] decisions of the spans [B, Hkv, n] of some tokens; true for tokens of no span."""
        index = span.repeat_interleave(self.group, dim=1).unsqueeze(2)
        return self.expand.gather(-1, index)

    def fetched_visible(self, token: Tensor) -> Tensor | None:
        span = self.view.spans.of_token[:, None].expand(*token.shape[:2], -1).gather(-1, token)
        return self._of_span(span)

    def shares(self, token: Tensor | None) -> Shares:
        slots = self.view.slots.masked_fill(~self.slot_visible, HIDDEN)
        if not self.view.use_coarse or self.owner.coarse_values.shape[2] == 0:
            return Shares.of(self.view.recent, slots)
        logits = self.scores
        if not self.owner.mass_weighted:
            logits = dot(self.view.query, self.owner.mean_key) + self.view.spans.lengths.log()[:, None, None]
        return Shares.of(self.view.recent, slots, logits.masked_fill(self.expand[..., :-1], HIDDEN))


def _fill_(entries: Tensor, token: Tensor, value: float) -> None:
    """Set, in place, the tokens [B, Hkv, n] (N: nowhere) among entries [B, Hq, 1, N + 1] of their query groups."""
    grouped = entries.view(entries.shape[0], token.shape[1], -1, entries.shape[-1])
    grouped.scatter_(-1, token.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1), value)
