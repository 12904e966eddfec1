"""FreqDepthKV as one dataclass of options; `published` and `default` are presets of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from freqdepth.cache import FreqDepthCache, FreqDepthLayer, LayerBlock
from freqdepth.codes import UNQUANTIZED
from freqdepth.probe import ProbePlan, Weighting
from freqdepth.window import FLOAT8
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer
from kvcore.method import Method, register

Basis = Literal["klt", "dct", "aligned_dct", "none"]
Heads = Literal["joint", "single"]
KeyForm = Literal["post_rope", "pre_rope"]
MODES = ("shared", "residual", "exact")
WIDTHS = (2, 3, 4, 6, 8, UNQUANTIZED)
# Bits per number of the budget from which on the window is exact.
EXACT_WINDOW_BITS = 2.0


@register
@dataclass(frozen=True, kw_only=True)
class FreqDepth(Method):
    """FreqDepthKV, frequency-guided depth sharing of the KV cache (https://arxiv.org/abs/2607.06519).

    Blocks of adjacent layers share coefficients per token (eq. 1); an online probe gives every head of a block a mode
    and every coefficient its bits, so that the byte budget is met with the least loss (eq. 2).

    Args:
        block_size: B, adjacent layers per block (>= 2); leftover layers form a smaller block.
        basis: `klt` (leading directions of the block's own second moment), `dct` (published), `aligned_dct` (layers
            first rotated onto the block's first), `none` (no transform: heads are exact or lose the middle; ablation).
        heads: `joint` shares coefficients over all KV heads of the block, `single` gives every head its own.
        keys: `post_rope`, or `pre_rope` (keys are turned back before the transform and forward at every step: slower).
        coefficient_bits: widths on offer to the bit allocation; 16 stores a coefficient in the model's dtype.
        basis_bits: bits of a basis column; None means one more than its coefficient's (8 for 8, 16 for 16).
        key_rank, value_rank: coefficients kept per stream, one number or one per block; None lets the budget decide.
        coefficient_plan: (count, bits) pairs that fix the widths instead of the allocation, strongest first.
        low_frequencies: depth frequencies kept by the DCT bases.
        modes: the modes the probe may choose from.
        residual_tokens: tokens with corrections per block and head; None lets the budget decide.
        residual_bits: width of the corrections (2, 3, 4, 6, 8, or 16 for the model's dtype).
        probe_queries: queries of the probe per layer: half recent, a quarter document boundaries, a quarter (or what
            boundaries leave) rows of high entropy.
        probe_weighting: `uniform` is eq. 2's mean squared logit error; `attention` weighs it by what it does to the
            output of the probe's rows; `mixed` lies between the two, and corrects the tokens that are described worst
            whether the probe looks at them or not: what a later question asks for is rarely what was looked at last.
        key_emphasis: weight of key errors against value errors in the bit allocation.
        channel_floor: smallest (squared) weight of a key channel, as a share of the head's mean.
        key_directions: directions per head that the probe's queries share, stored with the channel weights (KLT).
        num_sinks: first tokens, kept like the window.
        window, fold: after a decode step the newest `window` to `window + fold - 1` tokens are kept apart; older ones
            are folded into the shared form `fold` at a time (a multiple of 8).
        window_bits: 8 stores sinks and window as 8-bit floats, 16 in the model's dtype, exactly; None takes the first
            where the budget leaves fewer than two bits per number. There an exact window costs the rest what it gains
            (KL in bf16: 10% at 1K 0.073 against 0.083, at 4K 0.031 against 0.032); with more it is the window's own
            error that is felt (at 4K: 15% 0.016 against 0.010, 20% 0.010 against 0.005, 26% 0.012 against 0.004).
        gram_tokens: most tokens of the second moment, an even sample of the prompt. Half of the prompt's tokens are too
            few: the others' errors double.
        subspace_iterations: accuracy of the leading subspace.
        min_entries: a budget worth fewer tokens than this at the prompt's length leaves nothing to transform: that many
            newest tokens are kept exactly instead.
    """

    name: ClassVar[str] = "freqdepth"
    attends_all: ClassVar[bool] = True
    cache_class: ClassVar[type[CompressedCache]] = FreqDepthCache
    block_size: int = 5
    basis: Basis = "klt"
    heads: Heads = "joint"
    keys: KeyForm = "post_rope"
    coefficient_bits: Sequence[int] = (2, 4, 6, 8)
    basis_bits: int | None = None
    key_rank: int | Sequence[int] | None = None
    value_rank: int | Sequence[int] | None = None
    coefficient_plan: Sequence[Sequence[int]] | None = None
    low_frequencies: int = 1
    modes: Sequence[str] = MODES
    residual_tokens: int | None = None
    residual_bits: int = 3
    probe_queries: int = 64
    probe_weighting: Weighting = "mixed"
    key_emphasis: float = 4.0
    channel_floor: float = 0.05
    key_directions: int = 4
    num_sinks: int = 4
    window: int = 24
    window_bits: int | None = None
    fold: int = 8
    gram_tokens: int = 8192
    subspace_iterations: int = 1
    min_entries: int = 16

    def __post_init__(self) -> None:
        _check(self.block_size >= 2, "block_size must be at least 2 layers", self.block_size)
        _one_of("basis", self.basis, ("klt", "dct", "aligned_dct", "none"))
        _one_of("heads", self.heads, ("joint", "single"))
        _one_of("keys", self.keys, ("post_rope", "pre_rope"))
        _one_of("probe_weighting", self.probe_weighting, ("mixed", "attention", "uniform"))
        for bits in self.coefficient_bits:
            _one_of("each of coefficient_bits", bits, WIDTHS)
        _check(len(self.coefficient_bits) > 0, "coefficient_bits must name at least one width", self.coefficient_bits)
        _one_of("residual_bits", self.residual_bits, WIDTHS)
        if self.basis_bits is not None:
            _one_of("basis_bits", self.basis_bits, (2, 3, 4, 5, 6, 7, 8, UNQUANTIZED))
        for mode in self.modes:
            _one_of("each of modes", mode, MODES)
        _check(len(self.modes) > 0, "modes must name at least one mode", self.modes)
        _check(self.low_frequencies >= 1, "low_frequencies must be at least 1", self.low_frequencies)
        _check(self.probe_queries >= 2, "probe_queries must be at least 2", self.probe_queries)
        _check(self.fold >= 8 and self.fold % 8 == 0, "fold must be a multiple of 8 tokens", self.fold)
        _one_of("window_bits", self.window_bits, (8, UNQUANTIZED, None))
        _check(self.window >= 1, "window must be at least 1 token", self.window)
        _check(self.num_sinks >= 0, "num_sinks must not be negative", self.num_sinks)
        _check(self.min_entries >= 2, "min_entries must be at least 2 tokens", self.min_entries)
        _check(self.key_directions >= 0, "key_directions must not be negative", self.key_directions)
        for name in ("key_emphasis", "channel_floor"):
            value = getattr(self, name)
            _check(0 < value < math.inf, f"{name} must be positive and finite", value)
        for name in ("key_rank", "value_rank"):
            value = getattr(self, name)
            ranks = value if isinstance(value, Sequence) else [1 if value is None else value]
            _check(len(ranks) > 0 and min(ranks) >= 1, f"{name} must be a number >= 1, or one for every block", value)
        _check(self.gram_tokens >= 1, "gram_tokens must be at least 1 token", self.gram_tokens)
        if self.basis in ("dct", "aligned_dct"):
            _check(self.heads == "single", "the DCT bases share per head: set heads=single", self.heads)
            smallest_block = f"low_frequencies must be below block_size={self.block_size}"
            _check(self.low_frequencies <= self.block_size, smallest_block, self.low_frequencies)

    def window_dtype(self, dtype: torch.dtype, share: float) -> torch.dtype:
        """Stored dtype of sinks and window in a cache of `dtype` that may hold a `share` of the full one's bytes."""
        narrow = share * 8 * dtype.itemsize < EXACT_WINDOW_BITS if self.window_bits is None else self.window_bits == 8
        return FLOAT8 if narrow else dtype

    def blocks(self, num_layers: int) -> list[range]:
        """Layers of each block: `block_size` at a time, the leftover in a smaller one."""
        starts = range(0, num_layers, self.block_size)
        return [range(start, min(start + self.block_size, num_layers)) for start in starts]

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse what cannot work before the prefill.

        Raises:
            NotImplementedError: sliding-window layers, budget_scope=layer, pre_rope without a rotary embedding.
            UnreachableBudgetError: the shared form alone exceeds the budget at any length.
        """
        super().validate(spec, budget)
        if budget.is_full:
            return
        if budget.scope == "layer":
            raise NotImplementedError(
                f"method '{self.name}' keeps every token in few bits, so budget_scope='layer' (entries per layer) "
                "cannot bound it. Use budget_scope='bytes'"
            )
        if self.keys == "pre_rope" and spec.inverse_frequencies is None:
            raise NotImplementedError("keys=pre_rope needs a model with rotary positions; use keys=post_rope")
        smallest = self.smallest_share(spec)
        if not isinstance(budget.value, int) and budget.value < smallest:
            raise UnreachableBudgetError(self.name, budget.value, smallest, LEVERS)

    def smallest_share(self, spec: ModelSpec) -> float:
        """Share of the full cache that the shared form needs on a long prompt, side data left out."""
        if "shared" not in self.modes and "residual" not in self.modes:
            return 1.0
        if self.basis not in ("dct", "aligned_dct"):
            return 0.0
        bits = min(self.coefficient_bits)
        width = 8 * spec.dtype.itemsize if bits == UNQUANTIZED else bits
        sizes = [len(block) for block in self.blocks(spec.num_layers)]
        kept = sum(min(self.low_frequencies, size) for size in sizes)
        return kept / sum(sizes) * width / (8 * spec.dtype.itemsize)

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return self.make_layers(spec, budget)[layer_idx]

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        plan = ProbePlan(self.probe_queries)
        layers: list[CacheLayer] = []
        for index, members in enumerate(self.blocks(spec.num_layers)):
            block = LayerBlock(self, spec, budget, index, members)
            layers += [FreqDepthLayer(spec, budget, layer_idx, block, plan) for layer_idx in members]
        return layers

    def new_cache(self, model: Any, *args: Any, **kwargs: Any) -> CompressedCache:
        """See `Method.new_cache`; also notes which token ids bound documents."""
        cache = super().new_cache(model, *args, **kwargs)
        assert isinstance(cache, FreqDepthCache)
        cache.boundary_ids = _boundary_ids(model)
        return cache


LEVERS = (
    "a larger block_size, fewer coefficient_bits (8, 4, 3 or 2 instead of 16), fewer low_frequencies or a lower rank, "
    "basis=klt, a smaller window or fold"
)


def _boundary_ids(model: Any) -> frozenset[int]:
    """Ids that begin or end a document: every BOS and EOS of the model."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(config, name, None)
            found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def _check(holds: bool, rule: str, received: Any) -> None:
    if not holds:
        raise ValueError(f"{rule}; received {received!r}")


def _one_of(what: str, value: Any, valid: Sequence[Any]) -> None:
    if value not in valid:
        raise ValueError(f"{what} must be one of {', '.join(map(str, valid))}; received {value!r}")
