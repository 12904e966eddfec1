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
