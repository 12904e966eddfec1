"""The zoom benchmark: the needle grid's rows, with the counts of caches that zoom."""

import pytest

import kvcore.baselines  # noqa: F401 - registers the baselines
import sekv  # noqa: F401 - registers SeKV
from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, build_bench
from kvcore.method import build_method


@pytest.fixture(scope="module")
def rows():
    backbone = load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32"))
    bench = build_bench("zoom", contexts=(400,), depths=(0.5,), max_new_tokens=6)
    runs = [MethodRun(build_method("sekv"), 0.3, label="mine"), MethodRun(build_method("streaming_llm"), 0.3)]
    [sample] = bench.samples(backbone)
    return backbone, bench.run_group(backbone, [sample], runs)[0]


def test_a_cache_that_zooms_is_counted_per_layer_and_head(rows):
    backbone, (zoomed, _) = rows
    frequency = zoomed["zoom"]["frequency"]
    assert len(frequency) == backbone.spec.num_layers
    assert {len(layer) for layer in frequency} == {backbone.spec.num_heads}
    shares = [share for layer in frequency for share in layer]
    assert max(shares) > 0 and all(0 <= share <= 1 for share in shares)
    assert zoomed["metrics"].keys() == {"recall"}


def test_a_cache_that_does_not_zoom_says_nothing(rows):
    _, (_, other) = rows
    assert "zoom" not in other
