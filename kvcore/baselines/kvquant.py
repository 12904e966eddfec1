"""KVQuant: pre-RoPE keys per channel, values per token, non-uniform levels, outliers kept sparse.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
https://arxiv.org/abs/2401.18079.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.baselines.codec import CodecLayer, CodecPlanner
from kvcore.baselines.kivi import EXACT
from kvcore.baselines.kvquant_store import NuqSetting
from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer
from kvcore.method import Method, register

BITS = (8, 5, 4, 3, 2)


MOST_ITERATIONS = 10_000


@register
@dataclass(frozen=True, kw_only=True)
class KVQuant(Method):
    """Non-uniform quantisation with sparse outliers (https://arxiv.org/abs/2401.18079, sections 3.1-3.5).

    Keys are quantised before RoPE (rotated back at use), one range per channel, fixed by the prompt; values one range
    per token, over all KV heads. Entries scaled to [-1, 1] are rounded to the nearest of 2^bits levels, one set for
    the keys and one for the values of a layer. Entries outside the ranges (half of `outliers` at each end, per channel
    or token) are stored exactly with their place. Each KV head is quantised once, whatever the number of query heads.

    The paper calibrates ranges and levels offline, with Fisher information as weights; here each prompt calibrates
    itself, the squared range of an entry's channel or token being its weight (a rounding error in units of the range
    weighs as much as it moves the entry). Of a generated key at most as many entries as of a value become outliers.

    The compression is fixed by the bits: with `bits=null` the widest that fit the budget (8, 5, 4, 3, 2).

    Args:
        bits: 8, 5, 4, 3 or 2, or null for the budget's choice (the paper reports 4, 3 and 2).
        outliers: share of the entries kept exactly (0.01 in the paper).
        num_sinks: first tokens kept exactly (1 in the paper's attention-sink-aware form).
        iterations: rounds of k-means (50 in the authors' code).
    """

    name: ClassVar[str] = "kvquant"
    attends_all: ClassVar[bool] = True
    bits: int | None = None
    outliers: float = 0.01
    num_sinks: int = 1
    iterations: int = 50

    def __post_init__(self) -> None:
        if self.bits not in (None, *BITS):
            raise ValueError(f"method 'kvquant': bits must be null or one of {BITS}; received {self.bits!r}")
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"method 'kvquant': outliers must be a share in [0, 0.5); received {self.outliers!r}")
        if self.num_sinks < 0 or not 1 <= self.iterations <= MOST_ITERATIONS:
            raise ValueError(
                f"method 'kvquant': num_sinks must be >= 0 and iterations in 1..{MOST_ITERATIONS}; received "
                f"{self.num_sinks} and {self.iterations}"
            )

    def planner(self, spec: ModelSpec, budget: Budget) -> CodecPlanner:
        widths = BITS if self.bits is None else (self.bits,)
        candidates = tuple(NuqSetting(bits, self.outliers, self.num_sinks, self.iterations) for bits in widths)
        return CodecPlanner(self.name, spec, budget, candidates, EXACT, "fewer bits or fewer outliers")

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        self.planner(spec, budget).validate()

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        if budget.is_full:
            return ExactLayer(spec, budget, layer_idx)
        return CodecLayer(spec, budget, layer_idx, self.planner(spec, budget))
