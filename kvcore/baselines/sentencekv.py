"""SentenceKV: sentences scored by their mean key.

Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
https://arxiv.org/abs/2504.00970. Legend: B batch rows, Hq query heads, Hkv KV heads, U sentences, T prompt tokens,
n tokens of a row, m tokens between its sinks and window, W window slots, R rows that spill, w window queries,
d head dimension.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvcore.attention import active_input_ids
from kvcore.baselines.retrieval import SIZE_BYTES, RetrievalCache, RetrievalLayer, check_options
from kvcore.baselines.retrieval_choice import Units
from kvcore.baselines.retrieval_plan import UNIT_DOUBLINGS, Planner
from kvcore.baselines.retrieval_store import Shared
from kvcore.baselines.scores import pooled, received_mass
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.delimiters import SENTENCE_END, chunk_ids, delimiter_token_ids
from kvcore.exact import ExactLayer
from kvcore.kernels import group_queries
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import Method, register

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TYPICAL_SENTENCE = 16  # tokens; units are merged up to 16 times this


class SharedText(Shared):
    """The fetch buffer, and during the prefill the prompt's token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Tensor] = []  # chunks [B, T_i]
        self.starts: list[Tensor] = []  # per row [n], bool: a sentence starts here


class SentenceLayer(RetrievalLayer):
    """Sentences of the text; per KV head only the tokens that an observation window found important are kept."""

    host_fields = RetrievalLayer.host_fields | {"window_starts", "query_count", "ended"}

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: Planner, shared: SharedText, options: SentenceKV
    ) -> None:
        super().__init__(spec, budget, layer_idx, planner, shared)
        self.options, self.text = options, shared
        self._observed: Tensor | None = None  # [B, Hq, <= w, d], during the prefill only
        self._mass: list[Tensor | None] = []  # per row [Hkv, n], during `build` only
        self.window_starts: Tensor  # [B, W] bool, right-aligned: a sentence starts at this window token
        # [B, Hkv, d] fp32, group means of the queries of the sentence being generated; None while there is no unit
        self.query_sum: Tensor | None = None
        self.query_count: Tensor  # [B]
        self.ended: Tensor  # [B] bool: the previous token ended a sentence

    # --- prefill
    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        seen, window = query[:, :, -self.options.observation_window :], self.options.observation_window
        if self._observed is not None and seen.shape[2] < window:
            seen = torch.cat([self._observed, seen], dim=2)[:, :, -window:]
        self._observed = seen.clone()
        if self.layer_idx == 0 and (ids := active_input_ids()) is not None:
            self.text.ids.append(ids)

    def build(self, prompt: LayerPrompt) -> None:
        rows = [prompt.row(row)[0] for row in range(prompt.keys.shape[0])]
        if self.layer_idx == 0:
            self.text.starts = [self._sentence_starts(row, keys.shape[1]) for row, keys in enumerate(rows)]
            self.text.ids = []
        self._mass = [self._importance(keys, row, prompt.scale) for row, keys in enumerate(rows)]
        self._observed = None
        super().build(prompt)
        self._mass = []
        width = self.resident.window[0].shape[2]
        self.window_starts = torch.stack([_last(starts, width) for starts in self.text.starts])
        self.query_sum, self.query_count = None, torch.zeros(len(rows))
        self.ended = torch.ones(len(rows), dtype=torch.bool)
        if self.layer_idx == self.spec.num_layers - 1:
            self.text.starts = []

    def _sentence_starts(self, row: int, length: int) -> Tensor:
        """[n] bool; neighbouring sentences are merged where their means would not fit the budget."""
        # a prompt given as embeddings has no delimiters
        ids = torch.cat(self.text.ids, dim=1)[row, -length:] if self.text.ids else torch.zeros(length).long()
        number = chunk_ids(ids, self.options.delimiter_ids, self.options.max_sentence)
        starts = torch.cat([torch.ones(1, dtype=torch.bool), number[1:] != number[:-1]])
        for doubling in range(-UNIT_DOUBLINGS, UNIT_DOUBLINGS + 1):
            if self.planner.fits(length, length / int(starts.sum())):
                return starts
            starts = _merged(starts, max(1, int(self.planner.unit_tokens * 2.0**doubling)))
        self.planner.unit_size(length)  # raises where even the longest units are out of reach
        return starts

    def plan_units(self, row: int, tokens: int) -> float:
        mean = tokens / int(self.text.starts[row].sum())
        # where a short prompt leaves no room for more, what follows it goes into few units
        return mean if self.planner.fits(tokens, mean) else float(self.planner.largest_unit)

    def group(self, keys: Tensor, values: Tensor, row: int, first: int) -> Units:
        count, num_heads = keys.shape[1], keys.shape[0]
        starts = self.text.starts[row][first : first + count].clone()
        starts[:1] = True
        number = (starts.long().cumsum(0) - 1).to(keys.device)
        kept = self._kept(row, first, keys)
        label = number[kept]  # [Hkv, kept]
        sentences = int(number[-1]) + 1 if count else 0
        sizes = torch.zeros(num_heads, sentences, dtype=torch.long, device=keys.device)
        sizes.scatter_add_(1, label, torch.ones_like(label))
        sums = torch.zeros(num_heads, sentences, keys.shape[2], device=keys.device)
        index = label.unsqueeze(-1).expand(-1, -1, keys.shape[2])
        sums.scatter_add_(1, index, keys.gather(1, kept.unsqueeze(-1).expand(-1, -1, keys.shape[2])).float())
        mean = (sums / sizes.clamp_min(1).unsqueeze(-1)).to(keys.dtype)
        return Units(kept, sizes, {"mean_key": mean})

    def _importance(self, keys: Tensor, row: int, scale: float) -> Tensor | None:
        """Pooled attention [Hkv, n] of the observation window; None where every token is kept anyway."""
        length = keys.shape[1]
        if self._observed is None or self._quota(row, length) >= length:
            return None
        queries = self._observed[row, :, -min(self.options.observation_window, length) :]
        return pooled(received_mass(queries, keys, scale), self.options.pooling_kernel, "max")

    def _quota(self, row: int, length: int) -> int:
        """Tokens kept on the host: the keeping factor times those fetched per step."""
        return int(self.options.keeping_factor * self.planner.split(length, self.plan_units(row, length)).fetched)

    def _kept(self, row: int, first: int, keys: Tensor) -> Tensor:
        """Indices [Hkv, kept] among the m tokens, ascending, of the most important ones per KV head."""
        count, mass = keys.shape[1], self._mass[row]
        keep = min(count, self._quota(row, int(self.lengths[row])))
        if mass is None or keep == count:
            return torch.arange(count, device=keys.device).expand(keys.shape[0], -1)
        # pooling makes neighbours equal: a stable sort keeps the earlier ones
        ranked = mass[:, first : first + count].argsort(dim=-1, descending=True, stable=True)
        return ranked[:, :keep].sort(dim=-1).values

    # --- decode
    def follow(self, query: Tensor, index: int) -> None:
        """The running mean of the sentence's queries (section 3.3), started afresh after a delimiter."""
        ids = active_input_ids()
        delimiters = torch.tensor(self.options.delimiter_ids, dtype=torch.long)
        ends = torch.zeros_like(self.ended) if ids is None else torch.isin(ids[:, index].cpu(), delimiters)
        starts = self.ended & ~ends
        width = self.resident.window[0].shape[2]
        self.window_starts = torch.cat([self.window_starts, starts[:, None]], dim=1)[:, -width:].clone()
        self.ended = ends
        if int(self.unit_counts.max()) == 0:  # nothing to compare with
            return
        mean = group_queries(query, self.spec.num_kv_heads).float().mean(2)
        before = torch.zeros_like(mean) if self.query_sum is None else self.query_sum
        self.query_sum = torch.where(starts.to(query.device)[:, None, None], mean, before + mean)
        self.query_count = torch.where(starts, 1.0, self.query_count + 1)

    def score(self, query: Tensor, scale: float) -> Tensor:
        """Similarity of the sentence's mean query with each mean key (equation 3)."""
        assert self.query_sum is not None
        mean = self.query_sum / self.query_count.clamp_min(1).to(query.device)[:, None, None]
        keys = self.summaries["mean_key"]
        return torch.matmul(keys.float(), mean.unsqueeze(-1)).squeeze(-1)

    def absorb(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        cpu = rows.cpu()
        counts = self.resident.counts[cpu]
        starts = self.window_starts[cpu, self.window_starts.shape[1] - 1 - counts]
        middle = self.lengths[cpu] - self.resident.sink_counts[cpu] - counts
        room = self.unit_counts[cpu] * self.unit_tokens[cpu] <= middle
        newest = (self.unit_counts[cpu] - 1).clamp_min(0).to(rows.device)
        if self.sizes.shape[2] == 0:
            opens = torch.ones_like(room)
        else:
            full = self.sizes[rows, :, newest].amax(1).cpu() >= self.options.max_sentence
            opens = (self.unit_counts[cpu] == 0) | (room & (starts | full))
        joined = self.open_units(rows, opens.to(rows.device), {"mean_key": keys})
        self.average_in("mean_key", joined, keys)


def _last(starts: Tensor, width: int) -> Tensor:
    """The last `width` entries of [n] bool, False before them if n is shorter."""
    return torch.cat([starts.new_zeros(max(0, width - len(starts))), starts[max(0, len(starts) - width) :]])


def _merged(starts: Tensor, least: int) -> Tensor:
    """Drop starts so that every unit but the last holds `least` tokens or more: prefill only, once per prompt."""
    kept, latest = torch.zeros_like(starts), -least
    for position in starts.nonzero().flatten().tolist():
        if position - latest >= least:
            kept[position], latest = True, position
    return kept


@register
@dataclass(frozen=True, kw_only=True)
class SentenceKV(Method):
    """Sentence means on the device, tokens on the host (https://arxiv.org/abs/2504.00970, sections 3.2-3.3).

    Prefill: an observation window ranks the tokens per KV head; the best r times the fetched ones stay, grouped by
    sentence; each sentence's mean key stays on the device. Decode: the mean query of the sentence being generated is
    compared with the mean keys, and tokens of the most similar sentences are fetched until the step's share is full
    (the last sentence is cut to fit). Under grouped-query attention, attention and queries are averaged over the query
    heads of a group, and sentences are chosen per KV head. The first query of a new sentence is compared by itself.

    Args:
        keeping_factor: r, tokens kept on the host as a multiple of those fetched per step (5 in the authors' code).
        observation_window: prompt queries that rank tokens (32 in the paper).
        pooling_kernel: max pooling of the ranks over neighbouring tokens (7, as SnapKV).
        max_sentence: a sentence is cut after this many tokens; sentences are merged where their means would not fit
            the budget.
        delimiter_ids: tokens that end a sentence; empty means that they are read from the model's tokenizer.
        num_sinks: first tokens kept on the device.
        fetch_share: tokens fetched per step and layer, as a share of the tokens so far, at most; the rest of the
            budget is the local window.
    """

    name: ClassVar[str] = "sentencekv"
    cache_class: ClassVar[type[CompressedCache]] = RetrievalCache
    keeping_factor: float = 5.0
    observation_window: int = 32
    pooling_kernel: int = 7
    max_sentence: int = 64
    delimiter_ids: tuple[int, ...] = ()
    num_sinks: int = 4
    fetch_share: float = 0.2

    def __post_init__(self) -> None:
        check_options(
            self,
            positive=("keeping_factor", "observation_window", "pooling_kernel", "max_sentence"),
            non_negative=("num_sinks",),
            shares=("fetch_share",),
        )
        if not math.isfinite(self.keeping_factor):
            raise ValueError(f"method 'sentencekv': keeping_factor must be finite; received {self.keeping_factor}")
        if self.pooling_kernel % 2 == 0:
            raise ValueError(f"method 'sentencekv': pooling_kernel must be odd; received {self.pooling_kernel}")
        object.__setattr__(self, "delimiter_ids", tuple(self.delimiter_ids))

    def new_cache(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> CompressedCache:
        if self.delimiter_ids:
            return super().new_cache(model, *args, **kwargs)
        resolved = dataclasses.replace(self, delimiter_ids=delimiter_token_ids(model, SENTENCE_END))
        return Method.new_cache(resolved, model, *args, **kwargs)

    def planner(self, spec: ModelSpec, budget: Budget) -> Planner:
        return Planner(
            self.name,
            spec,
            budget,
            unit_bytes=spec.entry_bytes / 2 + SIZE_BYTES,
            unit_tokens=TYPICAL_SENTENCE,
            num_sinks=self.num_sinks,
            fetch_share=self.fetch_share,
            fixed_bytes=spec.head_dim * 4,
        )

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        self.planner(spec, budget).validate()

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        shared, planner = SharedText(), self.planner(spec, budget)
        return [SentenceLayer(spec, budget, index, planner, shared, self) for index in range(spec.num_layers)]
