"""SemantiCache: tokens of a clause with similar keys are merged into one entry that speaks for all of them.

Wu et al., "SemantiCache: Efficient KV Cache Compression via Semantic Chunking and Clustered Merging",
https://arxiv.org/abs/2603.14303.
Legend: Hkv KV heads, n prompt tokens of one row, m of them merged, M chunks, J tokens of the longest, d head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.attention import active_input_ids
from kvcore.baselines.eviction import GENERATED, INFINITY, PINNED, Entries, EvictingLayer, EvictingMethod
from kvcore.baselines.scores import ranks
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.delimiters import CLAUSE_END, chunk_ids, delimiter_token_ids
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import register

if TYPE_CHECKING:
    from transformers import PreTrainedModel

THRESHOLD_STEPS = 12  # bisections of the similarity threshold: 2^-12 of its range


class PromptText:
    """Token ids of the prompt, collected by the first layer for all; empty outside a prefill."""

    def __init__(self) -> None:
        self.token_ids: Tensor | None = None  # [B, T]

    def add(self, token_ids: Tensor | None, starts_prompt: bool) -> None:
        """One prefill chunk [B, Q].

        Raises:
            NotImplementedError: the model was called with embeddings instead of ids.
        """
        if token_ids is None:
            raise NotImplementedError(
                "method 'semanticache' cuts the text at delimiters and needs input_ids, not embeds"
            )
        before = None if starts_prompt else self.token_ids
        self.token_ids = token_ids if before is None else torch.cat([before, token_ids], dim=1)


def greedy_clusters(similarity: Tensor, valid: Tensor, threshold: Tensor) -> Tensor:
    """Greedy seed clustering inside each chunk: the first free token is a seed and takes every free token whose
    similarity to it reaches the threshold; then the next free token.

    Args:
        similarity: [Hkv, M, J, J], cosine similarity of the keys of one chunk.
        valid: [M, J], bool, False where a chunk is shorter than J.
        threshold: [Hkv].

    Returns:
        [Hkv, M, J] int64: index in the chunk of the seed of each token; -1 where not valid.
    """
    num_heads, num_chunks, longest, _ = similarity.shape
    seed = torch.full((num_heads, num_chunks, longest), -1, device=similarity.device)
    free = valid.expand(num_heads, -1, -1).clone()
    near = similarity >= threshold[:, None, None, None]
    for index in range(longest):
        starts = free[:, :, index : index + 1]
        taken = starts & free & near[:, :, index]
        taken[:, :, index] = starts[:, :, 0]
        seed.masked_fill_(taken, index)
        free &= ~taken
    return seed


def fitted_clusters(similarity: Tensor, valid: Tensor, slots: int) -> Tensor:
    """`greedy_clusters` with the highest threshold per KV head, found by bisection, that leaves at most `slots`."""
    num_heads, longest = similarity.shape[0], similarity.shape[2]
    own = torch.arange(longest, device=similarity.device)
    low, high = similarity.new_full((num_heads,), -1.01), similarity.new_full((num_heads,), 1.01)
    best = greedy_clusters(similarity, valid, low)  # one cluster per chunk
    for _ in range(THRESHOLD_STEPS):
        middle = (low + high) / 2
        seed = greedy_clusters(similarity, valid, middle)
        fits = (seed == own).sum(dim=(1, 2)) <= slots
        best = torch.where(fits[:, None, None], seed, best)
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return best


class SemantiCacheLayer(EvictingLayer):
    """Sinks and the newest tokens stay exact; everything between them becomes semantic cores.

    While decoding, the core of the fewest tokens is given up first (it speaks for the least attention mass), of equal
    ones the oldest; then the prompt's newest tokens and generated ones by age.
    """

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, options: SemantiCache, text: PromptText
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.options, self.text = options, text
        self.side_dtypes = {"log_size": torch.float32}

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        if self.layer_idx == 0:
            self.text.add(active_input_ids(), starts_prompt=keys.shape[2] == query.shape[2])

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        if self.layer_idx == self.spec.num_layers - 1:
            self.text.token_ids = None

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        num_tokens = keys.shape[1]
        priority = torch.arange(num_tokens, dtype=torch.float32, device=keys.device) + (GENERATED - num_tokens)
        return priority.expand(keys.shape[0], -1)

    def compress(self, prompt: LayerPrompt, row: int) -> Entries:
        keys, values = prompt.row(row)
        num_tokens = keys.shape[1]
        capacity = self.capacity(num_tokens)
        sinks = min(self.options.num_sinks, capacity // 4)
        window = min(self.options.window, max(1, capacity // 2))
        priority = self.rank(keys, values, row, prompt.scale).clone()
        priority[:, :sinks] = PINNED
        exact = torch.cat([torch.arange(sinks), torch.arange(max(sinks, num_tokens - window), num_tokens)])
        exact = exact.to(keys.device)
        entries = Entries(keys[:, exact], values[:, exact], priority[:, exact])
        entries.side["log_size"] = torch.zeros_like(entries.priority)
        slots = capacity - len(exact)
        middle = slice(sinks, num_tokens - window)
        if num_tokens - window - sinks > 0 and slots > 0:
            chunks = self._chunks(row, prompt.padding[row], num_tokens, middle, slots)
            cores = merge_chunks(keys[:, middle], values[:, middle], chunks.to(keys.device), slots)
            entries = _joined(cores, entries)
        return entries

    def _chunks(self, row: int, padding: int, num_tokens: int, middle: slice, slots: int) -> Tensor:
        """[m], chunk number of each merged token; neighbouring chunks are joined until there are two slots for each."""
        assert self.text.token_ids is not None
        ids = self.text.token_ids[row, padding : padding + num_tokens][middle]
        chunks = chunk_ids(ids, self.options.delimiter_ids or (), self.options.max_chunk)
        return chunks // math.ceil((int(chunks[-1]) + 1) / max(1, slots // 2))

    def _bias(self) -> Tensor | None:
        """Proportional attention: log of the number of tokens behind each entry is added to its logit."""
        hidden = super()._bias()
        sizes = self.side["log_size"][:, :, None, None]
        return sizes if hidden is None else sizes + hidden

    def _store(self, key: Tensor, value: Tensor, priority: Tensor, side: dict[str, Tensor]) -> None:
        super()._store(key, value, priority, {"log_size": torch.zeros_like(priority)})

    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        """Cores are not attended to token by token, so coverage cannot be said."""
        return None


def merge_chunks(keys: Tensor, values: Tensor, chunks: Tensor, slots: int) -> Entries:
    """Semantic cores of consecutive tokens.

    Args:
        keys, values: [Hkv, m, d].
        chunks: [m], chunk number of each token, increasing.
        slots: most cores per KV head.

    Returns:
        [Hkv, slots] entries; priority -inf where a KV head needs fewer cores. A core is the mean of its tokens' keys
        and of their values; its rank is that of its size, of equal sizes the earlier is lower.
    """
    num_heads, num_tokens, head_dim = keys.shape
    counts = torch.bincount(chunks)
    starts = counts.cumsum(0) - counts
    place = torch.arange(num_tokens, device=keys.device) - starts[chunks]
    longest = int(counts.max())
    padded = keys.new_zeros(num_heads, len(counts), longest, head_dim, dtype=torch.float32)
    padded[:, chunks, place] = F.normalize(keys.float(), dim=-1)
    valid = torch.arange(longest, device=keys.device) < counts[:, None]
    seed = fitted_clusters(padded @ padded.transpose(-1, -2), valid, slots)
    seed_position = starts[chunks] + seed[:, chunks, place]  # [Hkv, m], position of each token's seed
    is_seed = seed_position == torch.arange(num_tokens, device=keys.device)
    core = (is_seed.cumsum(-1) - 1).gather(1, seed_position)  # [Hkv, m], index of each token's core
    size = torch.zeros(num_heads, slots, device=keys.device).scatter_add_(
        1, core, torch.ones(core.shape).to(core.device)
    )
    index = core.unsqueeze(-1).expand(-1, -1, head_dim)
    divisor = size.clamp_min(1.0).unsqueeze(-1)
    means = [
        (torch.zeros(num_heads, slots, head_dim, device=keys.device).scatter_add_(1, index, t.float()) / divisor).to(t)
        for t in (keys, values)
    ]
    rank = ranks(size.flip(-1)).flip(-1).masked_fill(size == 0, -INFINITY)
    return Entries(means[0], means[1], rank, {"log_size": size.clamp_min(1.0).log()})


def _joined(first: Entries, second: Entries) -> Entries:
    return Entries(
        torch.cat([first.keys, second.keys], dim=1),
        torch.cat([first.values, second.values], dim=1),
        torch.cat([first.priority, second.priority], dim=1),
        {name: torch.cat([first.side[name], second.side[name]], dim=1) for name in first.side},
    )


@register
@dataclass(frozen=True, kw_only=True)
class SemantiCache(EvictingMethod):
    """Semantic chunking, greedy seed-based clustering and proportional attention (https://arxiv.org/abs/2603.14303).

    The text is cut at delimiters; inside a chunk, per KV head, greedy seed clustering groups tokens by the cosine
    similarity of their keys; a cluster becomes one core, the mean of its keys and of its values, whose logit gains
    log(cluster size). Built from the public description (the constants of the paper were not available to us): the
    similarity threshold is not given but found per layer and KV head, as the highest that meets the byte budget; when
    a budget has less than two slots per chunk, neighbouring chunks are joined; sinks and a window of the newest tokens
    stay exact.

    Args:
        delimiters: characters that end a chunk; None means clause and sentence ends and newlines.
        delimiter_ids: token ids that end a chunk; None reads them from the model's tokenizer.
        max_chunk: longest chunk in tokens.
        num_sinks: first tokens kept exact; at most a quarter of the entries.
        window: newest prompt tokens kept exact; at most half of the entries.
    """

    name: ClassVar[str] = "semanticache"
    delimiters: str | None = None
    delimiter_ids: tuple[int, ...] | None = None
    max_chunk: int = 64
    num_sinks: int = 4
    window: int = 32

    def __post_init__(self) -> None:
        if self.max_chunk < 1:
            raise ValueError(f"max_chunk must be >= 1 token; received {self.max_chunk}")
        if self.num_sinks < 0:
            raise ValueError(f"num_sinks must be >= 0 tokens; received {self.num_sinks}")
        if self.window < 1:
            raise ValueError(f"window must be >= 1 token; received {self.window}")

    def new_cache(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> CompressedCache:
        if self.delimiter_ids is not None:
            return super().new_cache(model, *args, **kwargs)
        ids = delimiter_token_ids(model, CLAUSE_END if self.delimiters is None else self.delimiters)
        return replace(self, delimiter_ids=ids).new_cache(model, *args, **kwargs)

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return super().make_layers(spec, budget)
        text = PromptText()
        return [SemantiCacheLayer(spec, budget, index, self, text) for index in range(spec.num_layers)]
