"""Composition: an evicting method chooses the tokens, KIVI's quantisation stores them.

Legend: B batch rows, Hkv KV heads, n tokens of a row, c kept tokens, r rows, R residual length, g group size,
Q new tokens, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcore.baselines.codec import in_row
from kvcore.baselines.eviction import PINNED, EvictingLayer
from kvcore.baselines.kivi import BITS
from kvcore.baselines.kivi_store import KiviStore, Setting, drop_front
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.exact import ExactLayer
from kvcore.kernels import causal_bias, decode_attention, merge_states
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import Method, build_method, method_class, register

FOUR_BITS = Setting(bits=4, group_size=32, residual=32)


@dataclass(frozen=True)
class QuantizedEntries(Budget):
    """A byte budget counted in quantised tokens: what an evicting method is told it may keep.

    Attributes:
        setting: how kept tokens are stored.
        spec: the model's shape.
    """

    setting: Setting = FOUR_BITS
    spec: ModelSpec = None  # type: ignore[assignment]

    @lru_cache(maxsize=4096)  # noqa: B019 - budgets are few and live as long as their cache
    def entries(self, tokens: int, entry_bytes: int | None = None, spec: ModelSpec | None = None) -> int:
        """Tokens per KV head whose bytes fit the budget of `tokens` tokens when the residual is fullest; at least 1."""
        if self.is_full:
            return max(tokens, 1)
        allowed = self.device_bytes(self.spec, tokens) / self.spec.num_layers
        low, high = 1, max(tokens, 1)
        while low < high:
            middle = (low + high + 1) // 2
            fits = max(self.setting.bytes(n, self.spec) for n in (middle, self.setting.fullest(middle))) <= allowed
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


class QueueStore(KiviStore):
    """Tokens in the order in which they are given up: the oldest in the queue leaves first, a group at a time."""

    def used_bytes(self, spec: ModelSpec) -> list[float]:
        """Bytes of each row."""
        exact = (self.key_tail.counts + self.value_tail.counts).double() * self.dim * spec.dtype.itemsize
        group = self.keys.codes.shape[-1] + 4  # packed codes, scale and zero point of one group of one channel
        keys = (self.lengths - self.key_tail.counts) / self.setting.group_size * self.dim * group
        line = self.values.codes.shape[-2] * (self.values.codes.shape[-1] + 4)
        values = (self.lengths - self.value_tail.counts) * line
        return (spec.num_kv_heads * (exact + keys + values)).tolist()

    def drop(self, rows: Tensor) -> None:
        """Give up the first group of each of `rows` [r], or its first token where nothing is quantised yet."""
        quantised = (self.lengths - self.key_tail.counts)[rows]
        for some, count in ((rows[quantised > 0], self.setting.group_size), (rows[quantised == 0], 1)):
            if len(some) == 0:
                continue
            old = (self.lengths - self.value_tail.counts)[some].clamp_max(count)
            if count > 1:
                drop_front(self.keys, some, count)
            else:
                self.key_tail.oldest(some, 1)
            for size in old.unique().tolist():
                part = some[old == size]
                drop_front(self.values, part, size)
                if size < count:
                    self.value_tail.oldest(part, count - size)
            self.lengths[some] -= count
        self.trim()


class ComposedLayer(CacheLayer):
    """Kept tokens in the order of their rank, then generated ones; pinned tokens (sinks) in a store of their own."""

    host_fields = frozenset({"lengths"})

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, chooser: EvictingLayer, setting: Setting
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.chooser: EvictingLayer | None = chooser
        self.setting = setting
        self.stores: list[QueueStore] = []  # pinned, queue

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        assert self.chooser is not None
        self.chooser.observe(query, keys, padding, scale)

    def build(self, prompt: LayerPrompt) -> None:
        assert self.chooser is not None
        batch = prompt.keys.shape[0]
        self.stores = [QueueStore(self.setting, batch, prompt.keys) for _ in range(2)]
        self.lengths = torch.tensor([prompt.row(row)[0].shape[1] for row in range(batch)])
        for row in range(batch):
            entries = self.chooser.compress(prompt, row)
            order = entries.priority.sort(dim=-1, stable=True)
            live = int(order.values.isfinite().sum(-1).min())
            pinned = int((order.values >= PINNED).sum(-1).min())
            indices = order.indices[:, order.indices.shape[1] - live :, None].expand(-1, -1, prompt.keys.shape[3])
            keys, values = entries.keys.gather(1, indices), entries.values.gather(1, indices)
            self._store(0, row, keys[:, live - pinned :], values[:, live - pinned :])
            self._store(1, row, keys[:, : live - pinned], values[:, : live - pinned])
        self.chooser = None  # its scores have served
        self._evict()

    def _store(self, which: int, row: int, keys: Tensor, values: Tensor) -> None:
        batch = len(self.lengths)
        fresh, active = QueueStore(self.setting, batch, keys), torch.arange(batch) == row
        fresh.append(in_row(keys, row, batch), in_row(values, row, batch), active)
        self.stores[which].copy_rows(fresh, active.nonzero().flatten())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        """Q new tokens see what was stored before them, and each other exactly; then they are stored."""
        held = sum(float(store.lengths.float().mean()) for store in self.stores)
        self.attended = held + (key.shape[2] + 1) / 2
        output, lse = decode_attention(query, key, value, scale, causal_bias(key.shape[2], key.device))
        outputs, lses = [output], [lse]
        for store in self.stores:
            more = store.attend(query, scale)
            outputs += more[0]
            lses += more[1]
        self.stores[1].append(key, value, torch.ones_like(self.lengths, dtype=torch.bool))
        self.lengths = self.lengths + key.shape[2]
        self._evict()
        return merge_states(outputs, lses)[0]

    def _evict(self) -> None:
        """Give up the front of the queue until every row meets its budget; one token stays in any case."""
        layers = self.spec.num_layers
        allowed = torch.tensor([self.budget.device_bytes(self.spec, n) / layers for n in self.lengths.tolist()])
        pinned = torch.tensor(self.stores[0].used_bytes(self.spec))
        while True:
            used = pinned + torch.tensor(self.stores[1].used_bytes(self.spec))
            over = (used > allowed) & (self.stores[1].lengths > 1)
            if not bool(over.any()):
                return
            self.stores[1].drop(over.nonzero().flatten())


@register
@dataclass(frozen=True, kw_only=True)
class Compose(Method):
    """Any method that keeps some tokens as they are, with KIVI's quantisation of what it keeps.

    The evicting method is told how many tokens the byte budget holds once quantised (a 4-bit token costs about a
    sixth of an fp32 one), and ranks the prompt; kept tokens are quantised in the order of their rank, so that whole
    groups of the lowest rank can be given up as text grows; generated tokens follow in the order of age. Ranks are
    those at the end of the prompt. Sinks stay. KIVI: https://arxiv.org/abs/2402.02750, section 3.2.

    Args:
        eviction: name of the evicting method (streaming_llm, h2o, scissorhands, snapkv, pyramidkv, chunkkv).
        eviction_options: its options.
        bits: 8, 4, 3 or 2.
        group_size: entries per scale and zero point, a multiple of 8.
        residual: newest tokens left exact, a multiple of `group_size` (32, below KIVI's 128: it competes with kept
            tokens for the same bytes).
    """

    name: ClassVar[str] = "compose"
    eviction: str = "snapkv"
    eviction_options: dict[str, Any] = field(default_factory=dict)
    bits: int = 4
    group_size: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        method_class(self.eviction)
        if self.bits not in BITS:
            raise ValueError(f"method 'compose': bits must be one of {BITS}; received {self.bits!r}")
        if self.group_size < 8 or self.group_size % 8 or self.residual < 1 or self.residual % self.group_size:
            raise ValueError(
                "method 'compose': group_size must be a multiple of 8 and residual a multiple of group_size; received "
                f"group_size={self.group_size}, residual={self.residual}"
            )

    @property
    def setting(self) -> Setting:
        return Setting(self.bits, self.group_size, self.residual)

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        if budget.is_full:
            return
        tokens, setting = spec.max_positions, self.setting
        least = setting.bytes(setting.fullest(1), spec) * spec.num_layers / spec.full_bytes(tokens)
        if budget.share(tokens) < least:
            levers = f"at {tokens} tokens, a shorter residual than {self.residual}"
            raise UnreachableBudgetError(self.name, budget.value, least, levers)

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        entries = QuantizedEntries(budget.value, budget.scope, self.setting, spec)
        choosers = build_method(self.eviction, **self.eviction_options).make_layers(spec, entries)
        layers: list[CacheLayer] = []
        for index, chooser in enumerate(choosers):
            if not isinstance(chooser, EvictingLayer) or type(chooser).compress is not EvictingLayer.compress:
                raise ValueError(
                    f"method 'compose' needs an eviction that keeps tokens as they are; {self.eviction!r} does not. "
                    "Use streaming_llm, h2o, scissorhands, snapkv, pyramidkv or chunkkv"
                )
            layers.append(ComposedLayer(spec, budget, index, chooser, self.setting))
        return layers
