"""KIVI: keys quantised per channel, values per token, a full-precision residual.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", https://arxiv.org/abs/2402.02750.
Legend: B batch rows, Hq query heads, Hkv KV heads, n tokens of a row, R residual length, g group size, Q new tokens,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.baselines.kivi_store import UNBOUNDED, KiviStore, Setting
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.cache import CacheLayer, LayerPrompt
from kvcore.exact import ExactLayer
from kvcore.kernels import causal_bias, decode_attention, merge_states
from kvcore.method import Method, register

BITS = (8, 4, 3, 2)
WIDEST_GROUP = 128
EXACT = Setting(bits=8, group_size=32, residual=UNBOUNDED)
SHORT_PROMPT = 256  # tokens: below, there may be no whole block to quantise, and nothing is refused


@dataclass(frozen=True)
class SettingPlanner:
    """Maps a budget to the widest bits, then the smallest groups, then the longest residual that fit it.

    Args:
        spec: the model's shape.
        budget: the device budget.
        candidates: settings in order of preference.
    """

    spec: ModelSpec
    budget: Budget
    candidates: tuple[Setting, ...]

    @lru_cache(maxsize=4096)  # noqa: B019 - planners are few and live as long as their cache
    def setting(self, tokens: int) -> Setting:
        """The setting of a row that has `tokens` tokens.

        Raises:
            UnreachableBudgetError: no candidate fits, and the row is not shorter than 256 tokens.
        """
        if self.budget.share(tokens) >= 1:
            return EXACT
        for candidate in self.candidates:
            if self.share(candidate, tokens) <= self.budget.share(tokens):
                return candidate
        smallest = min(self.candidates, key=lambda candidate: self.share(candidate, tokens))
        if tokens >= SHORT_PROMPT:
            raise UnreachableBudgetError(
                "kivi",
                self.budget.value,
                self.share(smallest, tokens),
                f"fewer bits, wider groups (up to {WIDEST_GROUP}), a shorter residual, more than {tokens} tokens; or "
                "compose it with an evicting method (method 'compose')",
            )
        return smallest

    def share(self, setting: Setting, tokens: int) -> float:
        """Largest share of the full cache from `tokens` tokens on, over one cycle of the residual."""
        fullest = tokens + (setting.residual - 1 - tokens % setting.residual)
        lengths = {tokens} if isinstance(self.budget.value, int) else {tokens, fullest}
        dim, itemsize = self.spec.head_dim, self.spec.dtype.itemsize
        return max(setting.bytes(n, dim, itemsize) / (2 * n * dim * itemsize) for n in lengths)


class KiviLayer(CacheLayer):
    """Quantised tokens, one store per setting in use (one, unless rows of a batch differ much in length)."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: SettingPlanner) -> None:
        super().__init__(spec, budget, layer_idx)
        self.planner = planner
        self.stores: list[KiviStore] = []

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
        fresh = KiviStore(setting, batch, keys)
        active = torch.arange(batch) == row
        fresh.append(keys.expand(batch, *keys.shape), values.expand(batch, *values.shape), active)
        for store in self.stores:
            if store.setting == setting:
                store.copy_rows(fresh, active.nonzero().flatten())
                return
        self.stores.append(fresh)

    def _resettle(self) -> None:
        """Under a budget in tokens the share shrinks as text grows: rows move to narrower settings, once each."""
        for store in list(self.stores):
            for row in store.lengths.nonzero().flatten().tolist():  # rows, at the few lengths where a setting ends
                length = int(store.lengths[row])
                current = self.planner.share(store.setting, length)
                if store.setting is EXACT or current > self.planner.budget.share(length):
                    if self.planner.setting(length) == store.setting:
                        continue
                    keys, values = store.take_row(row)
                    self._settle(row, keys, values, len(store.lengths))
        self.stores = [store for store in self.stores if bool(store.lengths.any())]


@register
@dataclass(frozen=True, kw_only=True)
class Kivi(Method):
    """Asymmetric quantisation without tuning (https://arxiv.org/abs/2402.02750, section 3.2, equation 1, algorithm 1).

    A group of g neighbours with minimum z and range s = (max - min) / (2^B - 1) is stored as round((x - z) / s). Keys
    are grouped along tokens (per channel) in whole blocks of R tokens: the newest n mod R keys stay exact. Values are
    grouped along channels (per token): the newest min(R, n) values stay exact. Each KV head is quantised once,
    whatever the number of query heads. Stored: packed integers and fp16 scales and zero points; blocks of 1024 tokens
    are dequantised while they are attended, never the whole. A forward of several tokens attends to what was stored
    before it and stores afterwards.

    The compression is fixed by the setting. With `bits=null` the budget chooses it: the widest bits of 8, 4, 3, 2,
    then the smallest group from `group_size` to 128, then the longest residual from `residual` down to one group,
    that fit. A budget in tokens makes rows move to narrower settings as they grow.

    Args:
        bits: 8, 4, 3 or 2 with exactly `group_size` and `residual` (2 in the paper), or null for the budget's choice.
        group_size: entries per scale and zero point (32 in the paper), a multiple of 8.
        residual: R, newest tokens left exact (128 in the paper), a multiple of `group_size`.
    """

    name: ClassVar[str] = "kivi"
    attends_all: ClassVar[bool] = True
    bits: int | None = None
    group_size: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (None, *BITS):
            raise ValueError(f"method 'kivi': bits must be null or one of {BITS}; received {self.bits!r}")
        if self.group_size < 8 or self.group_size % 8:
            raise ValueError(f"method 'kivi': group_size must be a multiple of 8; received {self.group_size}")
        if self.residual < self.group_size or self.residual % self.group_size:
            raise ValueError(
                f"method 'kivi': residual must be a multiple of group_size={self.group_size} (whole blocks are "
                f"quantised); received {self.residual}"
            )

    def candidates(self) -> tuple[Setting, ...]:
        """Settings in order of preference."""
        if self.bits is not None:
            return (Setting(self.bits, self.group_size, self.residual),)
        groups = [self.group_size << step for step in range(8) if self.group_size << step <= WIDEST_GROUP]
        return tuple(
            Setting(bits, group, residual)
            for bits in BITS
            for group in groups or [self.group_size]
            for residual in range(max(self.residual // group * group, group), 0, -group)
        )

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        if budget.is_full or isinstance(budget.value, int):
            return
        planner = SettingPlanner(spec, budget, self.candidates())
        planner.setting(spec.max_positions)  # refused at the longest prompt, refused at every length

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        if budget.is_full:
            return ExactLayer(spec, budget, layer_idx)
        return KiviLayer(spec, budget, layer_idx, SettingPlanner(spec, budget, self.candidates()))
