"""Groups of samples with one context are cut, so that every process of `accelerate launch` gets a share."""

from __future__ import annotations

import pytest

from kvcore.bench.base import Sample
from kvcore.bench.batching import LARGEST_GROUP, work_groups


@pytest.mark.parametrize(
    ("num_processes", "sizes"), [(1, [16, 16, 8]), (2, [16, 16, 8]), (4, [10] * 4), (40, [1] * 40)]
)
def test_a_shared_context_is_cut_into_groups(num_processes, sizes):
    samples = [(i, Sample(id=str(i), task="t", context="shared")) for i in range(40)]
    groups = work_groups(samples, num_processes)
    assert [len(group) for group in groups] == sizes
    assert max(sizes) <= LARGEST_GROUP
    assert [sample for group in groups for sample in group] == samples


def test_every_task_and_length_has_its_first_group_before_any_has_its_second():
    places = [("a", 100)] * 5 + [("b", 100)] * 3 + [("a", 200)] * 4
    samples = [
        (i, Sample(id=str(i), task=task, context=f"{i}", context_length=length))
        for i, (task, length) in enumerate(places)
    ]
    groups = work_groups(samples, batch_size=2, lengths=[(100, 5) for _ in samples])
    assert sorted(number for group in groups for number, _ in group) == list(range(12))
    order = [(group[0][1].task, group[0][1].context_length) for group in groups]
    turns = [order[:i].count(place) for i, place in enumerate(order)]
    assert turns == sorted(turns) and turns.count(0) == 3
    assert order[:3] == [("a", 100), ("b", 100), ("a", 200)]
