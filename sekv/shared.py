"""What the layers of one cache share: the spans of every row, the expansion buffer and the zoom statistics.

Legend: B batch rows, Hkv KV heads, S spans, N tokens of the map, n new tokens, E buffer rows, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.state import BatchedState
from kvcore.transfer import HostLink
from sekv.rows import Rows, put_rows_
from sekv.statistics import ZoomStatistics
from sekv.window import Block, widened, write_columns

NO_SPAN = -1


@dataclass
class SpanTable:
    """The spans of every row, as far as one layer knows them.

    Attributes:
        of_token: int64 [B, N + 1], S for tokens of no span (pinned tokens, padding) and in the last column.
        lengths: fp32 [B, S] tokens of each span, 0 for padding spans.
        starts: int64 [B, S + 1], first token of each span, then the end of the last.
    """

    of_token: Tensor
    lengths: Tensor
    starts: Tensor


class SharedSpans(BatchedState):
    """The spans, once for all layers and heads.

    Attributes:
        span_of_token: int64 [B, N + 1], S for tokens of no span (pinned tokens, padding) and in the last column.
        lengths: fp32 [B, S] tokens of each span, 0 for padding spans.
        starts: int64 [B, S + 1], first token of each span, then the end of the last. Spans follow each other in text
            order; only tokens of no span lie between them.
        tokens: fp32 [B], tokens of each row when the prompt ended.
        mapped, counts: int64 [B], tokens of each row that the maps know, and its spans.
        mean_spans: mean number of spans per row.
        ragged: whether some token is neither in a span nor pinned (padding of short rows, rows without a map).
    """

    def __init__(self, span_of_token: Tensor, lengths: Tensor, tokens: Tensor, mapped: Tensor, ragged: bool) -> None:
        """`span_of_token` [B, N] with -1 for tokens of no span."""
        none = lengths.shape[1]
        index = span_of_token.long().masked_fill(span_of_token < 0, none)
        self.span_of_token = _with_last(index, none)
        place = torch.arange(index.shape[1], device=index.device).expand_as(index)
        starts = index.new_full((index.shape[0], none + 1), index.shape[1]).scatter_reduce(1, index, place, "amin")
        self.starts = _with_last(starts[:, :-1], index.shape[1])
        self.lengths, self.tokens, self.ragged = lengths, tokens, ragged
        self.mapped, self.counts = mapped, (lengths > 0).sum(1)
        self.mean_spans = float((lengths > 0).sum(1).float().mean())

    def extend(self, block: Block) -> None:
        """Each row of the block has one span more."""
        row, first, span = block.row, self.mapped[block.rows], self.counts[block.rows]
        end, sizes = first + block.sizes, block.sizes
        wider = max(0, int(span.max()) + 1 - self.lengths.shape[1]) if span.numel() else 0
        none = self.lengths.shape[1] + wider
        index = self.span_of_token[:, :-1].masked_fill(self.span_of_token[:, :-1] >= none - wider, none)
        missing = max(0, int(end.max()) - index.shape[1]) if end.numel() else 0
        index = torch.cat([index, index.new_full((index.shape[0], missing), none)], dim=1)
        index[row, self.mapped[row] + block.column] = self.counts[row]
        self.span_of_token = _with_last(index, none)
        self.lengths = write_columns(widened(self.lengths, 1, wider), 1, block.rows, span, sizes)
        starts = torch.cat([self.starts, self.starts[:, -1:].expand(-1, wider)], dim=1)
        later = torch.arange(starts.shape[1], device=starts.device) > span[:, None]
        starts[block.rows] = torch.where(later, end[:, None], starts[block.rows])
        self.starts = write_columns(starts, 1, block.rows, span, first)
        self.mapped = self.mapped.index_add(0, block.rows, sizes)
        self.counts = self.counts.index_add(0, block.rows, torch.ones_like(sizes))
        self.mean_spans += block.rows.numel() / self.counts.shape[0]

    def clear(self) -> None:
        """Drop the spans; the rows' lengths stay."""
        self.span_of_token = self.span_of_token[:, :1] * 0
        self.lengths = self.lengths[:, :0].clone()
        self.starts = self.starts[:, :1] * 0

    def table(self, tokens: int, spans: int) -> SpanTable:
        """The first tokens and spans, as a layer knows them that has no more."""
        if tokens + 1 == self.span_of_token.shape[1] and spans == self.lengths.shape[1]:
            return SpanTable(self.span_of_token, self.lengths, self.starts)
        of_token = _with_last(self.span_of_token[:, :tokens].clamp_max(spans), spans)
        return SpanTable(of_token, self.lengths[:, :spans], self.starts[:, : spans + 1].clamp_max(tokens))


def _with_last(index: Tensor, none: int) -> Tensor:
    """One more column that says "no span"."""
    return torch.cat([index, index.new_full((index.shape[0], 1), none)], dim=1)


class ExpansionBuffer(BatchedState):
    """Fetched rows of the layer at work: overwritten by each layer in turn, so counted once.

    Attributes:
        data: [B, Hkv, E, 2 d]; scale: [B, Hkv, E, 1] or None.
    """

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.scale: Tensor | None = None

    def reserve(self, like: Rows, width: int) -> None:
        """Exactly `width` rows per row and KV head, in the form of the stored rows `like` [B, Hkv, ...]."""
        if self.data is None or self.data.shape[2] != width:
            self.data = like.data.new_zeros(*like.data.shape[:2], width, like.data.shape[3])
            self.scale = None if like.scale is None else like.scale.new_zeros(*like.scale.shape[:2], width, 1)

    def place(self, rows: Rows, head: Tensor, rank: Tensor, width: int) -> Rows:
        """Put n fetched rows [n, 2 d] at (flat head, rank); returns the first `width` columns [B, Hkv, width, 2 d].

        Columns without a fetched row keep old contents: finite numbers that the caller hides.
        """
        assert self.data is not None
        index = head * self.data.shape[2] + rank
        put_rows_(self.data, index, rows.data)
        if self.scale is not None and rows.scale is not None:
            put_rows_(self.scale, index, rows.scale)
        return Rows(self.data[:, :, :width], None if self.scale is None else self.scale[:, :, :width])


class Shared:
    """Holds what layers share, out of reach of the walk over each layer's tensors; the cache lists it once.

    Attributes:
        link: the way of rows from the host.
        spans: None before the prompt is compressed.
        buffer: the expansion buffer.
        statistics: what was zoomed into.
        blocks: window blocks that became spans.
        maps: layers that still have a map.
    """

    def __init__(self, num_layers: int, num_heads: int, link: HostLink) -> None:
        self.link = link
        self.spans: SharedSpans | None = None
        self.buffer = ExpansionBuffer()
        self.blocks = 0
        self.maps = num_layers
        self.statistics = ZoomStatistics(num_layers, num_heads)

    def retire_map(self) -> None:
        """A layer has given up its map; the spans go with the last one."""
        self.maps -= 1
        if self.maps == 0 and self.spans is not None:
            self.spans.clear()
