"""H2O: heavy hitters by accumulated attention, and the recent tokens.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
https://arxiv.org/abs/2306.14048, algorithm 1.
Legend: B batch rows, Hq query heads, Hkv KV heads, C slots, Q new tokens, n prompt tokens of one row, d head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.baselines.eviction import PINNED, EvictingLayer, EvictingMethod
from kvcore.baselines.scores import attend_with_probabilities, received_mass
from kvcore.budget import Budget, ModelSpec
from kvcore.kernels import causal_bias
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import register


class AccumulatingLayer(EvictingLayer):
    """The priority of a slot is a score that every decode step updates from its attention; recent tokens are safe.

    The position of each token is kept beside its score (4 bytes more a slot).
    """

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.side_dtypes = {"positions": torch.int32}

    @abstractmethod
    def recent(self, tokens: int) -> int:
        """Newest tokens that are never evicted in a row of `tokens` tokens."""

    @abstractmethod
    def step_scores(self, probabilities: Tensor, visible: Tensor) -> Tensor:
        """What one forward adds to the score of each entry.

        Args:
            probabilities: [B, Hkv, Q, N], attention of the new tokens, averaged over the query group.
            visible: bool, broadcastable to the same, whether a new token sees an entry.

        Returns:
            [B, Hkv, N], fp32.
        """

    def side_entries(self, indices: Tensor, offset: int) -> dict[str, Tensor]:
        return {"positions": indices + offset}

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        self._prompt_stop = prompt.keys.shape[2]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        assert self.priority is not None
        num_new = key.shape[2]
        self.attended = self._live_mean() + (num_new + 1) / 2
        parts = [*self._stored_parts(), (key, value, causal_bias(num_new, key.device))]
        output, probabilities = attend_with_probabilities(query, parts, scale)
        old = self.priority.isfinite()[:, :, None].expand(-1, -1, num_new, -1)
        new = torch.ones(num_new, num_new, dtype=torch.bool, device=key.device).tril()
        visible = torch.cat([old, new.expand(*key.shape[:2], -1, -1)], dim=-1)
        added, first = self.step_scores(probabilities, visible).split([self.priority.shape[2], num_new], dim=-1)
        self.priority = torch.where(self.priority.isfinite(), self.priority + added, self.priority)
        positions = self._new_positions(num_new, key.device).expand(*key.shape[:3])
        self._store(key, value, first, {"positions": positions})
        return output

    def eviction_rank(self) -> Tensor:
        assert self.priority is not None
        # the new tokens are counted in the lengths already, but not stored yet
        newest = self._length + self._arriving
        recent = torch.tensor([self.recent(n) for n in self._lengths.tolist()], device=self.priority.device)
        safe = self.side["positions"] >= newest - recent[:, None, None]
        return torch.where(safe & self.priority.isfinite(), PINNED, self.priority)

    def _store(self, key: Tensor, value: Tensor, priority: Tensor, side: dict[str, Tensor]) -> None:
        self._arriving = key.shape[2]
        super()._store(key, value, priority, side)

    def _prompt_slots(self) -> Tensor:
        assert self.priority is not None
        return (self.side["positions"] < self._prompt_stop) & self.priority.isfinite()


class H2OLayer(AccumulatingLayer):
    """Scores: attention mass received from every token so far."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, recent_share: float) -> None:
        super().__init__(spec, budget, layer_idx)
        self.recent_share = recent_share
        self._mass: list[Tensor] = []  # per row [1, Hkv, n so far], during the prefill only

    def recent(self, tokens: int) -> int:
        return int(self.recent_share * self.capacity(tokens))

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        num_keys, num_queries = keys.shape[2], query.shape[2]
        before, self._mass = self._mass, []
        for row, pad in enumerate(padding):
            mass = keys.new_zeros(1, keys.shape[1], max(num_keys - pad, 0), dtype=torch.float32)
            if before:
                mass[:, :, : before[row].shape[2]] = before[row]
            real = min(num_queries, num_keys - pad)
            if real > 0:
                mass[0] += received_mass(query[row, :, num_queries - real :], keys[row, :, pad:], scale)
            self._mass.append(mass)

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        rank = self._mass[row][0].clone()
        rank[:, keys.shape[1] - self.recent(keys.shape[1]) :] = PINNED
        return rank

    def slot_priority(self, rank: Tensor, indices: Tensor, row: int) -> Tensor:
        return self._mass[row][0].gather(1, indices)

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        self._mass = []

    def step_scores(self, probabilities: Tensor, visible: Tensor) -> Tensor:
        return probabilities.sum(dim=2)


@register
@dataclass(frozen=True, kw_only=True)
class H2O(EvictingMethod):
    """Half of the budget for the tokens with the most accumulated attention, half for the newest
    (https://arxiv.org/abs/2306.14048, algorithm 1).

    The score of a token is the attention that it received from every token since, itself included: exactly, block by
    block, in the prefill; from the tokens that are left while decoding, when each step evicts the lowest score among
    the tokens that are not recent. Under grouped-query attention the score of a KV head is the mean over its query
    heads.

    Args:
        recent_share: share of the entries for the newest tokens (0.5 in the paper: as many as heavy hitters).
    """

    name: ClassVar[str] = "h2o"
    recent_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.recent_share <= 1.0:
            raise ValueError(f"recent_share must be between 0 and 1; received {self.recent_share}")

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return H2OLayer(spec, budget, layer_idx, self.recent_share)
