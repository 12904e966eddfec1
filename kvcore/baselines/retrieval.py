"""Shared by the methods that keep tokens on the host and fetch some of them at every step.

Device: sinks, an exact local window, one summary per unit (page, sentence or cluster), and one fetch buffer that all
layers use in turn. Host: the keys and values of everything between sinks and window, grouped by unit. Each new token is
one step: what leaves the window joins the units, units are scored, the best are fetched, one softmax covers all parts.
A forward of several tokens is that many steps, so its results equal those of decoding one by one, and are causal.

Legend: B batch rows, Hq query heads, Hkv KV heads, n tokens of a row, S sinks, W window slots, U units,
H host tokens, K fetched tokens, R rows that spill, c spilled tokens, d head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcore.baselines.retrieval_plan import Planner, Split
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CacheLayer, CompressedCache, LayerPrompt
from kvcore.kernels import attend_parts
from kvcore.state import BatchedState, HostState

Part = tuple[Tensor, Tensor, "Tensor | None"]
SIZE_BYTES = 4  # of a unit's token count
HOST_GROWTH = 256  # host slots added at a time, so that a decode step does not copy the host store


class TokenStore(BatchedState):
    """Keys and values [B, Hkv, H, d] grouped by unit; the first `counts[row]` slots of a row are filled."""

    def __init__(self, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        self.keys, self.values, self.counts = keys, values, counts

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Append c tokens [R, Hkv, c, d] to the rows `rows` [R]."""
        count = keys.shape[2]
        extra = int(self.counts[rows].max()) + count - self.keys.shape[2]
        if extra > 0:
            room = (*self.keys.shape[:2], max(extra, HOST_GROWTH), self.keys.shape[3])
            self.keys = torch.cat([self.keys, self.keys.new_zeros(room)], dim=2)
            self.values = torch.cat([self.values, self.values.new_zeros(room)], dim=2)
        slots = self.counts[rows, None] + torch.arange(count)
        self.keys[rows[:, None], :, slots] = keys.transpose(1, 2).to(self.keys.device)
        self.values[rows[:, None], :, slots] = values.transpose(1, 2).to(self.values.device)
        self.counts[rows] += count

    def reorder_last(self, row: int, order: Tensor) -> None:
        """Put the last m tokens of a row into another order, [Hkv, m], per head."""
        last = slice(int(self.counts[row]) - order.shape[1], int(self.counts[row]))
        index = order.to(self.keys.device).unsqueeze(-1).expand(-1, -1, self.keys.shape[3])
        self.keys[row, :, last] = self.keys[row, :, last].gather(1, index)
        self.values[row, :, last] = self.values[row, :, last].gather(1, index)


class HostStore(TokenStore, HostState):
    """A token store in host memory."""


class Workspace(BatchedState):
    """The fetch buffer [B, Hkv, K, d], overwritten by each layer in turn: counted once."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def reserve(self, shape: tuple[int, ...], like: Tensor) -> None:
        """Make the buffer [B, Hkv, K, d] that the next step needs, on the device of `like`."""
        if self.keys is None or self.keys.shape != shape:
            self.keys, self.values = like.new_empty(shape), like.new_empty(shape)

    def fetch(self, host: TokenStore, index: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the host tokens `index` [B, Hkv, K] into the buffer."""
        batch, num_kv_heads, count = index.shape
        slots, dim = host.keys.shape[2:]
        self.reserve((batch, num_kv_heads, count, dim), like)
        assert self.keys is not None and self.values is not None
        base = torch.arange(batch * num_kv_heads, device=host.keys.device).view(batch, num_kv_heads, 1) * slots
        flat = (index.to(host.keys.device) + base).flatten()
        for source, target in ((host.keys, self.keys), (host.values, self.values)):
            rows = source.reshape(-1, dim)
            if target.device == source.device:
                torch.index_select(rows, 0, flat, out=target.view(-1, dim))
            else:
                target.copy_(rows.index_select(0, flat).view(target.shape))
        return self.keys, self.values


class Shared:
    """Holds what the layers share, out of reach of the walk over each layer's tensors."""

    def __init__(self) -> None:
        self.workspace = Workspace()


class RetrievalCache(CompressedCache):
    """A cache whose layers share one fetch buffer."""

    def stored_states(self) -> list[BatchedState]:
        holders = [layer.shared for layer in self.layers if isinstance(layer, RetrievalLayer)]
        return [*self.layers, *(holder.workspace for holder in holders[:1])]


@dataclass
class Units:
    """How the middle of one row's prompt is grouped.

    Attributes:
        order: [Hkv, m] token indices in host order: unit after unit.
        sizes: [Hkv, U] tokens of each unit.
        summaries: name -> [Hkv, U, ...].
    """

    order: Tensor
    sizes: Tensor
    summaries: dict[str, Tensor]


@dataclass
class Choice:
    """What one step fetches.

    Attributes:
        index: [B, Hkv, K] host slots.
        live: [B, Hkv, K] False where a slot is padding.
        order: [B, Hkv, U] units, best first.
        taken: [B, Hkv, U] in that order: the unit is fetched (wholly).
    """

    index: Tensor
    live: Tensor
    order: Tensor
    taken: Tensor


class RetrievalLayer(CacheLayer):
    """One layer of a retrieval method; subclasses group tokens, summarise units and score them.

    Args:
        planner: how a row's device bytes are split.
        shared: the fetch buffer's holder, one per cache.

    Class attributes:
        whole_units: only whole units are fetched; otherwise the last one is cut to fit.
        offload: the units' tokens live on the host.
    """

    whole_units = False
    offload = True

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: Planner, shared: Shared) -> None:
        super().__init__(spec, budget, layer_idx)
        self.planner, self.shared = planner, shared
        self.sink_keys: Tensor | None = None  # [B, Hkv, S, d]
        self.sink_values: Tensor | None = None
        self.sink_counts: Tensor | None = None  # [B]
        self.window_keys: Tensor | None = None  # [B, Hkv, W, d], right-aligned
        self.window_values: Tensor | None = None
        self.window_counts: Tensor | None = None  # [B]
        self.lengths: Tensor | None = None  # [B], tokens of each row
        self.unit_tokens: Tensor | None = None  # [B], mean tokens per unit of each row's plan
        self.unit_counts: Tensor | None = None  # [B], units of each row
        self.host: TokenStore | None = None
        self.sizes: Tensor | None = None  # [B, Hkv, U] int32, 0 where a row has no such unit
        self.summaries: dict[str, Tensor] = {}

    # --- what a method decides
    def plan_units(self, row: int, tokens: int) -> float:
        """Mean tokens per unit for a row of `tokens` prompt tokens."""
        return self.planner.unit_size(tokens)

    @abstractmethod
    def group(self, keys: Tensor, values: Tensor, row: int, first: int) -> Units:
        """Units of the tokens [Hkv, m, d] between sinks and window of a row, which start at its token `first`."""

    @abstractmethod
    def score(self, query: Tensor, scale: float) -> Tensor:
        """fp32 score [B, Hkv, U] of every unit for one query token [B, Hq, 1, d], query heads of a group averaged."""

    @abstractmethod
    def absorb(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put spilled tokens [R, Hkv, c, d], already written to the host, into the units of `rows` [R]."""

    def spill_size(self, rows: Tensor) -> Tensor:
        """Tokens [R] that leave the windows of `rows` [R] at a time."""
        return torch.ones_like(rows)

    def tail(self, choice: Choice) -> list[Part]:
        """Parts that stand for what is not fetched."""
        return []

    # --- prefill
    def build(self, prompt: LayerPrompt) -> None:
        rows = [prompt.row(row) for row in range(prompt.keys.shape[0])]
        lengths = [keys.shape[1] for keys, _ in rows]
        unit_tokens = [self.plan_units(row, length) for row, length in enumerate(lengths)]
        self.unit_tokens = torch.tensor(unit_tokens, dtype=torch.float64)
        cuts = [self.planner.split(length, size) for length, size in zip(lengths, unit_tokens, strict=True)]
        self.sink_counts = torch.tensor([cut.sinks for cut in cuts])
        self.window_counts = torch.tensor([cut.window for cut in cuts])
        self.lengths = torch.tensor(lengths)
        first = [[pair[i][:, : cut.sinks] for pair, cut in zip(rows, cuts, strict=True)] for i in (0, 1)]
        last = [
            [pair[i][:, pair[i].shape[1] - cut.window :] for pair, cut in zip(rows, cuts, strict=True)] for i in (0, 1)
        ]
        self.sink_keys, self.sink_values = _stack(first[0]), _stack(first[1])
        self.window_keys, self.window_values = _stack(last[0], left=True), _stack(last[1], left=True)
        self._build_units(rows, [(cut.sinks, length - cut.window) for cut, length in zip(cuts, lengths, strict=True)])

    def _build_units(self, rows: list[tuple[Tensor, Tensor]], spans: list[tuple[int, int]]) -> None:
        middle = [(k[:, a:b], v[:, a:b]) for (k, v), (a, b) in zip(rows, spans, strict=True)]
        units = [self.group(k, v, row, spans[row][0]) for row, (k, v) in enumerate(middle)]
        self.unit_counts = torch.tensor([unit.sizes.shape[1] for unit in units])
        self.sizes = _stack([unit.sizes.to(torch.int32) for unit in units])
        self.summaries = {name: _stack([unit.summaries[name] for unit in units]) for name in units[0].summaries}
        ordered = [
            [t.gather(1, unit.order.unsqueeze(-1).expand(-1, -1, t.shape[2])) for t in pair]
            for pair, unit in zip(middle, units, strict=True)
        ]
        counts = torch.tensor([unit.order.shape[1] for unit in units])
        keys, values = (_stack([pair[i].cpu() if self.offload else pair[i] for pair in ordered]) for i in (0, 1))
        self.host = (HostStore if self.offload else TokenStore)(keys, values, counts)
        shape = (len(rows), keys.shape[1], max(self.quotas()), keys.shape[3])
        self.shared.workspace.reserve(shape, rows[0][0])  # now, so that the largest moment is on the books

    # --- decode
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        self.fetched_bytes, attended, outputs = 0, 0.0, []
        for index in range(key.shape[2]):  # several tokens are as many steps; plain decoding has one
            one = slice(index, index + 1)
            self._push(key[:, :, one], value[:, :, one])
            outputs.append(self._attend_one(query[:, :, one], scale))
            attended += self._attended
        self.attended = attended / key.shape[2]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _attend_one(self, query: Tensor, scale: float) -> Tensor:
        parts = self.resident_parts()
        self._attended = float((self.sink_counts + self.window_counts).float().mean())  # type: ignore[operator]
        quotas = self.quotas()
        if max(quotas) > 0:
            assert self.host is not None
            choice = self.choose(self.score(query, scale), quotas)
            keys, values = self.shared.workspace.fetch(self.host, choice.index, query)
            parts.append((keys, values, hide(~choice.live)))
            live = int(choice.live.sum())
            self.fetched_bytes += live * self.spec.entry_bytes if self.offload else 0
            tail = self.tail(choice)
            parts.extend(tail)
            seen = live + sum(int((bias != float("-inf")).sum()) for _, _, bias in tail if bias is not None)
            self._attended += seen / choice.live.shape[0] / choice.live.shape[1]
        return attend_parts(query, parts, scale)

    def quotas(self) -> list[int]:
        """Tokens that each row may fetch in this step."""
        assert self.host is not None
        held = self.host.counts.tolist()
        return [min(split.fetched, count) for split, count in zip(self.splits(), held, strict=True)]

    def choose(self, scores: Tensor, quotas: list[int]) -> Choice:
        """Units by falling score until `quotas[row]` tokens are taken; scores [B, Hkv, U]."""
        assert self.sizes is not None
        sizes = self.sizes.long()
        order = scores.masked_fill(sizes == 0, float("-inf")).argsort(dim=-1, descending=True, stable=True)
        ranked = sizes.gather(-1, order)
        stop = ranked.cumsum(-1)
        quota = torch.tensor(quotas, device=scores.device)[:, None, None]
        taken = (stop <= quota) & (ranked > 0)
        slot = torch.arange(max(quotas), device=scores.device).expand(*scores.shape[:2], -1).contiguous()
        rank = torch.searchsorted(stop, slot, right=True).clamp_max(stop.shape[-1] - 1)
        unit = order.gather(-1, rank)
        starts = sizes.cumsum(-1) - sizes
        index = starts.gather(-1, unit) + slot - (stop - ranked).gather(-1, rank)
        limit = (stop * taken).amax(-1, keepdim=True) if self.whole_units else quota.minimum(stop[..., -1:])
        live = slot < limit
        return Choice(index.masked_fill(~live, 0), live, order, taken)

    def resident_parts(self) -> list[Part]:
        """Sinks and window as attention parts."""
        parts: list[Part] = []
        assert self.sink_keys is not None and self.sink_values is not None and self.sink_counts is not None
        assert self.window_keys is not None and self.window_values is not None and self.window_counts is not None
        device = self.sink_keys.device
        num_sinks, width = self.sink_keys.shape[2], self.window_keys.shape[2]
        if num_sinks:
            beyond = torch.arange(num_sinks)[None, None] >= self.sink_counts[:, None, None]
            parts.append((self.sink_keys, self.sink_values, hide(beyond.to(device)) if bool(beyond.any()) else None))
        before = torch.arange(width)[None, None] < width - self.window_counts[:, None, None]
        parts.append((self.window_keys, self.window_values, hide(before.to(device)) if bool(before.any()) else None))
        return parts

    def splits(self) -> list[Split]:
        """The plan of each row at its present length."""
        assert self.lengths is not None and self.unit_tokens is not None
        return [
            self.planner.split(length, size)
            for length, size in zip(self.lengths.tolist(), self.unit_tokens.tolist(), strict=True)
        ]

    # --- the window
    def _push(self, key: Tensor, value: Tensor) -> None:
        """One new token [B, Hkv, 1, d] enters the window; the oldest leave it where a row's share is full."""
        assert self.lengths is not None and self.window_counts is not None
        assert self.window_keys is not None and self.window_values is not None
        self.lengths = self.lengths + 1
        limits = torch.tensor([split.window for split in self.splits()])
        while bool((over := self.window_counts + 1 > limits).any()):
            rows = over.nonzero().flatten()
            sizes = self.spill_size(rows)
            for size in sizes.unique().tolist():  # rows of equal length share one size
                self._spill(rows[sizes == size], size)
        keep = self.window_keys.shape[2] - int(self.window_counts.max())
        self.window_keys = torch.cat([self.window_keys[:, :, keep:], key], dim=2)
        self.window_values = torch.cat([self.window_values[:, :, keep:], value], dim=2)
        self.window_counts = self.window_counts + 1

    def _spill(self, rows: Tensor, count: int) -> None:
        """Move the oldest `count` window tokens of `rows` [R] to the host."""
        assert self.window_counts is not None and self.window_keys is not None and self.window_values is not None
        assert self.host is not None
        counts = self.window_counts[rows]
        slots = (self.window_keys.shape[2] - counts)[:, None] + torch.arange(count)
        where = (rows[:, None], slice(None), slots)
        keys, values = (t[where].transpose(1, 2) for t in (self.window_keys, self.window_values))
        self.window_counts = self.window_counts.index_add(0, rows, torch.full_like(rows, -count))
        self.host.write(rows, keys, values)
        self.absorb(rows.to(keys.device), keys, values)

    def add_units(self, rows: Tensor, sizes: Tensor, summaries: dict[str, Tensor]) -> None:
        """Append u units (sizes [R, Hkv, u], summaries [R, Hkv, u, ...]) to `rows`, after those each row has."""
        assert self.sizes is not None and self.unit_counts is not None
        have, count = self.unit_counts[rows.cpu()], sizes.shape[2]
        extra = int(have.max()) + count - self.sizes.shape[2]
        if extra > 0:
            self.sizes = _widen(self.sizes, extra)
            self.summaries = {name: _widen(t, extra) for name, t in self.summaries.items()}
        slots = (have[:, None] + torch.arange(count)).to(rows.device)
        self.unit_counts[rows.cpu()] += count
        self.sizes[rows[:, None], :, slots] = sizes.transpose(1, 2).to(self.sizes.dtype)
        for name, tensor in summaries.items():
            self.summaries[name][rows[:, None], :, slots] = tensor.transpose(1, 2).to(self.summaries[name].dtype)


def hide(mask: Tensor) -> Tensor:
    """Additive bias [B, Hkv or 1, 1, 1, N] from a mask [B, Hkv or 1, N] of what to hide."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, float("-inf"))[:, :, None, None]


def _widen(tensor: Tensor, extra: int) -> Tensor:
    """[B, Hkv, U, ...] -> [B, Hkv, U + extra, ...], zeros."""
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:2], extra, *tensor.shape[3:])], dim=2)


def _stack(tensors: list[Any], left: bool = False) -> Tensor:
    """[Hkv, x, ...] of each row -> [B, Hkv, max x, ...], zeros after (or before) the shorter ones."""
    width = max(t.shape[1] for t in tensors)
    out = tensors[0].new_zeros(len(tensors), tensors[0].shape[0], width, *tensors[0].shape[2:])
    for row, tensor in enumerate(tensors):
        start = width - tensor.shape[1] if left else 0
        out[row, :, start : start + tensor.shape[1]] = tensor
    return out


def check_options(
    method: Any, positive: tuple[str, ...] = (), non_negative: tuple[str, ...] = (), shares: tuple[str, ...] = ()
) -> None:
    """Refuse options out of range.

    Raises:
        ValueError: an option in `positive` below 1, in `non_negative` below 0, or in `shares` outside (0, 1].
    """
    rules = [*((n, getattr(method, n) >= 1, ">= 1") for n in positive)]
    rules += [(n, getattr(method, n) >= 0, ">= 0") for n in non_negative]
    rules += [(n, 0 < getattr(method, n) <= 1, "in (0, 1]") for n in shares]
    for name, holds, rule in rules:
        if not holds:
            raise ValueError(f"method '{method.name}': {name} must be {rule}; received {getattr(method, name)!r}")
