"""The teacher's one pass over a sample: keys and values of every layer, queries after the context, hidden states.

Teacher and student share this prefill: the student later reads the same prefix keys and values, layer by layer.
Legend: B batch rows, Hq query heads, Hkv KV heads, N tokens of the sample, T context tokens, Q = N - T query tokens,
d head dimension, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcore.attention import attach, prefill
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.layer import CacheLayer, LayerPrompt
from sekv.training_memory import ContextMemory, half_precision, plain_precision

# Queries whose logits over the whole context exist at once.
QUERY_BLOCK = 64


@dataclass
class LayerCapture:
    """What the teacher saw in one layer.

    Attributes:
        query: [B, Hq, Q, d] of the query tokens, scaled by the attention scale.
        keys, values: [B, Hkv, N, d] of context and query tokens.
        scale: the attention scale.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float


@dataclass
class Capture:
    """The teacher's pass over one batch of samples.

    Attributes:
        input_ids: [B, N].
        context: T.
        layers: one capture per layer.
        hidden: [B, N, D] last hidden states after the final norm.
        far_mass: [B, Q] mean share of attention that falls on the context before the local window; None when queries
            are not mined.
        memory: the SeKV cache of the context, as decoding would find it.
    """

    input_ids: Tensor
    context: int
    layers: list[LayerCapture]
    hidden: Tensor
    far_mass: Tensor | None
    memory: ContextMemory


class _CaptureLayer(CacheLayer):
    """Keeps what the losses need; never decodes."""

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, context: int, memory: ContextMemory, mine: bool
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.context, self.memory, self.mine = context, memory, mine
        self.query: list[Tensor] = []
        self.far_mass: list[Tensor] = []
        self.captured: LayerCapture | None = None

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        with plain_precision(query):
            self._observe(query.to(self.spec.dtype), keys.to(self.spec.dtype), scale)

    def _observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        first = keys.shape[2] - query.shape[2]
        before = max(min(self.context - first, query.shape[2]), 0)
        if before:
            self.memory.observe(self.layer_idx, query[:, :, :before], keys[:, :, : first + before], scale)
        new = query[:, :, before:]
        if new.shape[2] == 0:
            return
        self.query.append(new * scale)
        if not self.mine:
            return
        start = keys.shape[2] - new.shape[2]
        far = max(self.context - self.memory.method.window, 0)
        self.far_mass += [
            _far_share(block, keys, start + offset * QUERY_BLOCK, far)
            for offset, block in enumerate(self.query[-1].split(QUERY_BLOCK, dim=2))
        ]

    def build(self, prompt: LayerPrompt) -> None:
        keys, values = prompt.keys.to(self.spec.dtype), prompt.values.to(self.spec.dtype)
        with plain_precision(keys):
            self.memory.build(self.layer_idx, keys[:, :, : self.context], values[:, :, : self.context], prompt.scale)
        self.captured = LayerCapture(torch.cat(self.query, dim=2), keys, values, prompt.scale)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        raise RuntimeError("a teacher's capture is not a cache to decode with")


class _CaptureCache(CompressedCache):
    """Collects the hidden states beside the layers' captures."""

    hidden: list[Tensor]

    def chunk_prefilled(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        self.hidden.append(hidden)


def _far_share(query: Tensor, keys: Tensor, position: int, far: int) -> Tensor:
    """Share of attention on the first `far` tokens, mean over heads.

    Args:
        query: [B, Hq, b, d], scaled.
        keys: [B, Hkv, n, d], n >= position + b.
        position: index of the first query's own token.
        far: tokens that count as far.

    Returns:
        [B, b] in fp32.
    """
    batch, num_heads, num_queries, dim = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, dim)
    logits = (grouped @ keys[:, :, : position + num_queries].mT).float()
    logits = logits.view(batch, num_heads, num_queries, -1)
    own = torch.arange(position, position + num_queries, device=keys.device)
    future = torch.arange(logits.shape[-1], device=keys.device) > own[:, None]
    logits = logits.masked_fill(future, float("-inf"))
    return torch.exp(logits[..., :far].logsumexp(-1) - logits.logsumexp(-1)).mean(dim=1)


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    context: int,
    memory: ContextMemory,
    chunk_size: int | None = None,
    mixed_precision: str = "no",
    mine: bool = True,
) -> Capture:
    """One exact pass over samples without padding; no T x T or Q x T matrix exists.

    Args:
        model: the frozen causal LM.
        input_ids: [B, N].
        context: T, tokens the memory may be built from; the N - T tokens after it are the queries.
        memory: an empty SeKV cache to lead through the context.
        chunk_size: tokens per forward; None reads the sample in one.
        mixed_precision: `no` or `bf16`, of the backbone's own computation.
        mine: measure how far the queries look (costs one more product of queries and keys).

    Raises:
        ValueError: no token before or after the context.
    """
    total = input_ids.shape[1]
    if not 0 < context < total:
        raise ValueError(f"a sample needs tokens before and after its context; received context={context} of {total}")
    spec, budget = attach(model), Budget(1.0)

    def layers() -> list[CacheLayer]:
        return [_CaptureLayer(spec, budget, index, context, memory, mine) for index in range(spec.num_layers)]

    cache = _CaptureCache(spec, budget, layers, "teacher")
    cache.hidden = []
    with half_precision(model, mixed_precision):
        prefill(model, cache, input_ids, chunk_size=chunk_size)
    captured = [layer for layer in cache.layers if isinstance(layer, _CaptureLayer)]
    far = torch.stack([torch.cat(layer.far_mass, dim=1) for layer in captured]).mean(dim=0) if mine else None
    states = [layer.captured for layer in captured if layer.captured is not None]
    hidden = torch.cat(cache.hidden, dim=1).to(spec.dtype)
    memory.finish(input_ids[:, :context], hidden[:, :context], mixed_precision)
    return Capture(input_ids, context, states, hidden, far, memory)


def mine_queries(far_mass: Tensor, share: float) -> Tensor:
    """Indices [B, P] (ascending) of the query tokens that look furthest: the share with the most far attention.

    Args:
        far_mass: [B, Q] from `capture`.
        share: of the query tokens to keep, in (0, 1].
    """
    count = max(1, round(share * far_mass.shape[1]))
    return far_mass.topk(count, dim=1).indices.sort(dim=1).values
