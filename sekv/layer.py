"""One layer of SeKV: prompt -> map, factor cache, host rows; growth when the window overflows. arXiv 2606.31145, 3.2.

Legend: B batch rows, Hkv KV heads, N tokens of the map, S spans, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.layer import LayerPrompt
from kvcore.transfer import HostLink
from sekv.decoding import DecodingLayer, HostTensors
from sekv.factors import factorise
from sekv.lowrank import check_finite
from sekv.plan import Plan
from sekv.prompt import PromptBody, build_map, extend_map, first_slots
from sekv.rows import RowCodec, Rows, TokenStore, make_store
from sekv.segmentation import Kind, Segments
from sekv.sketch import Sketch
from sekv.slots import Slots
from sekv.window import Window


class SeKVLayer(DecodingLayer):
    """See `sekv.cache.SeKVCache`, which compresses in two moves: `build` when the layer's prefill ends (keys and values
    leave for the host), `finish` when the spans are known. See `DecodingLayer` for the arguments."""

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
        self.store = make_store(rows, self.options.offload, counts)
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
        rows, _ = self.store.request(head, token.flatten(), HostLink(pinned=False)).arrive()
        return rows.map(lambda t: t.unflatten(0, (batch, num_kv_heads, count)))

    # --- growth
    def _spill(self, needed: int) -> None:
        """Rows without room for `needed` tokens: their oldest block becomes a span, on the host and in the map, and
        enters the slots."""
        assert self.window is not None and self.store is not None and self.codec is not None
        assert self.shared.spans is not None and self.slots is not None and self.host is not None
        block = self.window.pop(needed)
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
