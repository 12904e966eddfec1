"""The coarse side of a layer: what it routes with, what it decides in one decode step, and what stands for the rest.

`token_map.TokenMap` (default) zooms into single tokens by their sketch; `span_map.SpanMap` (published) zooms into whole
spans. A step may hold several queries. What one of them zooms into, the later ones see as well, as if it had been
fetched before; no query sees what only later ones want.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q queries of the step, S spans, N tokens of the map,
C slots, M fetched tokens, d head dimension. Queries are scaled; index N means "no token", span S means "no span".
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.state import BatchedState
from sekv.attention import softmax_and_unit
from sekv.routing import Router
from sekv.shared import SpanTable
from sekv.window import Block, write_columns

HIDDEN = float("-inf")
TURN = 1024.0  # scores of one query stay within it, so that earlier queries come first


@dataclass
class StepView:
    """What a map may know in one decode step of one layer.

    Attributes:
        router, layer: trained routing and the layer's index.
        query: [B, Hq, Q, d] fp32, scaled.
        spans: the spans of every row, as far as the layer knows them.
        tokens: [B] tokens so far (float).
        slot_token: int64 [B, Hkv, C], N for empty slots.
        slots: [B, Hq, Q, C] logits of the slots, -inf for empty ones.
        recent: [B, Hq, Q, W] logits of the local window, -inf where hidden.
        room: [B] tokens per KV head that may be fetched.
        neighbours: tokens on either side that are zoomed into with a token far above the threshold.
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
    neighbours: int = 0
    use_coarse: bool = True
    ragged: bool = True
    count: bool = True


@dataclass
class Shares:
    """Masses of everything but the fetched tokens, in units of exp(unit).

    Attributes:
        recent: [B, Hq, Q, W].
        slots: [B, Hq, Q, C].
        spans: [B, Hq, Q, S], what of each span is neither in a slot nor fetched; None without coarse entries.
        mass: [B, Hq, Q, 1], all of these.
        unit: [B, Hq, Q, 1], natural log.
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
        first: int64 [B, Hkv, N], the first query that wants each token; None when there is one query.
        slot_used: [B, Hkv, C] bool, slots whose tokens are zoomed into.
        zoomed: [B, Hq] mean over the queries of the units zoomed into, or None when they are not counted.
        slot_visible: [B, Hq, Q, C] bool, or None when every query attends to every slot.
    """

    want: Tensor
    slot_used: Tensor
    first: Tensor | None = None
    zoomed: Tensor | None = None
    slot_visible: Tensor | None = None

    @abstractmethod
    def fetched_visible(self, token: Tensor) -> Tensor | None:
        """[B, Hq, Q, M] bool of the fetched tokens [B, Hkv, M] (N at padding); None when all see all."""

    @abstractmethod
    def shares(self, token: Tensor | None) -> Shares:
        """What is left to window, slots and coarse entries once the tokens [B, Hkv, M] are fetched."""


def in_turn(scores: Tensor, level: float) -> tuple[Tensor, Tensor | None]:
    """The units that some query wants, those of earlier queries before those of later ones.

    So what does not fit is taken from the later queries, and no query depends on what comes after it.

    Args:
        scores: [B, Hkv, Q, n] of each KV head's query group.
        level: wanted where a score reaches it.

    Returns:
        [B, Hkv, n], `level` or more where some query wants the unit, the larger the sooner; and the first query that
        does (0 where none), None when there is one query.
    """
    if scores.shape[2] == 1:
        return scores.squeeze(2), None
    count = scores.shape[2]
    left = torch.arange(count, 0, -1, dtype=torch.int16, device=scores.device)[:, None]  # an argmax takes far longer
    left = (left * (scores >= level)).amax(dim=2, keepdim=True)  # queries left from the first that wants it; 0 if none
    first = torch.where(left > 0, count - left, 0).long()
    score, turn = scores.gather(2, first).squeeze(2), first.squeeze(2)
    sooner = (count - 1 - turn) * TURN
    return torch.where(score >= level, score.clamp_max(level + TURN - 1) + sooner, score), turn


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
