"""Shared by the methods that keep tokens on the host and fetch some of them at every step.

Device: sinks, an exact local window, one summary per unit (page, sentence or cluster), and one fetch buffer that all
layers use in turn. Host: the keys and values of everything between sinks and window, grouped by unit. Each new token is
one step: what leaves the window joins the units, units are scored, the best are fetched, one softmax covers all parts.
A forward of several tokens is that many steps, so its results equal those of decoding one by one, and are causal.

Legend: B batch rows, Hq query heads, Hkv KV heads, n tokens of a row, m tokens between its sinks and window, U units,
K fetched tokens, R rows that spill, c spilled tokens, N attended tokens, d head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvcore.baselines.retrieval_choice import Choice, Units, choose
from kvcore.baselines.retrieval_plan import Planner, Split
from kvcore.baselines.retrieval_store import HostStore, Part, Resident, Shared, TokenStore, hide, stack, widen
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.kernels import attend_parts, group_queries
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.state import BatchedState

SIZE_BYTES = 4  # of a unit's token count


class RetrievalCache(CompressedCache):
    """A cache whose layers share one fetch buffer."""

    def stored_states(self) -> list[BatchedState]:
        holders = [layer.shared for layer in self.layers if isinstance(layer, RetrievalLayer)]
        return [*self.layers, *(holder.workspace for holder in holders[:1])]


class RetrievalLayer(CacheLayer):
    """One layer of a retrieval method; subclasses group tokens, summarise units and score them.

    Args:
        planner: how a row's device bytes are split.
        shared: the fetch buffer's holder, one per cache.

    Class attributes:
        whole_units: only whole units are fetched; otherwise the last one is cut to fit.
        offloaded: the units' tokens live on the host.
    """

    whole_units = False
    offloaded = True
    host_fields = frozenset({"lengths", "unit_tokens", "unit_counts", "prompt"})

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: Planner, shared: Shared) -> None:
        super().__init__(spec, budget, layer_idx)
        self.planner, self.shared, self.link = planner, shared, shared.link
        self.resident: Resident
        self.host: TokenStore
        self.sizes: Tensor  # [B, Hkv, U] int32, 0 where a row has no such unit
        self.summaries: dict[str, Tensor] = {}  # [B, Hkv, U, ...]
        self.lengths: Tensor  # [B], tokens of each row
        self.unit_tokens: Tensor  # [B], mean tokens per unit in each row's plan
        self.unit_counts: Tensor  # [B], units of each row
        self.prompt: Tensor  # [B, 2], prompt tokens of each row: all, and those on the host

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

    def follow(self, query: Tensor, index: int) -> None:
        """See the query [B, Hq, 1, d] of the forward's token `index`, now in the window, before units are scored."""

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
        sizes = [self.plan_units(row, length) for row, length in enumerate(lengths)]
        self.lengths, self.unit_tokens = torch.tensor(lengths), torch.tensor(sizes, dtype=torch.float64)
        splits = self.splits()
        self.resident = Resident(rows, [split.sinks for split in splits], [split.window for split in splits])
        self._build_units(rows, [(split.sinks, n - split.window) for split, n in zip(splits, lengths, strict=True)])
        # reserved now, so that the largest moment is on the books
        shape = (len(rows), self.spec.num_kv_heads, max(self.quotas()), self.spec.head_dim)
        self.shared.workspace.reserve(shape, prompt.keys)

    def _build_units(self, rows: list[tuple[Tensor, Tensor]], spans: list[tuple[int, int]]) -> None:
        middle = [(k[:, a:b], v[:, a:b]) for (k, v), (a, b) in zip(rows, spans, strict=True)]
        units = [self.group(k, v, row, spans[row][0]) for row, (k, v) in enumerate(middle)]
        self.unit_counts = torch.tensor([unit.sizes.shape[1] for unit in units])
        self.sizes = stack([unit.sizes.to(torch.int32) for unit in units])
        self.summaries = {name: stack([unit.summaries[name] for unit in units]) for name in units[0].summaries}
        ordered = [
            [t.gather(1, unit.order.unsqueeze(-1).expand(-1, -1, t.shape[2])) for t in pair]
            for pair, unit in zip(middle, units, strict=True)
        ]
        counts = torch.tensor([unit.order.shape[1] for unit in units])
        keys, values = (stack([pair[i].cpu() if self.offloaded else pair[i] for pair in ordered]) for i in (0, 1))
        self.host = (HostStore if self.offloaded else TokenStore)(keys, values, counts)
        self.prompt = torch.stack([self.lengths, counts], dim=1)

    # --- decode
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        self.fetched_bytes, attended, outputs = 0, 0.0, []
        for index in range(key.shape[2]):  # several tokens are as many steps; plain decoding has one
            one = slice(index, index + 1)
            self._push(key[:, :, one], value[:, :, one])
            self.follow(query[:, :, one], index)
            output, count = self.attend_one(query[:, :, one], scale)
            outputs.append(output)
            attended += count
        self.attended = attended / key.shape[2]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def attend_one(self, query: Tensor, scale: float) -> tuple[Tensor, float]:
        """Output [B, Hq, 1, d] of one query, and the mean attended entries per row and KV head."""
        parts, attended, quotas = self.resident.parts(), self.resident.mean_count, self.quotas()
        if max(quotas) > 0:
            choice = choose(self.score(query, scale), self.sizes, quotas, self.whole_units)
            transfer = self.shared.workspace.request(self.host, choice.index, query, self.shared.link)
            tail, live = self.tail(choice), int(choice.live.sum())
            keys, values = transfer.arrive()
            parts += [(keys, values, hide(~choice.live)), *tail]
            self.fetched_bytes += live * self.spec.entry_bytes if self.offloaded else 0
            seen = live + sum(int((bias != float("-inf")).sum()) for _, _, bias in tail if bias is not None)
            attended += seen / (choice.live.shape[0] * choice.live.shape[1])
        return attend_parts(query, parts, scale), attended

    def quotas(self) -> list[int]:
        """Tokens that each row may fetch in this step."""
        held = self.host.counts.tolist()
        return [min(split.fetched, count) for split, count in zip(self.splits(), held, strict=True)]

    def splits(self) -> list[Split]:
        """The plan of each row at its present length."""
        pairs = zip(self.lengths.tolist(), self.unit_tokens.tolist(), strict=True)
        return [self.planner.split(length, size) for length, size in pairs]

    # --- the window
    def _push(self, key: Tensor, value: Tensor) -> None:
        """One new token [B, Hkv, 1, d] enters the window; the oldest leave it where a row's share is full."""
        self.lengths = self.lengths + 1
        limits = torch.tensor([split.window for split in self.splits()])
        while bool((over := self.resident.counts + 1 > limits).any()):
            rows = over.nonzero().flatten()
            sizes = self.spill_size(rows)
            for size in sizes.unique().tolist():  # rows of equal length share one size
                self._spill(rows[sizes == size], size)
        self.resident.push(key, value)

    def _spill(self, rows: Tensor, count: int) -> None:
        """Move the oldest `count` window tokens of `rows` [R] to the host."""
        keys, values = self.resident.oldest(rows, count)
        self.host.write(rows, keys, values)
        self.absorb(rows.to(keys.device), keys, values)

    def add_units(self, rows: Tensor, sizes: Tensor, summaries: dict[str, Tensor]) -> None:
        """Append u units (sizes [R, Hkv, u], summaries [R, Hkv, u, ...]) to `rows`, after those each row has."""
        have, count = self.unit_counts[rows.cpu()], sizes.shape[2]
        extra = int(have.max()) + count - self.sizes.shape[2]
        if extra > 0:
            self.sizes = widen(self.sizes, extra)
            self.summaries = {name: widen(t, extra) for name, t in self.summaries.items()}
        slots = (have[:, None] + torch.arange(count)).to(rows.device)
        self.unit_counts[rows.cpu()] += count
        self.sizes[rows[:, None], :, slots] = sizes.transpose(1, 2).to(self.sizes.dtype)
        for name, tensor in summaries.items():
            self.summaries[name][rows[:, None], :, slots] = tensor.transpose(1, 2).to(self.summaries[name].dtype)

    def open_units(self, rows: Tensor, opens: Tensor, fresh: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """One spilled token per row opens a unit (summaries `fresh` [R, Hkv, 1, ...]) or joins its row's newest one.

        Args:
            rows: [R].
            opens: [R] bool.

        Returns:
            Of the joining ones: rows, units (sizes already raised), and their places among the R.
        """
        newest = (self.unit_counts[rows.cpu()] - 1).to(rows.device)
        if bool(opens.any()):
            shape = (int(opens.sum()), self.spec.num_kv_heads, 1)
            ones = torch.ones(shape, dtype=torch.int32, device=rows.device)
            self.add_units(rows[opens], ones, {name: t[opens] for name, t in fresh.items()})
        places = (~opens).nonzero().flatten()
        where, unit = rows[places], newest[places]
        self.sizes[where, :, unit] += 1
        return where, unit, places

    def average_in(self, name: str, joined: tuple[Tensor, Tensor, Tensor], new: Tensor) -> None:
        """Move the mean `name` of units that took in one token each, `new` [R, Hkv, 1, d]."""
        where, unit, places = joined
        size = self.sizes[where, :, unit].unsqueeze(-1)
        old = self.summaries[name][where, :, unit].float()
        moved = old + (new[places, :, 0].float() - old) / size
        self.summaries[name][where, :, unit] = moved.to(self.summaries[name].dtype)

    # --- measurements
    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        parts = self.resident.parts()
        keys = [part[0] for part in parts]
        live = [
            torch.ones_like(k[..., 0]).bool() if b is None else (b == 0).view(-1, 1, k.shape[2]) for k, _, b in parts
        ]
        generated = (self.lengths - self.prompt[:, 0]).to(query.device)[:, None, None]
        width = keys[-1].shape[2]
        live[-1] = live[-1] & (torch.arange(width, device=query.device) < width - generated)
        index, fetched = self.attended_slots(query, scale)
        dim = keys[0].shape[3]
        rows = self.host.keys.reshape(-1, dim).index_select(0, self.host.flat_index(index))
        keys.append(rows.view(*index.shape, dim).to(query.device))
        live.append(fetched & (index < self.prompt[:, 1].to(query.device)[:, None, None]))
        shown = torch.cat([mask.expand(k.shape[:3]) for mask, k in zip(live, keys, strict=True)], dim=2)
        grouped = group_queries(query, keys[0].shape[1]) * scale
        logits = torch.matmul(grouped, torch.cat(keys, dim=2).transpose(-1, -2)).float()
        return torch.logsumexp(logits.masked_fill(~shown.unsqueeze(2), float("-inf")), dim=-1).view(query.shape[:3])

    def attended_slots(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Host slots [B, Hkv, K] that the latest step fetched, and which of them count."""
        quotas = self.quotas()
        if max(quotas) == 0:
            empty = torch.zeros(query.shape[0], self.spec.num_kv_heads, 0, dtype=torch.long, device=query.device)
            return empty, empty.bool()
        choice = choose(self.score(query, scale), self.sizes, quotas, self.whole_units)
        return choice.index, choice.live


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
