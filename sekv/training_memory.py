"""What a layer's memory looks like to the losses: read from a real SeKV cache that saw the context alone.

The teacher's pass drives the cache that decoding uses (prefill observation, sketch, segmentation, first slots), so
training sees the very memory it trains for. Nothing here carries gradients but the rank gates.

Legend: B batch rows, Hq query heads, Hkv KV heads, T context tokens, N tokens of the map (the context without its
window), S spans, E exact entries, d head dimension, R rank of factors, w tokens of the widest span.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcore.budget import Budget
from kvcore.layer import LayerPrompt
from sekv.cache import SeKVCache
from sekv.factors import FactorStore
from sekv.layer import SeKVLayer
from sekv.lowrank import Factors, truncated_svd
from sekv.method import SeKV
from sekv.routing import Router, Summary
from sekv.token_map import TokenMap


def half_precision(model: PreTrainedModel, mixed_precision: str) -> torch.autocast:
    """Autocast of the backbone to bf16, when `mixed_precision` asks for it."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=mixed_precision == "bf16", cache_enabled=False)


def plain_precision(like: Tensor) -> torch.autocast:
    """No autocast: memory and losses keep their dtypes inside a backbone that runs under it."""
    return torch.autocast(like.device.type, enabled=False)


@dataclass
class LayerMemory:
    """One layer's memory of the context.

    Attributes:
        exact_keys, exact_values: [B, Hkv, E, d] entries that every query attends to exactly: the local window, and
            what is in the slots (token-level zoom) or pinned there (span-level zoom).
        exact_hidden: bool, broadcastable to [B, Hq, 1, E]: entries that hold nothing; None when all do.
        keys, values: [B, Hkv, N, d] rows of the map's tokens, as a fetch would show them.
        outside: bool [B, Hkv, 1, N]: tokens that the map does not decide about (exact entries, padding).
        span_of_token: int64 [B, N], S for tokens outside every span.
        summary: what routing sees.
        coarse_values: [B, Hkv, S, d].
        tokens: [B] context tokens (float).
        by_token: whether single tokens are zoomed into, or spans.
        mass_weighted: whether coarse entries carry the estimated mass or n · exp(q·k̄).
        factors: SVD of the spans' keys and of their values, when rank gates are trained.
    """

    exact_keys: Tensor
    exact_values: Tensor
    exact_hidden: Tensor | None
    keys: Tensor
    values: Tensor
    outside: Tensor
    span_of_token: Tensor
    summary: Summary
    coarse_values: Tensor
    tokens: Tensor
    by_token: bool
    mass_weighted: bool
    factors: SpanFactors | None

    def stored_rank(self) -> Tensor:
        """Mean rank of what a fetched span shows: its length where rows are stored raw."""
        lengths = self.summary.lengths
        return lengths.sum() / (lengths > 0).sum().clamp_min(1)


@dataclass
class SpanFactors:
    """Factors of the long spans of one layer, padded to the widest.

    Attributes:
        keys, values: factors of [B, Hkv, S, w, d].
        mean_key: [B, Hkv, S, d].
        slot: int64 [B, N], place of each token in the flat S · w rows; S · w for tokens without factors.
    """

    keys: Factors
    values: Factors
    mean_key: Tensor
    slot: Tensor

    def gated(self, router: Router) -> tuple[Tensor, Tensor]:
        """Gates [B, Hkv, S, R] of keys and of values."""
        return router.rank_gates(self.keys.sigma, self.mean_key), router.rank_gates(self.values.sigma, self.mean_key)

    def rows(self, router: Router, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Gated reconstructions in place of the span tokens among keys and values [B, Hkv, N, d]."""
        key_gates, value_gates = self.gated(router)
        return (
            self._placed(self.keys.rows(key_gates), keys),
            self._placed(self.values.rows(value_gates), values),
        )

    def _placed(self, spans: Tensor, rows: Tensor) -> Tensor:
        flat = spans.flatten(2, 3)
        inside = (self.slot < flat.shape[2])[:, None, :, None]
        index = self.slot.clamp_max(flat.shape[2] - 1)[:, None, :, None].expand(*rows.shape)
        return torch.where(inside, flat.gather(2, index), rows.float())


class ContextMemory:
    """Drives a SeKV cache through the context of one sample.

    Args:
        model: the attached causal LM.
        method, budget: what is trained for.
    """

    def __init__(self, model: PreTrainedModel, method: SeKV, budget: Budget) -> None:
        # spans stay raw here: their factors are gated anew in every forward, with gradients
        untrained = dataclasses.replace(method, checkpoint="none", max_rank=0, gates=False)
        cache = untrained.new_cache(model, budget.value, budget.scope)
        assert isinstance(cache, SeKVCache)
        self.model, self.method, self.cache = model, method, cache

    def layer(self, index: int) -> SeKVLayer:
        """A layer of the cache."""
        layer = self.cache.layers[index]
        assert isinstance(layer, SeKVLayer)
        return layer

    def observe(self, index: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Prefill queries [B, Hq, Q, d] of the context and the keys [B, Hkv, n, d] up to them."""
        self.layer(index).observe(query, keys, [0] * query.shape[0], scale)

    def build(self, index: int, keys: Tensor, values: Tensor, scale: float) -> None:
        """All keys and values [B, Hkv, T, d] of the context."""
        self.layer(index).build(LayerPrompt(keys, values, [0] * keys.shape[0], scale))

    def finish(self, input_ids: Tensor, hidden: Tensor, mixed_precision: str = "no") -> None:
        """Segment the context: ids [B, T] and hidden states [B, T, D]."""
        cache = self.cache
        cache._tokens, cache._padding = input_ids.shape[1], [0] * input_ids.shape[0]
        with half_precision(self.model, mixed_precision):
            cache.chunk_prefilled(self.model, input_ids, hidden)
        cache.prompt_prefilled()
        if self.layer(0).map is None:
            raise ValueError(
                f"a context of {input_ids.shape[1]} tokens leaves no room for a map within budget="
                f"{cache.budget.value}; raise train.sequence or budget"
            )

    def memory(self, index: int) -> LayerMemory:
        """The memory of one layer."""
        layer = self.layer(index)
        assert layer.map is not None and layer.store is not None and layer.codec is not None
        assert layer.slots is not None and layer.window is not None and layer.shared.spans is not None
        assert not isinstance(layer.store, FactorStore)
        by_token = isinstance(layer.map, TokenMap)
        device = layer.window.keys.device
        count = layer.store.used
        span_of_token = layer.shared.spans.table(count, layer.shared.spans.lengths.shape[1]).of_token[:, :-1]
        spans = layer.shared.spans.lengths
        keys, values = layer.codec.decode(layer.store.all_rows(device))
        slot_token, slots = layer.slots.token_index(count), layer.slots.decode(layer.codec)
        pinned = span_of_token == spans.shape[1]
        shown = _pad_true(pinned).gather(1, slot_token.flatten(1)).view_as(slot_token) | by_token
        shown &= slot_token < count
        outside = pinned[:, None].expand(-1, keys.shape[1], -1).clone()
        if by_token:
            held = torch.zeros(*outside.shape[:2], count + 1, dtype=torch.bool, device=device)
            outside |= held.scatter_(2, slot_token, True)[..., :count]
        recent_keys, recent_values, _ = layer.window.view()
        hidden = torch.cat([torch.zeros_like(recent_keys[..., 0], dtype=torch.bool), ~shown], dim=2)
        group = layer.spec.group_size
        return LayerMemory(
            exact_keys=torch.cat([recent_keys, slots[0]], dim=2),
            exact_values=torch.cat([recent_values, slots[1]], dim=2),
            exact_hidden=hidden.repeat_interleave(group, dim=1).unsqueeze(2) if bool(hidden.any()) else None,
            keys=keys,
            values=values,
            outside=outside.unsqueeze(2),
            span_of_token=span_of_token,
            summary=_summary(layer, span_of_token, spans),
            coarse_values=layer.map.coarse_values.to(keys.dtype),
            tokens=layer.shared.spans.tokens,
            by_token=by_token,
            mass_weighted=self.method.mass_weighted,
            factors=self._factors(layer, keys, values, span_of_token, spans) if self.method.gates else None,
        )

    def _factors(
        self, layer: SeKVLayer, keys: Tensor, values: Tensor, span_of_token: Tensor, lengths: Tensor
    ) -> SpanFactors | None:
        """Factors of the spans that are cheaper as factors, as `sekv.factors` chooses them."""
        rank, where = self.method.max_rank, f"layer {layer.layer_idx}"
        cheaper = lengths * keys.shape[3] <= rank * (lengths + keys.shape[3] + 1)
        chosen = (~cheaper & (lengths > 0)).all(dim=0).nonzero().flatten()
        if chosen.numel() == 0:
            return None
        number = torch.full((lengths.shape[1] + 1,), chosen.numel(), device=lengths.device)
        number[chosen] = torch.arange(chosen.numel(), device=lengths.device)
        slot, width = _places(number[span_of_token], lengths[:, chosen])
        padded = [_by_span(rows.float(), slot, chosen.numel(), width) for rows in (keys, values)]
        return SpanFactors(
            truncated_svd(padded[0], rank, layer.layer_idx, f"{where}, keys"),
            truncated_svd(padded[1], rank, layer.layer_idx, f"{where}, values"),
            padded[0].sum(dim=3) / lengths[:, None, chosen, None],
            slot,
        )


def _summary(layer: SeKVLayer, span_of_token: Tensor, lengths: Tensor) -> Summary:
    if isinstance(layer.map, TokenMap):
        return layer.map.sketch.summary(span_of_token, lengths)
    assert layer.map is not None
    summary = layer.map.summary(lengths)
    summary.span_of_token = span_of_token
    return summary


def _pad_true(mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (0, 1), value=True)


def _places(span_of_token: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
    """Place of every token in rows of spans padded to the widest span, and that width."""
    spans, width = lengths.shape[1], max(1, int(lengths.max()))
    order = span_of_token.argsort(dim=1, stable=True)
    starts = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).long()
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    place = span_of_token * width + rank - starts.gather(1, span_of_token)
    return place.masked_fill(span_of_token == spans, spans * width), width


def _by_span(rows: Tensor, slot: Tensor, spans: int, width: int) -> Tensor:
    """Rows [B, Hkv, N, d] as [B, Hkv, S, w, d], zeros where a span is shorter."""
    target = rows.new_zeros(*rows.shape[:2], spans * width + 1, rows.shape[3])
    index = slot[:, None, :, None].expand(*rows.shape)
    return target.scatter_(2, index, rows)[:, :, :-1].unflatten(2, (spans, width))
