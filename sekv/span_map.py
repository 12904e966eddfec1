"""The published map: one summary per span, whole spans zoomed into. arXiv 2606.31145, 3.2 and 3.3.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q queries of the step, S spans, N tokens of the map,
C slots, M fetched tokens, d head dimension, r directions. Index N means "no token", span S means "no span".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from sekv.maps import HIDDEN, Decision, Map, Shares, StepView, in_turn
from sekv.routing import Summary, dot
from sekv.window import Block, write_columns


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
    """See `SpanMap`. A span is fetched if any head of the group expands it; each query follows its own decision."""

    def __init__(self, owner: SpanMap, view: StepView, scores: Tensor, margin: Tensor, slot_span: Tensor) -> None:
        self.owner, self.view, self.scores = owner, view, scores
        num_kv_heads, spans = slot_span.shape[1], scores.shape[-1]
        self.group = scores.shape[1] // num_kv_heads
        group_margin = margin.unflatten(1, (num_kv_heads, -1)).amax(2)  # [B, Hkv, Q, S]
        wish, first = in_turn(group_margin, 0.0)
        taken = self._fitting(wish, slot_span, spans)
        heads_taken = taken.repeat_interleave(self.group, dim=1).unsqueeze(2)
        self.expand = F.pad((margin >= 0) & heads_taken, (0, 1), value=True)  # [B, Hq, Q, S + 1]
        self.slot_visible: Tensor = self._of_span(slot_span)
        self.slot_used = F.pad(taken, (0, 1)).gather(-1, slot_span)
        self.zoomed = self.expand[..., :-1].sum(-1).float().mean(2)
        want = F.pad((wish + 1).masked_fill(~taken, HIDDEN), (0, 1), value=HIDDEN)
        token_span = view.spans.of_token[:, None].expand(-1, num_kv_heads, -1)
        # tokens already in a slot need no fetch
        self.want = want.gather(-1, token_span).scatter(-1, view.slot_token, HIDDEN)[..., :-1]
        if first is not None:
            self.first = F.pad(first, (0, 1)).gather(-1, token_span[..., :-1])

    def _fitting(self, wish: Tensor, slot_span: Tensor, spans: int) -> Tensor:
        """[B, Hkv, S] spans to expand, the most wished for first while their missing tokens fit."""
        cached = torch.zeros(*slot_span.shape[:2], spans + 1, device=wish.device)
        cached.scatter_add_(-1, slot_span, torch.ones(slot_span.shape, device=wish.device))
        missing = (self.view.spans.lengths[:, None] - cached[..., :-1]).masked_fill(wish < 0, 0.0)
        ordered, order = wish.sort(dim=-1, descending=True, stable=True)
        fits = (missing.gather(-1, order).cumsum(-1) <= self.view.room[:, None, None]) & (ordered >= 0)
        return torch.zeros_like(fits).scatter(-1, order, fits)

    def _of_span(self, span: Tensor) -> Tensor:
        """[B, Hq, Q, n] decisions of the spans [B, Hkv, n] of some tokens; true for tokens of no span."""
        index = span.repeat_interleave(self.group, dim=1).unsqueeze(2)
        return self.expand.gather(-1, index.expand(-1, -1, self.expand.shape[2], -1))

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
