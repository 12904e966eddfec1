"""From a prompt to the pieces of a layer: what prefill observes, rows side by side, the map, the first slots.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q tokens of a prefill chunk, N tokens of the map
(the longest row without its window), S spans, C slots, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.layer import LayerPrompt
from sekv.options import SeKVOptions
from sekv.plan import Plan
from sekv.segmentation import Kind, Segments
from sekv.sketch import Sketch
from sekv.slots import PINNED
from sekv.span_map import SpanMap
from sekv.summary import span_directions, span_means
from sekv.token_map import TokenMap
from sekv.window import Block

QUERY_BLOCK = 8  # warm-up queries per block: bounds the attention scores to 8 x N per head
PINNED_SCORE = 1e7  # ranks pinned tokens before any attention score, the first before the later (exact in fp32)
OUTLIER_SCORE = 0.75 * PINNED_SCORE


class PromptObserver:
    """What a layer learns of the prompt's queries while it is prefilled (temporary, dropped after compression).

    Attributes:
        moment: [B, Hkv, d, d] sum of q qᵀ over the group's scaled queries, padding excluded.
        newest: [B, Hq, <= warm_queries, d] newest scaled queries.
    """

    def __init__(self, warm_queries: int) -> None:
        self.warm_queries = warm_queries
        self.moment: Tensor | None = None
        self.newest: Tensor | None = None

    def observe(self, query: Tensor, num_kv_heads: int, first: list[int], scale: float) -> None:
        """See a chunk of queries [B, Hq, Q, d]; `first` is each row's first real token inside the chunk."""
        scaled = query * scale
        grouped = scaled.float().unflatten(1, (num_kv_heads, -1))
        if any(first):
            real = (
                torch.arange(query.shape[2], device=query.device) >= torch.tensor(first, device=query.device)[:, None]
            )
            grouped = grouped * real[:, None, None, :, None]
        flat = grouped.flatten(2, 3)
        moment = flat.mT @ flat
        self.moment = moment if self.moment is None else self.moment + moment
        newest = scaled if self.newest is None else torch.cat([self.newest, scaled], dim=2)
        self.newest = newest[:, :, -self.warm_queries :].clone()


@dataclass
class PromptBody:
    """The rows of a prompt without their windows, left-aligned.

    Attributes:
        keys, values: [B, Hkv, N, d].
        visible: [B, N] bool.
        counts: tokens of each row's body.
    """

    keys: Tensor
    values: Tensor
    visible: Tensor
    counts: list[int]

    @classmethod
    def of(cls, prompt: LayerPrompt, windows: list[int]) -> PromptBody:
        """Everything but the last `windows[row]` tokens of each row."""
        pairs = [prompt.row(index) for index in range(len(windows))]
        counts = [keys.shape[1] - window for (keys, _), window in zip(pairs, windows, strict=True)]
        device = prompt.keys.device
        if len(pairs) == 1:
            keys, values = (t[:, : counts[0]].unsqueeze(0) for t in pairs[0])
        else:
            shape = (len(pairs), prompt.keys.shape[1], max(counts), prompt.keys.shape[3])
            keys, values = prompt.keys.new_zeros(shape), prompt.keys.new_zeros(shape)
            for row, (pair, count) in enumerate(zip(pairs, counts, strict=True)):
                keys[row, :, :count], values[row, :, :count] = pair[0][:, :count], pair[1][:, :count]
        visible = torch.arange(max(counts), device=device) < torch.tensor(counts, device=device)[:, None]
        return cls(keys, values, visible, counts)

    @staticmethod
    def window(prompt: LayerPrompt, windows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The last tokens of each row, right-aligned [B, Hkv, W, d], and each row's first slot [B]."""
        width = max(windows)
        total = prompt.keys.shape[2]
        start = torch.tensor([width - window for window in windows], device=prompt.keys.device)
        return prompt.keys[:, :, total - width :].clone(), prompt.values[:, :, total - width :].clone(), start

    def warm_scores(self, newest: Tensor, lengths: list[int]) -> Tensor:
        """Attention [B, Hkv, N] (fp32) that the newest queries [B, Hq, n, d] pay to each token.

        Args:
            newest: newest queries; those of padding do not count.
            lengths: tokens of each row.
        """
        count = newest.shape[2]
        first = torch.tensor([max(0, count - length) for length in lengths], device=newest.device)
        real = (torch.arange(count, device=newest.device) >= first[:, None]).float()
        total = torch.zeros(self.keys.shape[:3], device=self.keys.device)
        keys, hidden = self.keys.float(), ~self.visible[:, None, None]
        for block, weight in zip(newest.float().split(QUERY_BLOCK, dim=2), real.split(QUERY_BLOCK, dim=1), strict=True):
            grouped = block.unflatten(1, (self.keys.shape[1], -1))  # [B, Hkv, G, b, d]
            logits = (grouped @ keys.mT.unsqueeze(2)).masked_fill(hidden.unsqueeze(2), float("-inf"))
            attention = torch.softmax(logits, dim=-1).nan_to_num(0.0)
            total += (attention * weight[:, None, None, :, None]).sum((2, 3))
        return total


def padded_spans(segments: list[Segments], mapped: list[bool], width: int, device: torch.device) -> Tensor:
    """Span of every body token [B, N] (int64), -1 where there is none; rows without a map have no spans."""
    result = torch.full((len(segments), width), -1)
    for row, (segment, use) in enumerate(zip(segments, mapped, strict=True)):
        if use:
            inside = segment.span_of_token[:width]
            result[row, : inside.shape[0]] = inside
    return result.to(device)


def build_map(
    options: SeKVOptions,
    keys: Tensor,
    values: Tensor,
    span_of_token: Tensor,
    num_spans: int,
    surprisal: Tensor | None,
    sketch: Sketch | None,
    dtype: torch.dtype,
    counts: tuple[Tensor, Tensor],
) -> TokenMap | SpanMap:
    """The coarse side of a layer.

    Args:
        keys, values: [B, Hkv, N, d] as fetched rows will show them.
        span_of_token: [B, N], S where there is none.
        num_spans: S.
        surprisal: [B, N] weights of the means (`weighted_summary`), or None.
        sketch: of the same tokens, for `summary=sketch`.
        dtype: of the stored entries.
        counts: int64 [B] each, tokens and spans of every row.
    """
    coarse_values = span_means(values, span_of_token, num_spans, surprisal).to(dtype)
    if sketch is not None:
        return TokenMap(sketch, coarse_values, *counts)
    mean_key = span_means(keys, span_of_token, num_spans, surprisal)
    directions = None
    if options.summary == "second_order":
        directions = span_directions(keys, span_of_token, mean_key, options.directions).to(dtype)
    return SpanMap(mean_key.to(dtype), directions, coarse_values, options.mass_weighted, *counts, keys.shape[2])


def extend_map(map_: TokenMap | SpanMap, block: Block, analysis: Tensor | None) -> None:
    """Add the tokens of each row of a block as one span.

    Args:
        analysis: [B, Hkv, m, d], for a `TokenMap`.
    """
    span = (~block.live).long()  # the one span is 0; 1 stands for no span
    means = span_means(block.values, span, 1)
    if isinstance(map_, TokenMap):
        assert analysis is not None
        map_.append(block, analysis, means)
        return
    mean_key = span_means(block.keys, span, 1)
    directions = None
    if map_.directions is not None:
        directions = span_directions(block.keys, span, mean_key, map_.directions.shape[3])
    map_.append(block, mean_key, directions, means)


def first_slots(
    scores: Tensor, segments: list[Segments], plans: list[Plan], misfit: Tensor | None, outlier_share: float
) -> tuple[Tensor, Tensor]:
    """Tokens and ranks [B, Hkv, C] of the first slots: pinned tokens, then the most attended ones.

    Pinned for good are sinks, anchors and each head's outliers: a token unlike the rest of the prompt (a number to be
    repeated, in a text of repeated sentences) has a key that the sketch, fitted to the rest, cannot show.

    Args:
        scores: [B, Hkv, N] warm-up attention.
        segments, plans: of each row.
        misfit: [B, Hkv, N] from `Sketch.misfit`, or None.
        outlier_share: tokens of each KV head to pin by misfit, as a share of the row; at most half of its free slots.
    """
    batch, num_kv_heads, width = scores.shape
    capacity = min(max(plan.slots for plan in plans), max(width, 0))
    token = torch.full((batch, num_kv_heads, capacity), -1, device=scores.device)
    rank = torch.full((batch, num_kv_heads, capacity), PINNED, device=scores.device)
    for row, (segment, plan) in enumerate(zip(segments, plans, strict=True)):
        count = min(plan.slots, int((segment.kinds != int(Kind.WINDOW)).sum()))
        pinned = segment.where(Kind.SINK, Kind.ANCHOR).to(scores.device)
        row_scores = scores[row].clone()
        if misfit is not None and plan.mapped:
            outliers = min(int(outlier_share * segment.kinds.shape[0]), (count - pinned.numel()) // 2)
            worst = misfit[row, :, : segment.kinds.shape[0]].topk(max(outliers, 0), dim=-1).indices
            row_scores.scatter_(-1, worst, OUTLIER_SCORE)
        row_scores[:, pinned] = PINNED_SCORE - pinned.to(row_scores.dtype)
        best, index = row_scores[:, : segment.kinds.shape[0]].topk(count, dim=-1)
        token[row, :, :count] = index
        order = -torch.arange(count, device=scores.device) / max(count, 1)
        rank[row, :, :count] = torch.where(best > PINNED_SCORE / 2, PINNED, order)
        # slots of the row's budget that no token fills yet
        rank[row, :, count : plan.slots] = float("-inf")
    return token, rank
