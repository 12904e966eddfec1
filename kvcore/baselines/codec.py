"""Shared by the methods that keep every token in fewer bits: which setting a row uses, and one store per setting.

A row's setting follows from its own length and the budget, so that a batch gives each row what it gets alone; rows of
one setting share a store. Legend: B batch rows, Hkv KV heads, n tokens of a row, Q new tokens, Hq query heads,
d head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.kernels import causal_bias, decode_attention, merge_states
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.state import BatchedState

SHORT_PROMPT = 256  # tokens: below, side data and exact tokens dominate whatever the setting, and nothing is refused


class CodecStore(BatchedState, ABC):
    """Keys and values of the rows that share one setting; the other rows have length 0.

    Attributes:
        lengths: [B] tokens of each row.
    """

    host_fields = frozenset({"lengths"})
    lengths: Tensor

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, active: Tensor) -> None:
        """Store new tokens, post-RoPE [B, Hkv, Q, d], of the `active` rows [B] bool."""

    @abstractmethod
    def attend(self, query: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """Attention states (outputs [B, Hq, Q, d], log-sum-exps [B, Hq, Q]), one block of tokens at a time."""

    @abstractmethod
    def take_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Remove a row; returns its keys and values [Hkv, n, d] as they can be restored."""

    @abstractmethod
    def copy_rows(self, other: CodecStore, rows: Tensor) -> None:
        """Take the rows `rows` [r] of a store of the same setting."""


class CodecSetting(ABC):
    """How tokens are quantised; equal settings are interchangeable (a frozen dataclass)."""

    @abstractmethod
    def bytes(self, tokens: int, spec: ModelSpec) -> float:
        """Bytes of one row of `tokens` tokens in one layer."""

    @abstractmethod
    def fullest(self, tokens: int) -> int:
        """The length from `tokens` on at which the share of the full cache is largest."""

    @abstractmethod
    def make_store(self, spec: ModelSpec, batch: int, like: Tensor) -> CodecStore:
        """An empty store on the device and in the dtype of `like` [..., d]."""


@dataclass(frozen=True)
class CodecPlanner:
    """Maps a budget to a setting.

    Args:
        method: name, for messages.
        spec: the model's shape.
        budget: the device budget.
        candidates: settings in order of preference.
        exact: the setting that quantises nothing.
        levers: what the user may change, for messages.
    """

    method: str
    spec: ModelSpec
    budget: Budget
    candidates: tuple[CodecSetting, ...]
    exact: CodecSetting
    levers: str

    @lru_cache(maxsize=4096)  # noqa: B019 - planners are few and live as long as their cache
    def setting(self, tokens: int) -> CodecSetting:
        """The first candidate that fits a row of `tokens` tokens.

        Raises:
            UnreachableBudgetError: none does, and the row is not shorter than 256 tokens.
        """
        allowed = self.budget.share(tokens)
        if allowed >= 1:
            return self.exact
        for candidate in self.candidates:
            if self.share(candidate, tokens) <= allowed:
                return candidate
        smallest = min(self.candidates, key=lambda candidate: self.share(candidate, tokens))
        if tokens >= SHORT_PROMPT:
            least = self.share(smallest, tokens)
            raise UnreachableBudgetError(self.method, self.budget.value, least, f"at {tokens} tokens, {self.levers}")
        return smallest

    @lru_cache(maxsize=65536)  # noqa: B019
    def share(self, setting: CodecSetting, tokens: int) -> float:
        """Largest share of the full cache from `tokens` tokens on; under a budget in tokens, the share right now."""
        lengths = {tokens} if isinstance(self.budget.value, int) else {tokens, setting.fullest(tokens)}
        layer_bytes = self.spec.token_bytes / self.spec.num_layers
        return max(setting.bytes(n, self.spec) / (n * layer_bytes) for n in lengths)

    def validate(self) -> None:
        """Refuse a share that is out of reach at the model's longest prompt, and so at every length.

        Raises:
            UnreachableBudgetError: such a budget.
        """
        if not self.budget.is_full and isinstance(self.budget.value, float):
            self.setting(self.spec.max_positions)


class CodecLayer(CacheLayer):
    """Quantised tokens, one store per setting in use (one, unless rows of a batch differ much in length)."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: CodecPlanner) -> None:
        super().__init__(spec, budget, layer_idx)
        self.planner = planner
        self.settings: list[CodecSetting] = []
        self.stores: list[CodecStore] = []

    def build(self, prompt: LayerPrompt) -> None:
        for row in range(prompt.keys.shape[0]):
            keys, values = prompt.row(row)
            self._settle(row, keys, values, prompt.keys.shape[0])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        """Q new tokens see what was stored before them, and each other exactly; then they are stored."""
        lengths = torch.stack([store.lengths for store in self.stores]).sum(0)
        self.attended = float(lengths.float().mean()) + (key.shape[2] + 1) / 2
        output, lse = decode_attention(query, key, value, scale, causal_bias(key.shape[2], key.device))
        outputs, lses = [output], [lse]
        for store in self.stores:
            more = store.attend(query, scale)
            outputs += more[0]
            lses += more[1]
        for store in self.stores:
            store.append(key, value, store.lengths > 0)
        if isinstance(self.budget.value, int):
            self._resettle()
        return merge_states(outputs, lses)[0]

    def _settle(self, row: int, keys: Tensor, values: Tensor, batch: int) -> None:
        """Store a row's tokens [Hkv, n, d] in the setting that its length asks for."""
        setting = self.planner.setting(keys.shape[1])
        fresh = setting.make_store(self.spec, batch, keys)
        active = torch.arange(batch) == row
        fresh.append(in_row(keys, row, batch), in_row(values, row, batch), active)
        if setting in self.settings:
            self.stores[self.settings.index(setting)].copy_rows(fresh, active.nonzero().flatten())
        else:
            self.settings.append(setting)
            self.stores.append(fresh)

    def _resettle(self) -> None:
        """Under a budget in tokens the share shrinks as text grows: rows move to narrower settings, once each."""
        for setting, store in list(zip(self.settings, self.stores, strict=True)):
            for row in store.lengths.nonzero().flatten().tolist():  # rows, at the few lengths where a setting ends
                length = int(store.lengths[row])
                fits = self.planner.share(setting, length) <= self.budget.share(length)
                if not fits and self.planner.setting(length) != setting:
                    keys, values = store.take_row(row)
                    self._settle(row, keys, values, len(store.lengths))
        used = [index for index, store in enumerate(self.stores) if bool(store.lengths.any())]
        self.settings, self.stores = [self.settings[i] for i in used], [self.stores[i] for i in used]


def in_row(tokens: Tensor, row: int, batch: int) -> Tensor:
    """Tokens [Hkv, n, d] as the row `row` of a batch [B, Hkv, n, d]; nothing of them reaches another row."""
    out = tokens.new_zeros(batch, *tokens.shape)
    out[row] = tokens
    return out
