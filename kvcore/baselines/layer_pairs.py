"""Two layers that share the directions of their keys and values: the storage and attention of MiniCache.

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
https://arxiv.org/abs/2405.14366, section 4, eq. 2 and 3.
Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, n prompt tokens of one row, C slots, R retained
tokens, Q new tokens, d head dimension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.baselines.eviction import GENERATED, Entries, EvictingLayer
from kvcore.baselines.scores import QueryWindow, pooled, ranks, received_mass
from kvcore.budget import Budget, ModelSpec
from kvcore.kernels import causal_bias, group_queries
from kvcore.layer import LayerPrompt

if TYPE_CHECKING:
    from kvcore.baselines.minicache import MiniCache, Plan

NORMS = ("key_norm_0", "key_norm_1", "value_norm_0", "value_norm_1")


def interpolate(first: Tensor, second: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Spherical interpolation of the directions of two layers' states, eq. 3.

    Args:
        first, second: [..., d], states of the lower and the upper layer.
        weight: t, share of the angle that the shared direction stands from the lower layer.

    Returns:
        The shared unit direction [..., d] and the angular distance [...] in [0, 1] (angle / pi), both fp32. Directions
        that are (nearly) parallel or opposite are interpolated along the chord.
    """
    low, high = F.normalize(first.float(), dim=-1), F.normalize(second.float(), dim=-1)
    angle = torch.arccos((low * high).sum(-1).clamp(-1.0, 1.0))
    sine = angle.sin().unsqueeze(-1)
    arc = (torch.sin((1 - weight) * angle).unsqueeze(-1) * low + torch.sin(weight * angle).unsqueeze(-1) * high) / sine
    shared = torch.where(sine > 1e-4, arc, (1 - weight) * low + weight * high)
    return F.normalize(shared, dim=-1), angle / math.pi


class MergedStore(EvictingLayer):
    """What two layers share. `keys` and `values` are unit directions; the norms of both layers lie beside them.

    Attributes:
        retained: keys and values of the lower, then of the upper layer, [B, Hkv, R, d] each, of the tokens whose
            directions differ most; they are kept for good.
        retained_counts: [B], in host memory: how many of the R are a row's own.
    """

    host_fields = EvictingLayer.host_fields | {"retained_counts"}

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: MiniCache, plan: Plan) -> None:
        super().__init__(spec, budget, layer_idx)
        self.options, self.plan = options, plan
        self.side_dtypes = dict.fromkeys(NORMS, spec.dtype)
        self.retained: list[Tensor] = []
        self.retained_counts: Tensor

    def capacity(self, tokens: int) -> int:
        return self.plan.tokens(tokens) - self.plan.retained(tokens)

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        """Mean of both layers' pooled window attention; the newest tokens above all, as in SnapKV."""
        num_tokens = keys.shape[1]
        entries = self.plan.tokens(num_tokens)
        prefix = num_tokens - min(self.options.window, max(1, entries // 2), num_tokens)
        rank = torch.arange(num_tokens, dtype=torch.float32, device=keys.device) + (GENERATED - num_tokens)
        rank = rank.repeat(keys.shape[0], 1)
        if self.options.eviction == "snapkv" and prefix > 0:
            mass = torch.stack(
                [
                    received_mass(layer.window_queries(row, num_tokens), prompt.row(row)[0], scale)
                    for layer, prompt in zip(self._layers, self._prompts, strict=True)
                ]
            ).mean(dim=0)
            rank[:, :prefix] = ranks(pooled(mass[:, :prefix], self.options.kernel, self.options.pooling))
        return rank

    def build_pair(self, layers: tuple[QueryWindow, QueryWindow], prompts: tuple[LayerPrompt, LayerPrompt]) -> None:
        """Merge the prompt of two layers."""
        self._layers, self._prompts = layers, prompts
        self._kept_exact: list[list[Tensor]] = []
        self.build(prompts[1])
        self.retained_counts = torch.tensor([rows[0].shape[1] for rows in self._kept_exact])
        most = int(self.retained_counts.max())
        self.retained = [
            torch.stack([F.pad(rows[part], (0, 0, 0, most - rows[part].shape[1])) for rows in self._kept_exact])
            for part in range(4)
        ]
        for layer in layers:
            layer.forget_queries()
        del self._layers, self._prompts, self._kept_exact

    def compress(self, prompt: LayerPrompt, row: int) -> Entries:
        states = [tensor for one in self._prompts for tensor in one.row(row)]  # keys, values of both layers
        num_tokens = states[0].shape[1]
        rank = self.rank(states[2], states[3], row, prompt.scale)
        kept = rank.sort(dim=-1, descending=True, stable=True).indices[:, : self.plan.tokens(num_tokens)]
        kept = kept.sort(dim=-1).values
        states = [_take(tensor, kept) for tensor in states]
        entries, distance = merge(states, self.options.interpolation)
        count = self.plan.retained(num_tokens)
        order = distance.argsort(dim=-1, descending=True, stable=True)
        apart, together = order[:, :count].sort(dim=-1).values, order[:, count:].sort(dim=-1).values
        self._kept_exact.append([_take(tensor, apart) for tensor in states])
        return Entries(
            _take(entries.keys, together),
            _take(entries.values, together),
            rank.gather(1, kept).gather(1, together),
            {name: tensor.gather(1, together) for name, tensor in entries.side.items()},
        )

    def append_pair(self, states: list[Tensor], length: int) -> None:
        """Merge and store new tokens.

        Args:
            states: keys, values of the lower, then of the upper layer, [B, Hkv, Q, d] each.
            length: tokens before this forward.
        """
        self._length = length
        entries, _ = merge(states, self.options.interpolation)
        positions = self._new_positions(states[0].shape[2], states[0].device)
        self._store(entries.keys, entries.values, (GENERATED + positions).expand(*states[0].shape[:3]), entries.side)

    def retained_bias(self) -> Tensor | None:
        """[B, 1, 1, 1, R]: hides what fills up rows that retain fewer tokens; None when all rows retain R."""
        most = self.retained[0].shape[2]
        if int(self.retained_counts.min()) == most:
            return None
        beyond = torch.arange(most) >= self.retained_counts[:, None]
        hidden = torch.zeros(beyond.shape).masked_fill(beyond, float("-inf"))
        return hidden[:, None, None, None].to(self.retained[0].device)

    def mean_entries(self) -> float:
        """Live entries per row and KV head."""
        return self._live_mean() + float(self.retained_counts.float().mean())


def merge(states: list[Tensor], weight: float) -> tuple[Entries, Tensor]:
    """Merged entries [..., N, d] of keys, values of the lower, then of the upper layer, and the angular distance
    [..., N] of each token, keys and values together."""
    shared_key, key_distance = interpolate(states[0], states[2], weight)
    shared_value, value_distance = interpolate(states[1], states[3], weight)
    norms = [states[index].float().norm(dim=-1).to(states[0].dtype) for index in (0, 2, 1, 3)]
    side = dict(zip(NORMS, norms, strict=True))
    entries = Entries(shared_key.to(states[0].dtype), shared_value.to(states[0].dtype), norms[0].float(), side)
    return entries, key_distance + value_distance


def _take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Tokens `indices` [Hkv, c] of [Hkv, n, d]."""
    return tensor.gather(1, indices.unsqueeze(-1).expand(-1, -1, tensor.shape[2]))


class Shared:
    """A reference to a store that two layers share, invisible to the walk over a layer's own tensors: the cache walks
    the store once."""

    def __init__(self, store: MergedStore) -> None:
        self.store = store
        self.pending: tuple[Tensor, Tensor] | None = None  # the lower layer's new tokens, within one forward


class PairedLayer(QueryWindow):
    """One of the two layers of a pair: attends with its own norms over the shared directions."""

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, options: MiniCache, shared: Shared, upper: bool
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.window, self.observes = options.window, options.eviction == "snapkv"
        self.shared, self.upper = shared, upper

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        if self.observes:
            super().observe(query, keys, padding, scale)

    def build(self, prompt: LayerPrompt) -> None:
        raise AssertionError("pairs are built by the cache, when the upper layer is prefilled")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        self.attended = self.shared.store.mean_entries() + (key.shape[2] + 1) / 2
        output = self._attention(query, key, value, scale)
        if not self.upper:
            self.shared.pending = (key, value)
            return output
        assert self.shared.pending is not None
        self.shared.store.append_pair([*self.shared.pending, key, value], self._length)
        self.shared.pending = None
        return output

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention over merged, retained and new tokens. Norms multiply logits and weights, so that no restored key or
        value exists."""
        store, side = self.shared.store, int(self.upper)
        assert store.keys is not None and store.values is not None
        batch, num_heads, num_queries, head_dim = query.shape
        grouped = group_queries(query * scale, key.shape[1])
        shape = (batch, key.shape[1], num_heads // key.shape[1], num_queries, -1)
        key_norm, value_norm = (store.side[f"{kind}_norm_{side}"][:, :, None] for kind in ("key", "value"))
        parts = [
            (store.keys, store.values, store._bias()),
            (store.retained[2 * side], store.retained[2 * side + 1], store.retained_bias()),
            (key, value, causal_bias(num_queries, key.device)),
        ]
        logits = []
        for index, (keys, _, bias) in enumerate(parts):
            part = torch.matmul(grouped, keys.transpose(-1, -2)).float()
            part = (part * key_norm if index == 0 else part).view(shape)
            logits.append(part if bias is None else part + bias)
        weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1).flatten(2, 3)
        merged, *exact = weights.split([keys.shape[2] for keys, _, _ in parts], dim=-1)
        output = torch.matmul((merged * value_norm).to(value.dtype), store.values)
        for weight, (_, values, _) in zip(exact, parts[1:], strict=True):
            output = output + torch.matmul(weight.to(values.dtype), values)
        return output.view(batch, num_heads, num_queries, head_dim)
