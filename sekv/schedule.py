"""What changes during training: sequence length, learning rate, weight of the budget loss."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Curriculum:
    """Sequence length as a function of the sample's global index.

    Attributes:
        lengths: sequence lengths in tokens, one per phase; phases take equal shares of the steps.
        steps: optimizer steps of the run.
        effective_batch: samples per step.
    """

    lengths: tuple[int, ...]
    steps: int
    effective_batch: int

    def __call__(self, index: int) -> int:
        """Tokens of the sample with global index `index`."""
        phase = index // self.effective_batch * len(self.lengths) // max(self.steps, 1)
        return self.lengths[min(phase, len(self.lengths) - 1)]


def learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of the steps, then a cosine to 0 (sekv.md section 1, item 10).

    Args:
        step: 0-based step about to be taken.
        steps: steps of the run.
        warmup: share of the steps, 0 to 1.
    """
    warmup_steps = max(round(warmup * steps), 0)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def budget_weight(step: int, steps: int, weight: float, ramp: float = 0.5) -> float:
    """The budget loss ramps linearly over the first `ramp` share of the steps (sekv.md section 1, item 9)."""
    ramp_steps = ramp * steps
    return weight if ramp_steps <= 0 else weight * min(1.0, (step + 1) / ramp_steps)
