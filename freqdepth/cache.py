"""FreqDepthCache: blocks of layers compressed when their last layer has been prefilled, one row at a time.

The prefill holds the prompt's keys and values of one block in full, never of the whole model. Rows are stored apart:
each has its own transform, widths and modes, and no padding is ever looked at.

All that a decode step leaves behind is in `stored_states`, and counts. What lives within one layer's attention and is
freed with it (logits, the layer's own rows of the basis) does not, as with any method; no layer shares it with another.

Legend: B batch rows, Hq query heads, H KV heads, Q new tokens, n prompt tokens of one row, J layers of a block,
d head dimension.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from freqdepth.drafts import BlockInput
from freqdepth.layout import RowBlock, WindowPolicy
from freqdepth.modes import ModeChooser, SmallestBytesError
from freqdepth.probe import LayerProbe, ProbeCollector, ProbePlan, probe_layer
from kvcore.attention import active_input_ids
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.cache import CompressedCache
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.rope import shift_positions
from kvcore.state import BatchedState

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth

# Share of a budget that exact tokens (sinks, window, tokens about to be folded) may take on short prompts.
_WINDOW_SHARE = 0.25
# Fewest middle tokens that have a spectrum worth storing.
_SMALLEST_MIDDLE = 32
# Decode tokens for which a token budget (a fixed number of bytes) keeps room in the shared form.
_TOKEN_BUDGET_HEADROOM = 512


class LayerBlock(BatchedState):
    """The stored rows of one block of layers.

    Attributes:
        members: its layers.
        rows: one `RowBlock` per batch row; empty before the block is prefilled.
    """

    def __init__(self, options: FreqDepth, spec: ModelSpec, budget: Budget, index: int, members: range) -> None:
        self.options, self.spec, self.budget = options, spec, budget
        self.index, self.members = index, members
        self.rows: list[RowBlock] = []
        self.probes: dict[int, list[LayerProbe]] = {}  # of layers prefilled so far, per row

    def select_rows(self, rows: Tensor) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows.tolist()]

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        raise NotImplementedError("the rows of a FreqDepthKV block carry no batch dimension: use select_rows")

    def build(self, prompts: list[LayerPrompt]) -> None:
        """Compress the prompt of all layers of the block.

        Raises:
            UnreachableBudgetError: the budget is below the smallest form at this length.
        """
        self.rows = [self._build_row(prompts, row) for row in range(prompts[0].keys.shape[0])]
        self.probes.clear()

    def _build_row(self, prompts: list[LayerPrompt], index: int) -> RowBlock:
        pairs = [prompt.row(index) for prompt in prompts]
        num_tokens = pairs[0][0].shape[1]
        policy = window_policy(self.options, self.budget, num_tokens, self.spec.dtype)
        sinks, last = policy.num_sinks, num_tokens - policy.window
        if policy.limit is not None:
            sinks = last = min(policy.num_sinks, policy.limit // 2)
            last = max(num_tokens - (policy.limit - sinks), sinks)
        windows = [[torch.cat([x[:, :sinks], x[:, last:]], dim=1) for x in side] for side in zip(*pairs, strict=True)]
        row = RowBlock(windows[0], windows[1], policy)
        if policy.limit is None:
            # compressed with the rest, corrections included, and hidden until they leave the window: what is folded in
            # later has to make do with a transform that never saw it
            hidden = policy.window // policy.fold * policy.fold
            row.next_position = last + hidden
            self._fill_middle(row, pairs, sinks, last + hidden, index, hidden)
        return row

    def _fill_middle(
        self, row: RowBlock, pairs: list[tuple[Tensor, Tensor]], first: int, last: int, index: int, hidden: int
    ) -> None:
        keys, values = (torch.stack([pair[side][:, first:last] for pair in pairs]) for side in (0, 1))
        probes = [self.probes[layer][index] for layer in self.members]
        weight = torch.stack([probe.token_weight[:, first:last] for probe in probes])
        block = BlockInput(keys, values, keys, probes, weight, self.spec.dtype, self.index, hidden)
        if self.options.keys == "pre_rope":
            assert self.spec.inverse_frequencies is not None
            positions = torch.arange(first, last, dtype=torch.int32, device=keys.device)
            block.positions, block.frequencies = positions, self.spec.inverse_frequencies.to(keys.device)
            block.keys = shift_positions(keys, -positions, block.frequencies)
            row.positions, row.frequencies = positions.unsqueeze(0), block.frequencies
        num_tokens = pairs[0][0].shape[1]
        allowed = self._allowed(num_tokens)
        window = self._window_bytes(row.policy) + (0 if row.positions is None else 4 * (last - first))
        try:
            ModeChooser(block, self.options, self._middle_share(num_tokens) * (allowed - window)).fill(row)
        except SmallestBytesError as error:
            from freqdepth.method import LEVERS

            share = (error.smallest / self._middle_share(num_tokens) + window) / self._allowed_full(num_tokens)
            smallest = share * num_tokens if isinstance(self.budget.value, int) else share
            raise UnreachableBudgetError("freqdepth", self.budget.value, smallest, LEVERS) from error
        row.report.allowed_bytes = math.floor(allowed)

    def _allowed(self, tokens: int) -> float:
        """Bytes of this block's layers within the budget."""
        return self.budget.device_bytes(self.spec, tokens) * len(self.members) / self.spec.num_layers

    def _allowed_full(self, tokens: int) -> float:
        return self.spec.full_bytes(tokens) * len(self.members) / self.spec.num_layers

    def _window_bytes(self, policy: WindowPolicy) -> int:
        lines = len(self.members) * self.spec.num_kv_heads
        return lines * window_line_bytes(policy, self.spec)

    def _middle_share(self, tokens: int) -> float:
        """Share of the middle's bytes to use now: a budget in tokens stays the same while the text grows."""
        return tokens / (tokens + _TOKEN_BUDGET_HEADROOM) if isinstance(self.budget.value, int) else 1.0

    def step_finished(self, row_tokens: list[int]) -> None:
        """Bring every row's window back within its bounds."""
        for row, tokens in zip(self.rows, row_tokens, strict=True):
            if row.policy.limit is not None:
                row.policy.limit = max(1, self.budget.entries(tokens))
            row.fold()

    def drop_excess(self, row_tokens: list[int]) -> None:
        """With a budget in tokens: give up the oldest folded tokens of a row that has outgrown it."""
        for row, tokens in zip(self.rows, row_tokens, strict=True):
            while sum(t.nbytes for t in row.tensors()) > self._allowed(tokens) and row.drop_oldest_fold():
                pass


def window_line_bytes(policy: WindowPolicy, spec: ModelSpec) -> int:
    """Bytes of sinks and fullest window of one layer and KV head, the scales of 8-bit floats included."""
    tokens = policy.num_sinks + policy.window + policy.fold - 1
    scales = 0 if policy.dtype == spec.dtype else 2 * torch.float32.itemsize
    return tokens * spec.entry_bytes * policy.dtype.itemsize // spec.dtype.itemsize + scales


def window_policy(options: FreqDepth, budget: Budget, tokens: int, dtype: torch.dtype) -> WindowPolicy:
    """The near tokens of a row of `tokens` prompt tokens of `dtype`: fewer on short prompts, where they would eat the
    budget. A prompt that is nothing but its window stays as it is."""
    worth = budget.share(tokens) * tokens
    stored = options.window_dtype(dtype, budget.share(tokens))
    policy = WindowPolicy(stored, options.num_sinks, options.window, options.fold)
    affordable = int(_WINDOW_SHARE * worth * dtype.itemsize / stored.itemsize)
    if policy.num_sinks + policy.window + policy.fold > affordable:
        sinks = min(options.num_sinks, affordable // 4)
        policy = WindowPolicy(stored, sinks, max(1, min(options.window, affordable - sinks - 8)), 8)
    if worth < options.min_entries or tokens - policy.num_sinks - policy.window < _SMALLEST_MIDDLE:
        policy.dtype, policy.limit = dtype, max(1, budget.entries(tokens))
    return policy


class FreqDepthLayer(CacheLayer):
    """One layer's view of its block."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, block: LayerBlock, plan: ProbePlan) -> None:
        super().__init__(spec, budget, layer_idx)
        self.block, self.plan = block, plan
        self.collector: ProbeCollector | None = ProbeCollector(plan)

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        ids = active_input_ids()
        if self.layer_idx == 0 and ids is not None:
            self.plan.find_boundaries(ids, keys.shape[2] - query.shape[2])
        if self.collector is not None:
            self.collector.observe(query, keys.shape[2], padding)

    def build(self, prompt: LayerPrompt) -> None:
        """Probe this layer; its block is compressed by the cache when it is complete."""
        assert self.collector is not None
        options = self.block.options
        found = []
        for index in range(prompt.keys.shape[0]):
            keys, values = prompt.row(index)
            queries, positions = self.collector.probe(index, prompt.padding[index], keys, prompt.scale)
            found.append(
                probe_layer(
                    queries, positions, keys, values, prompt.scale, options.probe_weighting, options.channel_floor,
                    paired=options.keys == "pre_rope",
                )
            )  # fmt: skip
        self.block.probes[self.layer_idx] = found
        self.collector = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        rows = self.block.rows
        layer = self.layer_idx - self.block.members.start
        self.attended = sum(row.attended(layer) for row in rows) / len(rows) + (key.shape[2] + 1) / 2
        outputs = [row.attend(layer, query[i], key[i], value[i], scale) for i, row in enumerate(rows)]
        return torch.stack(outputs)


class FreqDepthCache(CompressedCache):
    """A cache whose layers are compressed in blocks."""

    boundary_ids: frozenset[int] = frozenset()

    def begin_forward(self, batch: int, num_tokens: int, attention_mask: Tensor | None) -> None:
        super().begin_forward(batch, num_tokens, attention_mask)
        for layer in self.layers:
            if isinstance(layer, FreqDepthLayer):
                layer.plan.boundary_ids = self.boundary_ids
                break

    @property
    def blocks(self) -> list[LayerBlock]:
        """The blocks of layers, in order; none at budget=1.0."""
        found = [layer.block for layer in self.layers if isinstance(layer, FreqDepthLayer)]
        return [block for index, block in enumerate(found) if index == 0 or block is not found[index - 1]]

    def layer_prefilled(self, layer_idx: int, scale: float) -> None:
        """Probe the layer; compress its block with the block's last layer."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, FreqDepthLayer):
            super().layer_prefilled(layer_idx, scale)
            return
        members = layer.block.members
        keys, values = self._staged[layer_idx]
        layer.build(LayerPrompt(keys, values, self._padding, scale))
        if layer_idx != members[-1]:
            return
        devices = {self._staged[member][0].device for member in members}
        if len(devices) > 1:
            raise NotImplementedError(
                f"method '{self.method}': layers {members.start}..{members.stop - 1} share one block but lie on "
                f"{', '.join(sorted(map(str, devices)))}. Choose a block_size that does not cross a device border"
            )
        self._record_prefill_peak()
        layer.block.build([LayerPrompt(*self._staged[member], self._padding, scale) for member in members])
        for member in members:
            del self._staged[member]

    def step_finished(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        tokens = self.row_tokens()
        for block in self.blocks:
            block.step_finished(tokens)
            if isinstance(self.budget.value, int):
                block.drop_excess(tokens)

    def row_tensors(self, row: int) -> list[Tensor]:
        """Every stored tensor of one batch row, in a fixed order (rows are stored apart, without a batch dimension)."""
        return [tensor for block in self.blocks for tensor in block.rows[row].tensors()]

    def stored_states(self) -> list[BatchedState]:
        if self.budget.is_full:
            return super().stored_states()
        return list(self.blocks)
