"""Surprisal -> sinks, anchors, spans and local window of one row. arXiv 2606.31145, section 3.1; sekv.md, sections 1-3.

Legend: n tokens of one row (padding excluded), S spans. Surprisal H_t = -log p(x_t | x_<t) in nats, H_0 = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import torch
from torch import Tensor

Segmentation = Literal["budget", "paper", "fixed"]


class Kind(IntEnum):
    """What a token is. Every token is exactly one."""

    SINK = 0
    ANCHOR = 1
    SPAN = 2
    WINDOW = 3


@dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """How a row is cut.

    Attributes:
        mode: `budget` (thresholds solved so that spans and anchors meet their shares), `paper` (mean + alpha · std,
            short spans kept in full), `fixed` (blocks of `span_tokens`, no surprisal).
        alpha: of `paper`.
        min_span: L_min in tokens. `paper`: shorter spans stay in full resolution; `budget`: they join a neighbour.
        max_span: L_max in tokens (`budget`): longer spans are split evenly.
        span_tokens: wanted mean span length in tokens (`budget`), block length (`fixed`).
        anchor_share: share of the tokens kept as anchors (`budget`).
        anchors: whether anchors exist at all; without them the same tokens only mark borders.
        num_sinks: first tokens, always kept.
    """

    mode: Segmentation = "budget"
    alpha: float = 1.0
    min_span: int = 16
    max_span: int = 64
    span_tokens: int = 32
    anchor_share: float = 0.002
    anchors: bool = True
    num_sinks: int = 4

    def __post_init__(self) -> None:
        if self.mode not in get_args(Segmentation):
            raise ValueError(f"segmentation must be one of {', '.join(get_args(Segmentation))}; received {self.mode!r}")
        if not 1 <= self.min_span <= self.max_span:
            raise ValueError(f"1 <= min_span <= max_span is needed; received {self.min_span} and {self.max_span}")
        if self.span_tokens < 1:
            raise ValueError(f"span_tokens must be >= 1; received {self.span_tokens}")
        if not 0.0 <= self.anchor_share < 1.0:
            raise ValueError(f"anchor_share must lie in [0, 1); received {self.anchor_share}")
        if self.num_sinks < 0:
            raise ValueError(f"num_sinks must be >= 0; received {self.num_sinks}")


@dataclass
class Segments:
    """The partition of one row.

    Attributes:
        kinds: [n] `Kind` of every token (int64).
        span_of_token: [n] span of every span token, -1 elsewhere (int64).
        num_spans: S; spans are numbered in text order.
    """

    kinds: Tensor
    span_of_token: Tensor
    num_spans: int

    @property
    def lengths(self) -> Tensor:
        """Tokens of every span [S] (int64)."""
        return torch.bincount(self.span_of_token[self.span_of_token >= 0], minlength=self.num_spans)

    def where(self, *kinds: Kind) -> Tensor:
        """Positions (int64, ascending) of the tokens of these kinds."""
        mask = torch.zeros_like(self.kinds, dtype=torch.bool)
        for kind in kinds:
            mask |= self.kinds == kind
        return mask.nonzero().flatten()


def segment(surprisal: Tensor, window: int, options: SegmentOptions) -> Segments:
    """Partition a row: first `num_sinks` tokens, last `window` tokens, and anchors and spans between them.

    Args:
        surprisal: [n] in nats.
        window: tokens of the local window.
        options: how to cut.
    """
    surprisal = surprisal.float().cpu()
    total = surprisal.shape[0]
    last = max(0, total - window)
    first = min(options.num_sinks, last)
    kinds = torch.full((total,), int(Kind.WINDOW))
    kinds[:first] = int(Kind.SINK)
    spans = torch.full((total,), -1)
    middle = surprisal[first:last]
    if middle.numel() == 0:
        return Segments(kinds, spans, 0)
    kind, span = _CUTS[options.mode](middle, surprisal, options)
    kinds[first:last], spans[first:last] = kind, span
    return Segments(kinds, spans, int(span.max()) + 1)


def _paper(middle: Tensor, surprisal: Tensor, options: SegmentOptions) -> tuple[Tensor, Tensor]:
    """Section 3.1 as published: fixed alpha; runs shorter than L_min are kept in full, like anchors."""
    threshold = surprisal.mean() + options.alpha * surprisal.std(correction=0)
    border = middle > threshold
    run = border.long().cumsum(0)
    inside = ~border if options.anchors else torch.ones_like(border)
    length = torch.bincount(run[inside], minlength=int(run[-1]) + 1)
    kept = inside & (length[run] >= options.min_span)
    kind = torch.where(kept, int(Kind.SPAN), int(Kind.ANCHOR))
    return kind, _renumbered(run, kept)


def _budget(middle: Tensor, surprisal: Tensor, options: SegmentOptions) -> tuple[Tensor, Tensor]:
    """The thresholds solved: as many borders as the wanted mean span length asks for, the most surprising few of them
    anchors; short spans merged, long spans split."""
    count = middle.shape[0]
    num_anchors = math.ceil(options.anchor_share * count) if options.anchors else 0
    order = middle.argsort(descending=True, stable=True)
    anchor = torch.zeros(count, dtype=torch.bool)
    anchor[order[: min(num_anchors, count - 1)]] = True
    border = torch.zeros(count, dtype=torch.bool)
    border[order[: max(num_anchors, count // options.span_tokens)]] = True
    run = border.long().cumsum(0)
    merged = _merged(torch.bincount(run[~anchor], minlength=int(run[-1]) + 1), options)
    span = merged[run]
    return torch.where(anchor, int(Kind.ANCHOR), int(Kind.SPAN)), _split(span, ~anchor, options.max_span)


def _fixed(middle: Tensor, surprisal: Tensor, options: SegmentOptions) -> tuple[Tensor, Tensor]:
    """Blocks of equal length."""
    count = middle.shape[0]
    span = torch.arange(count) // options.span_tokens
    return torch.full((count,), int(Kind.SPAN)), span


_CUTS = {"paper": _paper, "budget": _budget, "fixed": _fixed}


def _merged(lengths: Tensor, options: SegmentOptions) -> Tensor:
    """New number of every run, so that no run is shorter than L_min (unless there is only one)."""
    numbers, current, filled = [], 0, 0
    for length in lengths.tolist():
        if filled >= options.min_span:
            current, filled = current + 1, 0
        numbers.append(current)
        filled += length
    if filled < options.min_span and current > 0:
        numbers = [min(number, current - 1) for number in numbers]
    return torch.tensor(numbers)


def _split(span: Tensor, inside: Tensor, max_span: int) -> Tensor:
    """Spans longer than L_max cut into even pieces; -1 outside; numbered in text order."""
    length = torch.bincount(span[inside], minlength=int(span.max()) + 1)
    pieces = (length + max_span - 1) // max_span
    rank = torch.zeros_like(span)
    rank[inside] = _rank_inside(span[inside])
    piece = rank * pieces[span] // length[span].clamp_min(1)
    return _renumbered(span * (int(pieces.max()) + 1) + piece, inside)


def _rank_inside(span: Tensor) -> Tensor:
    """Rank of each token among the tokens of its span; `span` is ascending."""
    starts = torch.searchsorted(span, span)
    return torch.arange(span.shape[0]) - starts


def _renumbered(run: Tensor, kept: Tensor) -> Tensor:
    """Consecutive numbers 0.. of the runs that hold a kept token, -1 for the others."""
    result = torch.full_like(run, -1)
    if bool(kept.any()):
        result[kept] = torch.unique(run[kept], return_inverse=True)[1]
    return result
