"""How a retrieval method splits a device budget between summaries, sinks, window and fetch buffer.

Everything is counted in entries: one entry is the key and value of one token in one layer and KV head. With n tokens, a
budget of A entries per layer and head, S sinks, W window tokens, units of p tokens whose summary costs u entries, and a
fetch buffer of K tokens that all L layers share,

    S + W + u (n - S - W) / p + K / L = A

(K instead of K / L with budget_scope=layer, where every layer's fetched tokens count). K follows `fetch_share`, W takes
what is left. Units grow from the paper's size until window and buffer find room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError

UNIT_DOUBLINGS = 4  # units grow to 16 times the method's own size before a budget counts as out of reach
LOCAL_WINDOW = 64  # tokens the window keeps, budget permitting, before anything is given to the fetch buffer


@dataclass(frozen=True)
class Split:
    """Tokens of one row and layer: first ones and last ones kept on the device, and those fetched per step."""

    sinks: int
    window: int
    fetched: int


@dataclass(frozen=True)
class Planner:
    """Splits the budget of any row length.

    Args:
        method: name, for messages.
        spec: the model's shape.
        budget: the device budget.
        unit_bytes: bytes of one unit's summary in one layer and KV head.
        unit_tokens: tokens per unit that the method prefers.
        num_sinks: first tokens kept on the device.
        fetch_share: tokens fetched per step as a share of the tokens so far, at most.
        offload: tokens live on the host; False keeps them on the device, and the budget is one of attended tokens.
        whole_units: K is a multiple of p where it can be.
        summarised: False for a layer without summaries: the same K, and a longer window instead.
        fixed_bytes: bytes per layer and KV head that do not depend on the length.
    """

    method: str
    spec: ModelSpec
    budget: Budget
    unit_bytes: float
    unit_tokens: int
    num_sinks: int
    fetch_share: float
    offload: bool = True
    whole_units: bool = False
    summarised: bool = True
    fixed_bytes: float = 0

    @property
    def largest_unit(self) -> int:
        return self.unit_tokens << UNIT_DOUBLINGS

    @property
    def _buffer_layers(self) -> int:
        return self.spec.num_layers if self.budget.scope == "bytes" else 1

    @property
    def unit_entries(self) -> float:
        """u: entries that one summary costs."""
        return self.unit_bytes / self.spec.entry_bytes

    def validate(self) -> None:
        """Refuse a share that summaries alone exceed at any length.

        Raises:
            UnreachableBudgetError: such a budget, with the smallest reachable one.
        """
        least = self.unit_entries / self.largest_unit
        if self.offload and isinstance(self.budget.value, float) and self.budget.value <= least:
            raise self._unreachable(least, "at any length")

    def unit_size(self, tokens: int) -> int:
        """p for a prompt of `tokens` tokens: the preferred size, doubled until the budget holds it.

        Raises:
            UnreachableBudgetError: the largest units still leave no room, and the prompt is longer than one of them.
        """
        for doubling in range(UNIT_DOUBLINGS + 1):
            size = self.unit_tokens << doubling
            if self.fits(tokens, size):
                return size
        if tokens > self.largest_unit:
            raise self._unreachable(self._least_share(tokens), f"for a prompt of {tokens} tokens")
        return self.largest_unit  # a short prompt keeps at least one entry, whatever its budget

    def fits(self, tokens: int, unit_tokens: float) -> bool:
        """Whether window and fetch buffer find room beside the summaries of units of `unit_tokens` tokens."""
        if self._allowed(tokens) >= tokens or not self.offload:
            return True
        _, spare = self._spare(tokens, unit_tokens)
        return spare > 0 and self._fetched(tokens, spare) >= min(unit_tokens, self.fetch_share * tokens / 2)

    def _least_share(self, tokens: int) -> float:
        """The smallest share that holds a prompt in the largest units, to a thousandth."""
        low, high = 0.0, 1.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            fits = replace(self, budget=replace(self.budget, value=middle)).fits(tokens, self.largest_unit)
            low, high = (low, middle) if fits else (middle, high)
        return high

    @lru_cache(maxsize=4096)  # noqa: B019 - planners are few and live as long as their cache
    def split(self, tokens: int, unit_tokens: float) -> Split:
        """The split of a row of `tokens` tokens whose units hold `unit_tokens` tokens on average."""
        allowed = self._allowed(tokens)
        if allowed >= tokens:
            return Split(0, tokens, 0)
        if not self.offload:
            window = max(1, math.floor(self._least_window(tokens)))
            return Split(0, window, max(1, math.floor(allowed) - window))
        sinks, spare = self._spare(tokens, unit_tokens)
        if spare <= 0:
            rest = allowed - self._summaries(tokens, unit_tokens) - self._fixed - 1 / self._buffer_layers
            return Split(0, max(1, math.floor(rest)), 1)
        fetched = self._fetched(tokens, spare)
        if self.whole_units and fetched >= unit_tokens:
            fetched -= fetched % math.ceil(unit_tokens)
        room = spare + self._least_window(tokens) - fetched / self._buffer_layers
        per_token = self.unit_entries / unit_tokens
        if not self.summarised:
            room, per_token = room + self._summaries(tokens - sinks, unit_tokens), 0.0
        window = math.floor(room / (1 - per_token) + 1e-9) if per_token < 1 else 1
        return Split(sinks, max(1, min(window, tokens - sinks)), fetched)

    @property
    def _fixed(self) -> float:
        """Entries' worth of what does not depend on the length."""
        return self.fixed_bytes / self.spec.entry_bytes

    def _allowed(self, tokens: int) -> float:
        return self.budget.share(tokens) * tokens

    def _least_window(self, tokens: int) -> float:
        return max(1.0, min(LOCAL_WINDOW, self._allowed(tokens) / 4))

    def _spare(self, tokens: int, unit_tokens: float) -> tuple[int, float]:
        """Sinks, and the entries left after sinks, summaries (one unit in hand, for rounding) and least window."""
        allowed = self._allowed(tokens)
        sinks = min(self.num_sinks, math.floor(allowed / 8))
        summaries = self._summaries(tokens - sinks, unit_tokens)
        return sinks, allowed - sinks - summaries - self._fixed - self._least_window(tokens)

    def _summaries(self, tokens: int, unit_tokens: float) -> float:
        return (tokens / unit_tokens + 1) * self.unit_entries

    def _fetched(self, tokens: int, spare: float) -> int:
        return max(1, math.floor(min(self.fetch_share * tokens, self._buffer_layers * spare)))

    def _unreachable(self, least: float, where: str) -> UnreachableBudgetError:
        levers = (
            f"{where}, summaries of units of {self.largest_unit} tokens, a window and a buffer must fit: a larger "
            "budget, a longer prompt or a larger unit size"
        )
        return UnreachableBudgetError(self.method, self.budget.value, least, levers)
