"""Confidence intervals of scores, and the paired comparison of two methods.

Samples of a benchmark are few, so every mean carries an interval, and two methods are compared on the same samples.
A score that is the plain mean of task means (RULER) is resampled within its tasks. A bootstrap of equal values has no
width, however few they are: shares of answers found get Wilson's interval, all other constants none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

RESAMPLES = 10_000
_CHUNK_CELLS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    Attributes:
        value: the mean (of task means when there are several tasks).
        low: lower end, or None where the samples do not tell: fewer than two, or all equal.
        high: upper end, or None.
        n: samples.
    """

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """How much better method A is than method B on the same samples.

    Attributes:
        difference: mean of A minus mean of B, with its interval.
        p_value: two-sided sign-flip permutation test of no difference.
        wins: samples where A scores higher.
        losses: samples where B scores higher.
        unmatched: samples that only one of the two has (left out).
    """

    difference: Interval
    p_value: float
    wins: int
    losses: int
    unmatched: int


def bootstrap_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of the mean of `values`.

    Raises:
        ValueError: no values, a value that is not finite, a level outside (0, 1).
    """
    return stratified_interval({"": values}, seed, level)


def stratified_interval(groups: Mapping[str, Sequence[float]], seed: int = 0, level: float = 0.95) -> Interval:
    """Interval of the plain mean of the groups' means, each group resampled on its own.

    Raises:
        ValueError: no groups, an empty group, a value that is not finite, a level outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"the level of an interval lies between 0 and 1; received {level}")
    arrays = {name: _checked(name, values) for name, values in groups.items()}
    if not arrays:
        raise ValueError("an interval needs at least one group of scores; received none")
    n = sum(map(len, arrays.values()))
    value = float(np.mean([array.mean() for array in arrays.values()]))
    if n < 2 or all(np.ptp(array) == 0 for array in arrays.values()):
        return Interval(value, None, None, n)
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(array, rng) for array in arrays.values()], axis=0)
    tail = 50 * (1 - level)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(value, float(low), float(high), n)


def proportion_interval(values: Sequence[float], top: float = 1.0, level: float = 0.95) -> Interval:
    """Wilson's interval of the mean of scores that count what was found: mostly 0 or `top`.

    Scores between the two are allowed: they vary less than hits and misses of the same mean, so it is not too narrow.

    Raises:
        ValueError: no values, a value outside [0, top], a level outside (0, 1).
    """
    array = _checked("", values)
    if not 0.0 < level < 1.0:
        raise ValueError(f"the level of an interval lies between 0 and 1; received {level}")
    if array.min() < 0 or array.max() > top:
        raise ValueError(f"scores must lie between 0 and {top:g}; received {array.min():g} to {array.max():g}")
    n, share, z = len(array), float(array.mean()) / top, float(norm.ppf((1 + level) / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # the ends at none and all found are 0 and top up to rounding
    return Interval(share * top, max(0.0, centre - half) * top, min(1.0, centre + half) * top, n)


def paired_difference(
    scores_a: Mapping[Hashable, float], scores_b: Mapping[Hashable, float], seed: int = 0, level: float = 0.95
) -> PairedDifference:
    """Compare two methods sample by sample.

    Args:
        scores_a: score of method A by sample id (the task belongs into the id when ids repeat between tasks).
        scores_b: the same for method B.
        seed: of the resampling.
        level: of the interval.

    Raises:
        ValueError: the two have no sample in common.
    """
    shared = sorted(scores_a.keys() & scores_b.keys(), key=str)
    if not shared:
        raise ValueError(
            f"two methods are compared on the same samples; these share none of {len(scores_a)} and {len(scores_b)}. "
            "Run both with the same bench, seed and limit"
        )
    deltas = np.array([scores_a[key] - scores_b[key] for key in shared], dtype=np.float64)
    return PairedDifference(
        difference=bootstrap_interval(deltas.tolist(), seed, level),
        p_value=_sign_flip_p(deltas, np.random.default_rng(seed)),
        wins=int((deltas > 0).sum()),
        losses=int((deltas < 0).sum()),
        unmatched=len(scores_a.keys() ^ scores_b.keys()),
    )


def _checked(name: str, values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        where = f" of group '{name}'" if name else ""
        raise ValueError(f"scores must be finite and at least one; received {array.tolist()[:5]}{where}")
    return array


def _resampled_means(values: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Means of `RESAMPLES` samples with replacement, in chunks that bound the memory."""
    rows = max(1, _CHUNK_CELLS // len(values))
    means = []
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        means.append(values[rng.integers(len(values), size=(count, len(values)))].mean(axis=1))
    return np.concatenate(means)


def _sign_flip_p(deltas: npt.NDArray[np.float64], rng: np.random.Generator) -> float:
    """Share of random sign flips whose mean is at least as far from 0 as the observed one."""
    observed, rows, hits = abs(deltas.mean()), max(1, _CHUNK_CELLS // len(deltas)), 0
    for start in range(0, RESAMPLES, rows):
        signs = rng.choice((-1.0, 1.0), size=(min(rows, RESAMPLES - start), len(deltas)))
        hits += int((np.abs((signs * deltas).mean(axis=1)) >= observed - 1e-12).sum())
    return (hits + 1) / (RESAMPLES + 1)
