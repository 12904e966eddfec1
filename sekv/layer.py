"""One layer of SeKV: prompt -> map, factor cache and host rows; then decode steps that zoom. arXiv 2606.31145, 3.2-3.3.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, N tokens of the map, S spans, C slots, M fetched
tokens, Q new tokens, d head dimension. Token i of the map is token i of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.state import HostState
from sekv.attention import Blend, Entries
from sekv.factors import FactorStore, factorise
from sekv.fetch import Fetched, fetch
from sekv.lowrank import check_finite
from sekv.maps import HIDDEN, Decision, Shares, SpanMap, StepView, TokenMap
from sekv.options import SeKVOptions
from sekv.plan import Plan, Planner
from sekv.prompt import PromptBody, PromptObserver, build_map, extend_map, first_slots
from sekv.routing import Router, dot
from sekv.rows import RowCodec, Rows, TokenStore, make_store
from sekv.segmentation import Kind, Segments
from sekv.shared import Shared
from sekv.sketch import Sketch
from sekv.slots import Slots
from sekv.window import Window

STATISTICS_EVERY = 4  # steps between two counts of what each query head zooms into


class HostTensors(HostState):
    """Small tensors that only prefill and window overflow need.

    Attributes:
        analysis: [B, Hkv, m, d] rows that encode keys for the sketch, or None.
        warm_scores: [B, Hkv, N] until the prompt is compressed, then None.
        misfit: [B, Hkv, N], how badly the sketch describes each token, until then; or None.
    """

    def __init__(self, analysis: Tensor | None, warm_scores: Tensor | None, misfit: Tensor | None) -> None:
        self.analysis, self.warm_scores, self.misfit = analysis, warm_scores, misfit


class SeKVLayer(CacheLayer):
    """See `sekv.cache.SeKVCache`, which compresses in two moves: `build` when the layer's prefill ends (keys and values
    leave for the host), `finish` when the spans are known.

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
        self.observer: PromptObserver | None = PromptObserver(options.warm_queries)
        self.window: Window | None = None
        self.codec: RowCodec | None = None
        self.store: TokenStore | FactorStore | None = None
        self.sketch: Sketch | None = None
        self.map: TokenMap | SpanMap | None = None
        self.slots: Slots | None = None
        self.host: HostTensors | None = None
        self.plans: list[Plan] = []
        self.pinned: list[int] = []
        self.room: Tensor | None = None  # int64 [B], most tokens fetched per KV head
        self._room_limits = 0, 0
        self._capacity: list[int] = []
        self.prompt_lengths: list[int] = []
        self.step = self.blocks = 0

    # --- prefill
    @torch.no_grad()
    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        assert self.observer is not None
        start = keys.shape[2] - query.shape[2]
        self.observer.observe(query, keys.shape[1], [max(0, pad - start) for pad in padding], scale)

    @torch.no_grad()
    def build(self, prompt: LayerPrompt) -> None:
        """Keys and values leave for the host; the window and the sketch stay."""
        check_finite(prompt.keys, f"layer {self.layer_idx}, keys")
        check_finite(prompt.values, f"layer {self.layer_idx}, values")
        self.prompt_lengths = [prompt.keys.shape[2] - pad for pad in prompt.padding]
        sizes = [self.planner.window(length) for length in self.prompt_lengths]
        windows = [min(size, length) for (size, _), length in zip(sizes, self.prompt_lengths, strict=True)]
        body = PromptBody.of(prompt, windows)
        self.window = Window(*PromptBody.window(prompt, windows), torch.tensor([block for _, block in sizes]))
        self.codec = RowCodec(body.keys, self.options.row_bits)
        rows, counts = self.codec.encode(body.keys, body.values), torch.tensor(body.counts)
        self.store = make_store(rows, self.options.offload, self.options.pin, counts)
        observer, self.observer = self.observer, None
        assert observer is not None and observer.newest is not None
        analysis = misfit = None
        if self.options.summary == "sketch" and body.keys.shape[2]:
            moment = observer.moment if self.options.query_aware else None
            form = self.planner.choose_sketch(max(self.prompt_lengths))
            self.sketch, analysis = Sketch.fit(body.keys, body.visible, moment, form)
            analysis = analysis.cpu()
            if self.options.outlier_share > 0:
                misfit = self.sketch.misfit(body.keys, body.visible, moment).cpu()
        self.host = HostTensors(analysis, body.warm_scores(observer.newest, self.prompt_lengths).cpu(), misfit)

    @torch.no_grad()
    def finish(self, segments: list[Segments], plans: list[Plan], surprisal: Tensor | None) -> None:
        """The spans are known (`shared.spans` is filled): build the map and fill the first slots.

        Args:
            segments, plans: of each row.
            surprisal: [B, N] for weighted means, or None.
        """
        assert self.store is not None and self.codec is not None and self.host is not None
        assert self.shared.spans is not None and self.host.warm_scores is not None and self.window is not None
        device = self.window.keys.device
        self._apply(plans, device)
        self.pinned = [int(segment.where(Kind.SINK, Kind.ANCHOR).numel()) for segment in segments]
        spans, tokens = self.shared.spans.lengths.shape[1], self.store.used
        if any(plan.mapped for plan in plans):
            index = self.shared.spans.table(tokens, spans).of_token[:, :-1]
            assert isinstance(self.store, TokenStore)
            keys, values = self.codec.decode(self.store.all_rows(device))
            dtype = self.options.coarse_dtype(self.spec)
            counts = self.shared.spans.mapped, self.shared.spans.counts
            self.map = build_map(self.options, keys, values, index, spans, surprisal, self.sketch, dtype, counts)
            self._factorise(index, spans)
        self.sketch = None  # the map owns it
        misfit = None if self.host.misfit is None else self.host.misfit.to(device)
        scores = self.host.warm_scores.to(device)
        token, rank = first_slots(scores, segments, plans, misfit, self.options.outlier_share)
        self.host.warm_scores = self.host.misfit = None
        self.slots = Slots(self._rows_at(token.clamp_min(0)), token, rank)
        self._capacity = [plan.slots for plan in plans]
        self.shared.buffer.reserve(self.slots.rows, self._room_limits[1])

    def _factorise(self, span_of_token: Tensor, num_spans: int) -> None:
        """Low-rank factors instead of raw rows, where they are smaller (`max_rank`)."""
        if self.options.max_rank == 0:
            return
        assert isinstance(self.store, TokenStore)
        where = f"layer {self.layer_idx}"
        self.store, ranks = factorise(
            self.store, span_of_token, num_spans, self.options.max_rank, self.router, self.layer_idx, where
        )
        self.shared.statistics.record_rank(ranks)

    def _rows_at(self, token: Tensor) -> Rows:
        """Rows [B, Hkv, n, 2 d] of the tokens [B, Hkv, n]."""
        assert self.store is not None
        batch, num_kv_heads, count = token.shape
        head = torch.arange(batch * num_kv_heads, device=token.device).repeat_interleave(count)
        rows, _ = self.store.fetch(head, token.flatten(), token.device)
        return rows.map(lambda t: t.unflatten(0, (batch, num_kv_heads, count)))

    # --- decode
    @torch.no_grad()  # what is stored is overwritten in place: a cache is for inference, training has sekv.student
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        self.fetched_bytes, attended, outputs = 0, 0.0, []
        for index in range(key.shape[2]):  # several tokens are as many steps; plain decoding has one
            one = slice(index, index + 1)
            outputs.append(self._attend_one(query[:, :, one].float() * scale, key[:, :, one], value[:, :, one]))
            attended += self._attended
        self.attended = attended / key.shape[2]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token: query [B, Hq, 1, d] (fp32, scaled), key and value [B, Hkv, 1, d]."""
        assert self.window is not None and self.slots is not None and self.codec is not None
        if self.window.is_full:
            self._spill()
        self.window.push(key, value)
        self.step += 1
        recent_keys, recent_values, hidden = self.window.view()
        recent = _masked(dot(query, recent_keys), hidden)
        slot_query = self.codec.fold(query)
        slot_keys, slot_values = self.codec.numbers(self.slots.rows)
        slots = _masked(dot(slot_query, slot_keys), self.slots.hidden())
        self._attended = self.window.mean_tokens()
        decision = None if self.map is None else self.map.decide(self._view(query, recent, slots))
        fetched = None
        if decision is None:
            shares = Shares.of(recent, slots)
        else:
            assert self.store is not None and self.room is not None
            # with several tokens per forward the layer before may have grown further
            self.shared.buffer.reserve(self.slots.rows, self._room_limits[1])
            fetched = fetch(decision.want, self.room, self._room_limits, self.store, self.shared.buffer)
            shares = decision.shares(None if fetched is None else fetched.token)
        blend = self._resident(shares, Entries(recent_values.float()), slot_values)
        if decision is not None and fetched is not None:
            blend = self._with_fetched(blend, slot_query, decision, fetched)
        self._count_slots(None if decision is None else decision.slot_visible)
        if decision is not None:
            self._after(decision, fetched)
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
            use_coarse=self.options.coarse,
            ragged=shared.ragged,
            count=self._counts,
        )

    @property
    def _counts(self) -> bool:
        """Whether this step is one of those that are counted."""
        return self.step % STATISTICS_EVERY == 1

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
        logits = _masked(dot(slot_query, keys), fetched.padding.unsqueeze(2))
        visible = decision.fetched_visible(fetched.token)
        self._attended += fetched.count / (fetched.padding.shape[0] * fetched.padding.shape[1])
        return blend.with_logits(logits if visible is None else logits.masked_fill(~visible, HIDDEN), values)

    def _after(self, decision: Decision, fetched: Fetched | None) -> None:
        """Keep what was fetched, remember what was used, record what happened."""
        assert self.slots is not None
        statistics, row = self.shared.statistics, self.planner.row_bytes
        if self._counts:
            found = int((decision.slot_used & self.slots.rank.isfinite()).sum())
            statistics.found_bytes += STATISTICS_EVERY * found * row
            if decision.zoomed is not None:
                statistics.record(self.layer_idx, decision.zoomed, decision.want.shape[-1])
        self.slots.touch(decision.slot_used, self.step)
        if fetched is not None:
            statistics.moved_bytes += fetched.count * row
            self.fetched_bytes += fetched.moved_bytes if self.options.offload else 0
            if self.options.factor_cache:
                width = fetched.token.shape[2]
                self.slots.put(fetched.moved, fetched.head, fetched.column, fetched.moved_token, width, self.step)

    def _count_slots(self, visible: Tensor | None) -> None:
        """Add the attended slots per row and KV head."""
        assert self.slots is not None
        if visible is None and not self.slots.holes:
            self._attended += self.slots.count
            return
        seen = self.slots.token >= 0
        if visible is not None:
            seen = seen & visible.squeeze(2).unflatten(1, (seen.shape[1], -1)).any(2)
        self._attended += float(seen.sum(-1).float().mean())

    # --- growth
    def _spill(self) -> None:
        """Some row's window is full: its oldest block becomes a span, on the host and in the map, and enters the
        slots."""
        assert self.window is not None and self.store is not None and self.codec is not None
        assert self.shared.spans is not None and self.slots is not None and self.host is not None
        block = self.window.pop()
        rows = self.codec.encode(block.keys, block.values, block.rows)
        token = self.store.append(rows, block).to(block.rows.device)
        self.blocks += 1
        if self.map is not None:
            mapped = torch.tensor([plan.mapped for plan in self.plans], device=block.rows.device)
            known = block.only(mapped[block.rows])
            if self.shared.blocks < self.blocks:  # the first layer that spills extends the shared spans for all
                self.shared.spans.extend(known)
                self.shared.blocks = self.blocks
            if known.rows.numel():
                extend_map(self.map, known, self.host.analysis)
        self._grow(block.rows.tolist())
        if self.options.factor_cache:
            heads = torch.arange(self.spec.num_kv_heads, device=token.device)
            self.slots.put(
                rows.map(lambda t: t[block.member, :, block.column].flatten(0, 1)),
                (block.row[:, None] * heads.numel() + heads).flatten(),
                block.column.repeat_interleave(heads.numel()),
                token.repeat_interleave(heads.numel()),
                block.live.shape[1],
                self.step,
            )

    def _grow(self, rows: list[int]) -> None:
        """Slots and buffer follow the budget of the longer rows; a map that no longer fits is given up."""
        assert self.slots is not None and self.window is not None and self.shared.spans is not None
        spans = [0] * len(self.plans) if self.map is None else self.map.spans.tolist()
        plans = list(self.plans)
        for row in rows:
            plan, tokens = plans[row], self.prompt_lengths[row] + self.step
            plans[row] = self.planner.plan(tokens, plan.window, plan.block, self.pinned[row], spans[row], plan.mapped)
        if self.map is not None:
            self.map.forget(torch.tensor([not plan.mapped for plan in plans], device=self.map.spans.device))
        self._apply(plans, self.window.keys.device)
        if self.map is not None and not any(plan.mapped for plan in self.plans):
            self.map = None
            self.shared.retire_map()
        capacity = [plan.slots for plan in self.plans]
        if capacity != self._capacity:
            self._capacity = capacity
            self.slots.resize(capacity)
        self.shared.buffer.reserve(self.slots.rows, self._room_limits[1])

    def _apply(self, plans: list[Plan], device: torch.device) -> None:
        self.plans = plans
        self.room = torch.tensor([plan.buffer for plan in plans], device=device)
        self._room_limits = min(plan.buffer for plan in plans), max(plan.buffer for plan in plans)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        order = rows.tolist()
        self.plans = [self.plans[row] for row in order]
        self.pinned = [self.pinned[row] for row in order]
        self.prompt_lengths = [self.prompt_lengths[row] for row in order]
        self._capacity = [self._capacity[row] for row in order]

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
