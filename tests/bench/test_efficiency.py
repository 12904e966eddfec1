"""Efficiency: what is measured, ratios against the full cache of the same run, batches."""

from __future__ import annotations

import math

import pytest
import torch

from kvcore.bench.base import MethodRun, build_bench
from kvcore.bench.efficiency.measure import PeakMemory
from kvcore.method import build_method


def runs(*names, budget=0.25):
    return [MethodRun(build_method(name), 1.0 if name == "full" else budget) for name in names]


def test_every_metric_is_measured_and_full_is_its_own_reference(tiny_backbone):
    bench = build_bench("efficiency", settings=((256, 6), (512, 4)), warmup_tokens=0)
    samples = bench.samples(tiny_backbone)
    assert [(s.task, s.context_length, s.max_new_tokens) for s in samples] == [("256/6", 256, 6), ("512/4", 512, 4)]
    full, streaming = bench.run(tiny_backbone, samples[1], runs("full", "streaming_llm"))
    for row in (full, streaming):
        # a process keeps freed pages: no ratio of peaks without a device of its own
        assert set(row["metrics"]) == set(bench.metrics) - {"peak_bytes_ratio", "peak_growth_bytes_ratio"}
        assert all(math.isfinite(value) for value in row["metrics"].values())
        times = [row["metrics"][name] for name in ("prefill_seconds", "ttft_seconds", "total_seconds")]
        assert 0 < times[0] <= times[1] <= times[2]
        assert row["metrics"]["tokens_per_second"] == pytest.approx(4 / row["metrics"]["total_seconds"])
        assert row["memory_meter"] == "resident_set"
    assert all(value == pytest.approx(1) for name, value in full["metrics"].items() if name.endswith("_ratio"))
    assert full["metrics"]["device_bytes"] == pytest.approx(tiny_backbone.spec.full_bytes(512 + 4 - 1), rel=1e-3)
    assert streaming["metrics"]["device_bytes_ratio"] == pytest.approx(0.25, rel=0.03)


def test_without_full_the_reference_is_measured_in_the_same_run(tiny_backbone):
    bench = build_bench("efficiency", settings=((256, 4),), warmup_tokens=16, batch_size=2)
    (sample,) = bench.samples(tiny_backbone)
    assert len(sample.meta["ids"]) == 2
    (row,) = bench.run(tiny_backbone, sample, runs("streaming_llm"))
    assert row["batch_size"] == 2
    assert row["metrics"]["device_bytes_ratio"] == pytest.approx(0.25, rel=0.05)
    assert row["metrics"]["tokens_per_second"] == pytest.approx(8 / row["metrics"]["total_seconds"])


def test_peak_memory_sees_what_is_gone_at_the_end():
    with PeakMemory(torch.device("cpu")) as memory:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        torch.sin(block[: 1 << 20].float())
        del block
    assert memory.growth >= 48 << 20
    assert memory.peak >= memory.growth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": ()}, "pairs"),
        ({"settings": ((5,),)}, r"settings.*received \(5,\)"),
        ({"settings": ((128, 1),)}, "at least 2 tokens"),
        ({"batch_size": 0}, "batch_size >= 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build_bench("efficiency", **options)


def test_a_setting_beyond_the_model_is_refused(tiny_backbone):
    with pytest.raises(ValueError, match=r"16000 \+ 1000 tokens; tiny was built for 16384"):
        build_bench("efficiency", settings=((16000, 1000),)).samples(tiny_backbone)
