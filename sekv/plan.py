"""How a row's device bytes are split between window, map, pinned tokens, factor cache and expansion buffer.

Legend: n tokens of a row, S spans, C slots, e bytes of one full-resolution entry (key and value).
All byte counts are per layer and KV head unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from sekv.rows import RowCodec
from sekv.segmentation import SegmentOptions
from sekv.sketch import SketchForm
from sekv.slots import Slots

if TYPE_CHECKING:
    from sekv.options import SeKVOptions

MAP_INDEX_BYTES = 8  # a token's span number; one for all layers and heads
SPAN_INDEX_BYTES = 12  # a span's length and start; one for all layers and heads
SHARED_COUNTERS = 36  # bytes, once per row: its length, mapped tokens, spans; the last columns of index and starts
LAYER_COUNTERS = 24  # bytes, once per row and layer: what it may fetch, the map's tokens and spans
WINDOW_SHARE = 0.25  # of the budget's entries, at most, for window and spill block together
MAP_SHARE = 0.5  # of the budget's bytes, at most, for the sketch; smaller budgets get fewer dimensions
MIN_DIMS = 8
STRICT_SPAN_FACTOR = 4  # scope `layer` counts a coarse entry like any other: spans are this much longer
FETCH_SHARE = 0.4  # scope `layer`: part of what the persistent entries leave over that is fetched afresh
MIN_SLOTS = 4  # beside the pinned tokens: with fewer, a map costs more than it finds


@dataclass(frozen=True)
class Plan:
    """The split of one row, in tokens per layer and KV head.

    Attributes:
        window: newest tokens kept exactly.
        block: tokens that leave the window at a time.
        mapped: whether the row has a map to zoom with; too short rows keep slots only.
        slots: C, pinned tokens included.
        buffer: most tokens fetched in one step.
    """

    window: int
    block: int
    mapped: bool
    slots: int
    buffer: int


class Planner:
    """Splits the budget of a row.

    Args:
        spec, budget: the model's shape and the byte budget.
        options: the method's options.
    """

    def __init__(self, spec: ModelSpec, budget: Budget, options: SeKVOptions) -> None:
        self.spec, self.budget, self.options = spec, budget, options
        itemsize = spec.dtype.itemsize
        self.row_bytes = RowCodec.row_bytes(spec.head_dim, itemsize, options.row_bits)
        self.slot_bytes = Slots.slot_bytes(self.row_bytes)
        self.strict = budget.scope == "layer"
        self.sketch = self._form(options.sketch_dims)

    def choose_sketch(self, tokens: int) -> SketchForm:
        """The sketch that a prompt of `tokens` tokens can afford; kept for the rest of the cache's life."""
        allowed = self.budget.share(tokens) * tokens * self.spec.entry_bytes * MAP_SHARE
        form = self._form(self.options.sketch_dims)
        while form.dims - 4 >= MIN_DIMS and form.device_bytes(tokens, self.spec.head_dim) > allowed:
            form = self._form(form.dims - 4)
        self.sketch = form
        return form

    def _form(self, dims: int) -> SketchForm:
        """Half of the coordinates that a smaller sketch goes without are fine ones, down to a quarter of it."""
        most, fine = min(self.options.sketch_dims, self.spec.head_dim), self.options.sketch_fine_dims
        dims = min(dims, most)
        return SketchForm.fitting(dims, max(fine - (most - dims) // 2, min(fine, dims // 4)), self.options.sketch_bits)

    def segment_options(self) -> SegmentOptions:
        """How rows are cut: as the options say, in longer spans where every coarse entry counts."""
        options = self.options.segment_options()
        if not self.strict or options.mode == "paper":
            return options
        factor = STRICT_SPAN_FACTOR
        return replace(options, span_tokens=options.span_tokens * factor, max_span=options.max_span * factor)

    def window(self, tokens: int) -> tuple[int, int]:
        """Window and spill block of a row of `tokens` prompt tokens."""
        entries = self.budget.entries(tokens)
        block = max(1, min(self.options.window_block, int(entries * WINDOW_SHARE) // 3))
        return max(1, min(self.options.window, int(entries * WINDOW_SHARE) - block)), block

    def coarse_bytes(self) -> int:
        """Bytes of one span's coarse entry."""
        dim, size = self.spec.head_dim, self.options.coarse_dtype(self.spec).itemsize
        if self.options.summary == "sketch":
            return dim * size
        directions = self.options.directions if self.options.summary == "second_order" else 0
        return (2 + directions) * dim * size

    def map_bytes(self, mapped_tokens: int, spans: int) -> float:
        """Bytes of the map."""
        total = float(spans * self.coarse_bytes())
        if self.options.summary == "sketch":
            total += self.sketch.device_bytes(mapped_tokens, self.spec.head_dim)
        shared = mapped_tokens * MAP_INDEX_BYTES + spans * SPAN_INDEX_BYTES
        return total + shared / (self.spec.num_layers * self.spec.num_kv_heads)

    def fixed_bytes(self, slots: int) -> float:
        """Bytes that a row holds beside map and factor cache: its window of `slots` slots (with a mask, which rows of
        unequal length need), the steps of its codec, and its counters."""
        steps = 4 * self.spec.head_dim if self.options.row_bits else 0
        shared = slots + LAYER_COUNTERS + SHARED_COUNTERS / self.spec.num_layers
        return slots * self.spec.entry_bytes + steps + shared / self.spec.num_kv_heads

    def plan(self, tokens: int, window: int, block: int, pinned: int, spans: int, may_map: bool = True) -> Plan:
        """The split of a row.

        Args:
            tokens: tokens so far.
            window, block: from `window`, of the prompt.
            pinned: sinks and anchors.
            spans: S.
            may_map: False once the row has given up its map.
        """
        entry = self.spec.entry_bytes
        allowed = self.budget.share(tokens) * tokens * entry - self.fixed_bytes(window + block)
        mapped = max(tokens - window, 0)
        left = allowed - self.map_bytes(mapped, spans)
        buffer = min(math.floor(self.options.max_zoom * tokens), mapped)
        if self.strict:
            # every layer counts its own buffer, and a row counts as a full entry however it is stored
            left -= spans * max(entry - self.coarse_bytes(), 0)
            slot_cost = float(max(self.slot_bytes, entry))
            buffer = min(buffer, max(0, math.floor((left / slot_cost - pinned) * FETCH_SHARE)))
            left -= buffer * slot_cost
        else:
            slot_cost = float(self.slot_bytes)
            buffer = max(0, min(buffer, math.floor(left * self.spec.num_layers / (2 * self.row_bytes))))
            left -= buffer * self.row_bytes / self.spec.num_layers
        slots = math.floor(left / slot_cost) if self.options.factor_cache else pinned
        zooms = buffer > 0 or self.options.max_zoom == 0
        if may_map and mapped > 0 and zooms and left >= (pinned + MIN_SLOTS * self.options.factor_cache) * slot_cost:
            return Plan(window, block, True, min(slots, mapped), buffer)
        bare = math.floor(allowed / slot_cost)
        return Plan(window, block, False, max(0, min(bare, mapped)), 0)

    def refuse_resident(self, tokens: int, pinned: int, window: int, block: int, spans: int) -> None:
        """Refuse a budget below what the segmentation keeps resident (`segmentation=paper`).

        Raises:
            UnreachableBudgetError: naming the smallest budget it can reach.
        """
        entry = self.spec.entry_bytes
        needed = self.fixed_bytes(window + block) + self.map_bytes(tokens - window, spans) + pinned * self.slot_bytes
        smallest = math.ceil(1000 * needed / (tokens * entry)) / 1000 + 0.005
        raise UnreachableBudgetError(
            "sekv", self.budget.value, min(smallest, 1.0), "raise alpha or min_span, or use segmentation=budget"
        )
