"""SeKVCache: surprisal while the prompt is read, spans when it has been read, zooming while it is decoded.

arXiv 2606.31145, section 3. Legend: B batch rows, T prompt tokens, N tokens of the map, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.layer import CacheLayer
from kvcore.state import BatchedState
from sekv.layer import SeKVLayer
from sekv.plan import Plan
from sekv.prompt import padded_spans
from sekv.segmentation import Kind, Segments, segment
from sekv.shared import NO_SPAN, Shared, SharedSpans
from sekv.statistics import ZoomSummary
from sekv.surprisal import SurprisalMeter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SeKVCache(CompressedCache):
    """A `CompressedCache` whose layers share spans; see `kvcore.cache.CompressedCache` for the arguments."""

    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        make_layers: Callable[[], list[CacheLayer]],
        method: str,
        prefill_tokens: int | None = None,
    ) -> None:
        self._meter = SurprisalMeter()
        super().__init__(spec, budget, make_layers, method, prefill_tokens)

    def reset(self) -> None:
        super().reset()
        self._meter = SurprisalMeter()
        self._measured: tuple[int, tuple[int, int]] | None = None

    @property
    def zooming(self) -> list[SeKVLayer]:
        """The layers that compress (none at budget=1.0)."""
        return [layer for layer in self.layers if isinstance(layer, SeKVLayer)]

    @property
    def shared(self) -> Shared | None:
        """What the layers share; None at budget=1.0."""
        layers = self.zooming
        return layers[0].shared if layers else None

    def stored_states(self) -> list[BatchedState]:
        shared = self.shared
        if shared is None:
            return list(self.layers)
        spans = [] if shared.spans is None else [shared.spans]
        return [*self.layers, *spans, shared.buffer]

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._measured = None

    def _record_memory(self) -> None:
        # storages change where a window overflows and nowhere else: the walk over all of them waits for that
        overflows = sum(layer.blocks for layer in self.zooming)
        if self._measured is None or self._measured[0] != overflows:
            self._measured = overflows, self.memory_bytes()
        full = self.spec.token_bytes * sum(self.row_tokens())
        self.ledger.record_memory(*self._measured[1], full)

    def chunk_prefilled(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        layers = self.zooming
        if not layers or not layers[0].options.needs_surprisal:
            return
        if input_ids is None:
            raise ValueError(
                "SeKV cuts text by the surprisal of its tokens, so it needs input_ids; received embeddings only. "
                "Pass input_ids, or use segmentation=fixed"
            )
        self._meter.add(model.get_output_embeddings(), input_ids, hidden)

    def prompt_prefilled(self) -> None:
        layers = self.zooming
        if not layers:
            return
        first, lengths = layers[0], self.row_tokens()
        surprisal = self._row_surprisal(lengths)
        self._meter = SurprisalMeter()
        windows = [first.planner.window(length) for length in lengths]
        options = first.planner.segment_options()
        segments = [
            segment(row, min(window, length), options)
            for row, (window, _), length in zip(surprisal, windows, lengths, strict=True)
        ]
        plans = [
            self._plan(first, segment_, length, window)
            for segment_, length, window in zip(segments, lengths, windows, strict=True)
        ]
        assert first.store is not None and first.shared is not None
        # rows too short for a map need no spans
        width = first.store.used if any(plan.mapped for plan in plans) else 0
        first.shared.maps = len(layers) if width else 0
        first.shared.spans = self._shared_spans(segments, plans, width, lengths)
        weights = None
        if first.options.weighted_summary:
            weights = torch.zeros(len(lengths), width, device=self.spec.device)
            for row, values in enumerate(surprisal):
                count = min(width, values.shape[0])
                weights[row, :count] = values[:count]
        for layer in layers:
            layer.finish(segments, plans, weights)
        first.shared.statistics.cache_bytes = sum(layer.cache_bytes() for layer in layers)

    def _row_surprisal(self, lengths: list[int]) -> list[Tensor]:
        """Surprisal of each row's tokens; zeros where the segmentation does not use it."""
        if not self._meter.pieces:
            return [torch.zeros(length) for length in lengths]
        values = self._meter.values(self._padding)
        return [values[row, pad:] for row, pad in enumerate(self._padding)]

    @staticmethod
    def _plan(layer: SeKVLayer, segments: Segments, length: int, window: tuple[int, int]) -> Plan:
        pinned = int(segments.where(Kind.SINK, Kind.ANCHOR).numel())
        plan = layer.planner.plan(length, *window, pinned, segments.num_spans)
        if layer.options.segmentation == "paper" and not plan.mapped and plan.slots < pinned:
            layer.planner.refuse_resident(length, pinned, *window, segments.num_spans)
        return plan

    def _shared_spans(self, segments: list[Segments], plans: list[Plan], width: int, lengths: list[int]) -> SharedSpans:
        index = padded_spans(segments, [plan.mapped for plan in plans], width, self.spec.device)
        num_spans = max((s.num_spans for s, plan in zip(segments, plans, strict=True) if plan.mapped), default=0)
        counts = torch.zeros(len(segments), num_spans + 1, device=index.device)
        inside = index.masked_fill(index == NO_SPAN, num_spans)
        counts.scatter_add_(1, inside, torch.ones(inside.shape, device=index.device))
        tokens = torch.tensor(lengths, dtype=torch.float32, device=index.device)
        ragged = len({segment_.kinds.shape[0] for segment_ in segments}) > 1 or not all(plan.mapped for plan in plans)
        body = [int((s.kinds != int(Kind.WINDOW)).sum()) * plan.mapped for s, plan in zip(segments, plans, strict=True)]
        mapped = torch.tensor(body, device=index.device)
        return SharedSpans(index, counts[:, :num_spans].clone(), tokens, mapped, ragged or len(set(plans)) > 1)

    def zoom_statistics(self) -> ZoomSummary | None:
        """What was zoomed into since the cache was made or reset; None at budget=1.0."""
        shared = self.shared
        return None if shared is None else shared.statistics.summary()
