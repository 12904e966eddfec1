"""One layer of SeKV while it decodes: what it holds, and a step that zooms. arXiv 2606.31145, 3.3.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q queries of a step, N tokens of the map, S spans,
C slots, W window, M fetched tokens, d head dimension. Token i of the map is token i of the row.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer
from kvcore.state import HostState
from sekv.attention import Blend, Entries
from sekv.factors import FactorStore
from sekv.fetch import Fetched, fetch
from sekv.maps import HIDDEN, Decision, Shares, StepView
from sekv.options import SeKVOptions
from sekv.plan import Plan, Planner
from sekv.prompt import PromptObserver
from sekv.routing import Router, dot
from sekv.rows import RowCodec, TokenStore
from sekv.shared import Shared
from sekv.sketch import Sketch
from sekv.slots import Slots
from sekv.span_map import SpanMap
from sekv.token_map import TokenMap
from sekv.window import Window

STATISTICS_EVERY = 4  # single steps between two counts of what each query head zooms into
MOST_QUERIES = 16  # of a step; longer inputs are several steps
PUT_EVERY = 2  # single steps between two admissions to the slots: one costs what a fetch does, and most come again
ROOM_PER_QUERY = 256  # tokens that each of them can fetch at least: the first must not starve the last
MOST_LOGITS = 2**26  # estimated at a time: bounds the memory of a step over very long contexts


class HostTensors(HostState):
    """Small tensors that only prefill and window overflow need.

    Attributes:
        analysis: [B, Hkv, m, d] rows that encode keys for the sketch, or None.
        warm_scores: [B, Hkv, N] until the prompt is compressed, then None.
        misfit: [B, Hkv, N], how badly the sketch describes each token, until then; or None.
    """

    def __init__(self, analysis: Tensor | None, warm_scores: Tensor | None, misfit: Tensor | None) -> None:
        self.analysis, self.warm_scores, self.misfit = analysis, warm_scores, misfit


class DecodingLayer(CacheLayer):
    """See `sekv.layer.SeKVLayer`, which fills and grows what this one decodes with.

    Args:
        options, planner, router: the method's options, its budget split, and routing.
        shared: what the layers share.
    """

    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        layer_idx: int,
        options: SeKVOptions,
        planner: Planner,
        router: Router,
        shared: Shared,
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.options, self.planner, self.router, self.shared = options, planner, router, shared
        self.link = shared.link
        self.observer: PromptObserver | None = PromptObserver(options.warm_queries)  # until the prompt is read
        self.sketch: Sketch | None = None  # until the map owns it
        self.window: Window | None = None
        self.codec: RowCodec | None = None
        self.store: TokenStore | FactorStore | None = None
        self.map: TokenMap | SpanMap | None = None
        self.slots: Slots | None = None
        self.host: HostTensors | None = None
        self.plans: list[Plan] = []
        self.pinned: list[int] = []
        self._capacity: list[int] = []
        self.room: Tensor | None = None  # int64 [B], most tokens fetched per KV head
        self._room_limits = 0, 0
        self.prompt_lengths: list[int] = []
        self.step = self.blocks = 0

    @abstractmethod
    def _spill(self, needed: int) -> None:
        """Rows whose window has no room for `needed` tokens: their oldest block becomes a span."""

    @torch.no_grad()  # what is stored is overwritten in place: a cache is for inference, training has sekv.student
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        """Many tokens are taken as few steps, of a length that does not depend on how full a window is."""
        most = self._longest_step(query.shape[0] * query.shape[1])
        self.fetched_bytes, attended, outputs = 0, 0.0, []
        for queries, keys, values in zip(*(t.split(most, dim=2) for t in (query, key, value)), strict=True):
            assert self.window is not None
            if self.window.until_full < keys.shape[2]:
                self._spill(keys.shape[2])
            outputs.append(self._attend(queries.float() * scale, keys, values))
            attended += self._attended * keys.shape[2]
        self.attended = attended / key.shape[2]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _longest_step(self, rows_and_heads: int) -> int:
        """Queries taken together: so many as memory, the window's blocks and the room for what they fetch allow."""
        assert self.window is not None
        most = min(MOST_QUERIES, self.window.longest_step)
        if self.map is not None:
            logits = rows_and_heads * self.map.width
            most = min(most, MOST_LOGITS // max(logits, 1), self._room_limits[0] // ROOM_PER_QUERY)
        return 1 << max(most.bit_length() - 1, 0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One step: query [B, Hq, Q, d] (fp32, scaled), key and value [B, Hkv, Q, d]."""
        assert self.window is not None and self.slots is not None and self.codec is not None
        num_queries = query.shape[2]
        self.window.push(key, value)
        self.step += num_queries
        recent_keys, recent_values, hidden = self.window.view()
        recent = _masked(dot(query, recent_keys), hidden)
        if num_queries > 1:
            later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu(1)
            recent[..., -num_queries:].masked_fill_(later, HIDDEN)
        slot_query = self.codec.fold(query)
        slot_keys, slot_values = self.codec.numbers(self.slots.rows)
        slots = _masked(dot(slot_query, slot_keys), self.slots.hidden())
        self._attended = self.window.mean_tokens() - (num_queries - 1) / 2
        decision = None if self.map is None else self.map.decide(self._view(query, recent, slots))
        fetching = fetched = None
        if decision is None:
            shares = Shares.of(recent, slots)
        else:
            assert self.store is not None and self.room is not None
            # with several tokens per forward the layer before may have grown further
            self.shared.buffer.reserve(self.slots.rows, self._room_limits[1])
            link, limits = self.shared.link, self._room_limits
            fetching = fetch(decision.want, decision.first, self.room, limits, self.store, link)
            shares = decision.shares(None if fetching is None else fetching.token)
        blend = self._resident(shares, Entries(recent_values.float()), slot_values)  # while the fetched rows travel
        if decision is not None and fetching is not None:
            fetched = fetching.arrive(self.shared.buffer)
            blend = self._with_fetched(blend, slot_query, decision, fetched)
        self._count_slots(None if decision is None else decision.slot_visible)
        if decision is None:
            self.slots.use(None, num_queries)
        else:
            self._after(decision, fetched, num_queries)
        return blend.output().to(value.dtype)

    def _view(self, query: Tensor, recent: Tensor, slots: Tensor) -> StepView:
        assert self.map is not None and self.slots is not None and self.shared.spans is not None
        assert self.store is not None and self.room is not None
        shared = self.shared.spans
        return StepView(
            router=self.router,
            layer=self.layer_idx,
            query=query,
            spans=shared.table(self.map.width, self.map.coarse_values.shape[2]),
            tokens=shared.tokens + self.step,
            slot_token=self.slots.token_index(self.map.width),
            slots=slots,
            recent=recent,
            room=self.room,
            neighbours=self.options.neighbours,
            use_coarse=self.options.coarse,
            ragged=shared.ragged,
            count=self._counts(query.shape[2]),
        )

    def _slots_of_spans(self) -> Tensor:
        """[B, Hkv, C] bool: slots whose token a span holds, so that using it is zooming: no sink, no anchor."""
        assert self.map is not None and self.slots is not None and self.shared.spans is not None
        spans = self.shared.spans.table(self.map.width, self.map.coarse_values.shape[2])
        token = self.slots.token_index(self.map.width)
        span = spans.of_token[:, None].expand(*token.shape[:2], -1).gather(-1, token)
        return span < spans.lengths.shape[1]

    def _counts(self, num_queries: int) -> bool:
        """Whether this step is one of those that are counted: all of several queries, some of the single ones."""
        return num_queries > 1 or self.step % STATISTICS_EVERY == 1

    def _resident(self, shares: Shares, recent: Entries, slots: Entries) -> Blend:
        """Window, slots and the coarse entries of the rest."""
        parts = [(shares.recent, recent), (shares.slots, slots)]
        if shares.spans is not None:
            assert self.map is not None and self.shared.spans is not None
            parts.append((shares.spans, Entries(self.map.coarse_values.float())))
            self._attended += self.shared.spans.mean_spans
        return Blend.of(shares.unit, shares.mass, parts)

    def _with_fetched(self, blend: Blend, slot_query: Tensor, decision: Decision, fetched: Fetched) -> Blend:
        """The fetched tokens are attended exactly, in the same softmax."""
        assert self.codec is not None
        keys, values = self.codec.numbers(fetched.rows)
        padding = fetched.asked.padding
        logits = _masked(dot(slot_query, keys), padding.unsqueeze(2))
        visible = decision.fetched_visible(fetched.asked.token)
        if visible is None:
            self._attended += fetched.asked.count / (padding.shape[0] * padding.shape[1])
            return blend.with_logits(logits, values)
        self._attended += _mean_seen(~padding, visible)
        return blend.with_logits(logits.masked_fill_(~visible, HIDDEN), values)

    def _after(self, decision: Decision, fetched: Fetched | None, num_queries: int) -> None:
        """Keep what was fetched, remember what was used, record what happened."""
        assert self.slots is not None
        statistics, row = self.shared.statistics, self.planner.row_bytes
        if self._counts(num_queries):
            found = int((decision.slot_used & self._slots_of_spans()).sum())
            statistics.found_bytes += (1 if num_queries > 1 else STATISTICS_EVERY) * found * row
            if decision.zoomed is not None:
                statistics.record(self.layer_idx, decision.zoomed, decision.want.shape[-1])
        self.slots.use(decision.slot_used, num_queries)
        if fetched is not None:
            asked = fetched.asked
            statistics.moved_bytes += asked.count * row
            self.fetched_bytes += fetched.moved_bytes if self.options.offload else 0
            if self.options.factor_cache and (num_queries > 1 or self.step % PUT_EVERY == 0):
                width = asked.token.shape[2]
                self.slots.put(fetched.moved, asked.head, asked.newest, asked.moved_token, width)

    def _count_slots(self, visible: Tensor | None) -> None:
        """Add the attended slots per row and KV head."""
        assert self.slots is not None
        whole = visible is None and not self.slots.holes
        self._attended += self.slots.count if whole else _mean_seen(self.slots.token >= 0, visible)

    # --- measurement
    def cache_bytes(self) -> int:
        """Device bytes of the slots."""
        return 0 if self.slots is None else sum(t.nbytes for t in self.slots.tensors())

    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        """Over slots and window as the step left them; slots hold what it fetched."""
        assert self.window is not None and self.slots is not None and self.codec is not None
        recent_keys, _, hidden = self.window.view()
        old = max(0, recent_keys.shape[2] - self.step)  # the window's tokens that belong to the prompt
        recent = _masked(dot(query * scale, recent_keys).float(), hidden)[..., :old]
        late = self.slots.token >= torch.tensor(self.prompt_lengths, device=self.slots.token.device)[:, None, None]
        gone = ((self.slots.token < 0) | late).unsqueeze(2)
        exact = _masked(dot(query * scale, self.slots.decode(self.codec)[0]).float(), gone)
        return torch.logsumexp(torch.cat([recent, exact], dim=-1), dim=-1)


def _masked(logits: Tensor, hidden: Tensor | None) -> Tensor:
    """Logits [B, Hq, 1, n] without the entries `hidden` [B, 1 or Hkv, 1, n] (None: all stay)."""
    if hidden is None:
        return logits
    grouped = logits.unflatten(1, (hidden.shape[1], -1))
    return grouped.masked_fill(hidden.unsqueeze(2), HIDDEN).flatten(1, 2)


def _mean_seen(held: Tensor, visible: Tensor | None) -> float:
    """Mean number, over rows, KV heads and queries, of the entries `held` [B, Hkv, n] that a query group attends to.

    Args:
        visible: [B, Hq, Q, n] bool, or None for all.
    """
    seen = held
    if visible is not None:
        seen = visible.unflatten(1, (held.shape[1], -1)).any(2) & held.unsqueeze(2)
    return float(seen.sum(-1).float().mean())
