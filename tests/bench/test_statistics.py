"""Intervals cover, pairs are matched by id, and nothing is computed from nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.bench.statistics import bootstrap_interval, paired_difference, proportion_interval, stratified_interval


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(60):
        interval = bootstrap_interval((rng.random(50) < 0.3).astype(float).tolist(), seed=trial)
        hits += interval.low <= 0.3 <= interval.high
    assert hits >= 50


def test_interval_of_one_sample_or_of_equal_ones_has_no_ends():
    assert bootstrap_interval([3.0]).low is None
    constant = bootstrap_interval([1.0] * 5)
    assert (constant.value, constant.low, constant.high, constant.n) == (1.0, None, None, 5)
    assert stratified_interval({"a": [1.0] * 3, "b": [0.0] * 3}).low is None
    assert stratified_interval({"a": [1.0] * 3, "b": [0.0, 1.0]}).low is not None


@pytest.mark.parametrize("top", [1.0, 100.0])
def test_answers_found_get_an_interval_even_when_all_or_none_are(top):
    def ends(values):
        interval = proportion_interval([top * value for value in values], top)
        return interval.low / top, interval.high / top

    # Wilson (1927): z² / (n + z²) from the end
    assert ends([1] * 4) == pytest.approx((0.5101, 1.0), abs=1e-4)
    assert ends([0] * 30) == pytest.approx((0.0, 0.1135), abs=1e-4)
    assert ends([1] * 28 + [0] * 2) == pytest.approx((0.7868, 0.9815), abs=1e-4)
    with pytest.raises(ValueError, match="between 0 and"):
        proportion_interval([top, -0.5], top)


def test_the_interval_of_answers_found_covers_the_true_share():
    rng = np.random.default_rng(0)
    found = [proportion_interval((rng.random(12) < 0.9).astype(float).tolist()) for _ in range(300)]
    assert sum(interval.low <= 0.9 <= interval.high for interval in found) >= 0.9 * 300


def test_mean_of_tasks_is_plain_whatever_their_sizes():
    interval = stratified_interval({"a": [0.0] * 10, "b": [1.0]})
    assert (interval.value, interval.n) == (0.5, 11)


def test_same_seed_same_interval():
    values = np.random.default_rng(1).random(30).tolist()
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="finite and at least one"):
        bootstrap_interval(values)


def test_paired_comparison_sees_what_separate_intervals_do_not():
    rng = np.random.default_rng(2)
    base = {i: float(value) for i, value in enumerate(rng.random(40))}
    better = {i: value + 0.01 + 0.002 * float(rng.random()) for i, value in base.items()}
    result = paired_difference(better, base)
    assert result.difference.low > 0
    assert result.p_value < 0.001
    assert (result.wins, result.losses, result.unmatched) == (40, 0, 0)
    a, b = bootstrap_interval(list(better.values())), bootstrap_interval(list(base.values()))
    assert a.low < b.high, "the separate intervals overlap"


def test_paired_comparison_matches_by_id_and_counts_the_rest():
    result = paired_difference({"x": 1.0, "y": 0.0, "z": 1.0}, {"y": 0.0, "x": 0.0, "w": 1.0})
    assert (result.difference.n, result.wins, result.losses, result.unmatched) == (2, 1, 0, 2)
    same = paired_difference({"x": 1.0, "y": 0.0}, {"x": 1.0, "y": 0.0})
    assert (same.difference.value, same.p_value) == (0.0, 1.0)
    with pytest.raises(ValueError, match="Run both with the same bench"):
        paired_difference({"x": 1.0}, {"y": 1.0})
