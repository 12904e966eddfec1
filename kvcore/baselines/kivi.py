"""KIVI: keys quantised per channel, values per token, a full-precision residual.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", https://arxiv.org/abs/2402.02750.
Legend: n tokens of a row, R residual length, g group size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.baselines.codec import CodecLayer, CodecPlanner
from kvcore.baselines.kivi_store import UNBOUNDED, Setting
from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer
from kvcore.method import Method, register

BITS = (8, 4, 3, 2)
WIDEST_GROUP = 128
EXACT = Setting(bits=8, group_size=32, residual=UNBOUNDED)
LONGEST_RESIDUAL = 1 << 16


@register
@dataclass(frozen=True, kw_only=True)
class Kivi(Method):
    """Asymmetric quantisation without tuning (https://arxiv.org/abs/2402.02750, section 3.2, equation 1, algorithm 1).

    A group of g neighbours with minimum z and range s = (max - min) / (2^B - 1) is stored as round((x - z) / s). Keys
    are grouped along tokens (per channel) in whole blocks of R tokens: the newest n mod R keys stay exact. Values are
    grouped along channels (per token): the newest min(R, n) values stay exact. Each KV head is quantised once,
    whatever the number of query heads. Stored: packed integers and fp16 scales and zero points; blocks of 1024 tokens
    are dequantised while they are attended, never the whole. A forward of several tokens attends to what was stored
    before it and stores afterwards.

    The compression is fixed by the setting. With `bits=null` the budget chooses it: the widest bits of 8, 4, 3, 2,
    then the smallest group from `group_size` to 128, then the longest residual from `residual` down to one group,
    that fit. A budget in tokens makes rows move to narrower settings as they grow.

    Args:
        bits: 8, 4, 3 or 2 with exactly `group_size` and `residual` (2 in the paper), or null for the budget's choice.
        group_size: entries per scale and zero point (32 in the paper), a multiple of 8.
        residual: R, newest tokens left exact (128 in the paper), a multiple of `group_size`.
    """

    name: ClassVar[str] = "kivi"
    attends_all: ClassVar[bool] = True
    bits: int | None = None
    group_size: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (None, *BITS):
            raise ValueError(f"method 'kivi': bits must be null or one of {BITS}; received {self.bits!r}")
        if self.group_size < 8 or self.group_size % 8:
            raise ValueError(f"method 'kivi': group_size must be a multiple of 8; received {self.group_size}")
        if self.residual > LONGEST_RESIDUAL:
            # every residual down to one group is a setting to weigh
            raise ValueError(f"method 'kivi': residual must be <= {LONGEST_RESIDUAL}; received {self.residual}")
        if self.residual < self.group_size or self.residual % self.group_size:
            raise ValueError(
                f"method 'kivi': residual must be a multiple of group_size={self.group_size} (whole blocks are "
                f"quantised); received {self.residual}"
            )

    def candidates(self) -> tuple[Setting, ...]:
        """Settings in order of preference."""
        if self.bits is not None:
            return (Setting(self.bits, self.group_size, self.residual),)
        groups = [self.group_size << step for step in range(8) if self.group_size << step <= WIDEST_GROUP]
        return tuple(
            Setting(bits, group, residual)
            for bits in BITS
            for group in groups or [self.group_size]
            for residual in range(max(self.residual // group * group, group), 0, -group)
        )

    def planner(self, spec: ModelSpec, budget: Budget) -> CodecPlanner:
        levers = (
            f"fewer bits, wider groups (to {WIDEST_GROUP}), a shorter residual, or 'compose' with an evicting method"
        )
        return CodecPlanner(self.name, spec, budget, self.candidates(), EXACT, levers)

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        self.planner(spec, budget).validate()

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        if budget.is_full:
            return ExactLayer(spec, budget, layer_idx)
        return CodecLayer(spec, budget, layer_idx, self.planner(spec, budget))
