"""Token scores from attention, for the methods that rank prompt tokens: observation windows and accumulated mass.

No T x T matrix ever exists: queries come in blocks, and each block is reduced before the next one.
Legend: Hq query heads, Hkv KV heads, G = Hq / Hkv, n prompt tokens of one row, w window queries, Q new tokens,
N attended entries, d head dimension. Attention is averaged over the query heads of a KV head throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.baselines.eviction import EvictingLayer
from kvcore.kernels import group_queries
from kvcore.layer import CacheLayer, LayerPrompt

QUERY_BLOCK = 128
Pooling = Literal["max", "avg"]
POOLINGS: tuple[Pooling, ...] = ("max", "avg")


def attention_blocks(query: Tensor, keys: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Causal attention probabilities of the newest w tokens of one row, block by block.

    Args:
        query: [Hq, w, d] of the newest w of the n tokens.
        keys: [Hkv, n, d].
        scale: factor on the logits.

    Yields:
        probabilities [Hkv, q, m] (fp32, averaged over the query group, 0 where not visible) over the first m tokens,
        m the last position of the block + 1; and the positions [q] of its queries.
    """
    num_kv_heads, num_tokens, _ = keys.shape
    grouped = query.reshape(num_kv_heads, -1, *query.shape[1:])  # [Hkv, G, w, d]
    first = num_tokens - query.shape[1]
    for begin in range(0, query.shape[1], QUERY_BLOCK):
        block = grouped[:, :, begin : begin + QUERY_BLOCK]
        positions = torch.arange(first + begin, first + begin + block.shape[2], device=keys.device)
        visible_keys = keys[:, None, : first + begin + block.shape[2]]
        logits = torch.matmul(block * scale, visible_keys.transpose(-1, -2)).float()
        diagonal = logits[..., first + begin :]
        diagonal.masked_fill_(positions[None, :] > positions[:, None], float("-inf"))
        yield torch.softmax(logits, dim=-1).mean(dim=1), positions


def received_mass(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention mass [Hkv, n] (fp32) that each token received from the newest w tokens, summed over them."""
    total = keys.new_zeros(keys.shape[:2], dtype=torch.float32)
    for probabilities, _ in attention_blocks(query, keys, scale):
        total[:, : probabilities.shape[2]] += probabilities.sum(dim=1)
    return total


def low_counts(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """How many of the newest w tokens gave each token less than the average attention 1 / t: [Hkv, n], fp32.

    t is the number of tokens that the query sees; queries before a token do not count.
    """
    total = keys.new_zeros(keys.shape[:2], dtype=torch.float32)
    for probabilities, positions in attention_blocks(query, keys, scale):
        tokens = torch.arange(probabilities.shape[2], device=keys.device)
        low = (probabilities < 1.0 / (positions + 1)[:, None]) & (tokens <= positions[:, None])
        total[:, : probabilities.shape[2]] += low.sum(dim=1)
    return total


def pooled(scores: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """1D pooling of scores [Hkv, n] over neighbouring tokens, same length; the average counts zeros at the ends."""
    if pooling == "max":
        return F.max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]
    return F.avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def ranks(scores: Tensor) -> Tensor:
    """Rank of each score along the last dimension, fp32: 0 is the lowest; of equal scores the earlier ranks higher.

    Distinct ranks make every later choice between equal scores (plateaus of the max pooling) reproducible.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    positions = torch.arange(scores.shape[-1] - 1, -1, -1, dtype=torch.float32, device=scores.device)
    return torch.empty_like(scores, dtype=torch.float32).scatter_(-1, order, positions.expand_as(scores))


def attend_with_probabilities(
    query: Tensor, parts: list[tuple[Tensor, Tensor, Tensor | None]], scale: float
) -> tuple[Tensor, Tensor]:
    """`kernels.attend_parts`, and the probabilities it used.

    Args:
        query: [B, Hq, Q, d].
        parts: (key [B, Hkv, N_i, d], value [B, Hkv, N_i, d], bias or None).
        scale: factor on the logits.

    Returns:
        Output [B, Hq, Q, d], and probabilities [B, Hkv, Q, N] (fp32), averaged over the query group.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = parts[0][0].shape[1]
    grouped = group_queries(query * scale, num_kv_heads)
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, -1)
    logits = []
    for key, _, bias in parts:
        part = torch.matmul(grouped, key.transpose(-1, -2)).float().view(shape)
        logits.append(part if bias is None else part + bias)
    weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1)
    sizes = [key.shape[2] for key, _, _ in parts]
    output = query.new_zeros(batch, num_kv_heads, grouped.shape[2], parts[0][1].shape[-1])
    for weight, (_, value, _) in zip(weights.flatten(2, 3).split(sizes, dim=-1), parts, strict=True):
        output = output + torch.matmul(weight.to(value.dtype), value)
    return output.view(batch, num_heads, num_queries, -1), weights.mean(dim=2)


class QueryWindow(CacheLayer):
    """Remembers the queries of the newest `window` prompt tokens until the prompt is compressed."""

    window: int = 1
    _queries: Tensor | None = None  # [B, Hq, <= window, d], during the prefill only

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        seen = query[:, :, -self.window :]
        if self._queries is not None and seen.shape[2] < self.window:
            seen = torch.cat([self._queries, seen], dim=2)[:, :, -self.window :]
        self._queries = seen.clone()

    def window_queries(self, row: int, num_tokens: int) -> Tensor:
        """[Hq, w, d]: queries of the newest w = min(window, n) tokens of one row of `num_tokens` tokens."""
        assert self._queries is not None
        return self._queries[row, :, -min(self.window, num_tokens) :]

    def forget_queries(self) -> None:
        """The prompt is compressed: the window is not needed any more."""
        self._queries = None


class ObservingLayer(QueryWindow, EvictingLayer):
    """An evicting layer that ranks with the window's queries."""

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        self.forget_queries()
