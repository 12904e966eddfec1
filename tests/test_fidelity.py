"""Fidelity: the full cache has no divergence, the oracle beats a window, and one shared prefill equals many."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from foundation_cases import SMALL, feed, new_cache, token_ids

import freqdepth
import sekv
from kvcore.attention import prefill
from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, Sample, build_bench
from kvcore.bench.fidelity import Fidelity
from kvcore.budget import UnreachableBudgetError
from kvcore.fanout import FanOutCache
from kvcore.method import build_method, method_names

REGISTERED = (sekv, freqdepth)
BUDGETS = (0.25, 0.5, 0.85)


@pytest.fixture(scope="module")
def backbone():
    tiny = {**SMALL, "num_hidden_layers": 4}
    return load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32", tiny=tiny))


def sample(context: int = 160, continuation: int = 24) -> Sample:
    ids = token_ids(1, context + continuation)[0].tolist()
    return Sample(id="s", task="t", context_length=context, meta={"token_ids": ids})


def run(backbone, *runs, **options):
    bench = Fidelity(**{"coverage_every": 1, **options})
    return bench.run(backbone, sample(), [MethodRun(build_method(name), budget) for name, budget in runs])


def test_the_full_cache_has_no_divergence_and_the_oracle_beats_a_window(backbone):
    full, streaming, oracle = run(backbone, ("full", 1.0), ("streaming_llm", 0.1), ("oracle_topk", 0.1))
    assert full["metrics"]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert full["metrics"]["agreement"] == full["metrics"]["coverage"] == 1.0
    assert 0 < oracle["metrics"]["kl"] < streaming["metrics"]["kl"]
    assert streaming["metrics"]["coverage"] < oracle["metrics"]["coverage"] < 1.0
    assert streaming["device_share"] <= 0.102
    assert oracle["device_share"] == pytest.approx(1.0, abs=1e-3)
    assert all(row["prefill_seconds"] > 0 and row["ms_per_token"] > 0 for row in (full, streaming, oracle))


@torch.inference_mode()
def test_the_divergence_is_kl_of_full_to_method_in_nats(backbone):
    row = run(backbone, ("streaming_llm", 0.1))[0]
    ids = torch.tensor([sample().meta["token_ids"]])
    cache = new_cache(backbone.model, "streaming_llm", 0.1)
    prefill(backbone.model, cache, ids[:, :160])
    ours = torch.log_softmax(feed(backbone.model, cache, ids[:, 160:-1])[0], -1)
    exact = torch.log_softmax(backbone.model(ids).logits[0, 160:-1], -1)
    by_hand = (exact.exp() * (exact - ours)).sum(-1).mean()
    assert row["metrics"]["kl"] == pytest.approx(float(by_hand), rel=1e-3)
    agreement = (ours.argmax(-1) == exact.argmax(-1)).float().mean()
    assert row["metrics"]["agreement"] == pytest.approx(float(agreement))
    assert math.isclose(float(F.kl_div(ours, exact, log_target=True, reduction="none").sum(-1).mean()), float(by_hand))


def test_steps_of_several_tokens_measure_the_same_full_cache(backbone):
    assert run(backbone, ("full", 1.0), step_tokens=8)[0]["metrics"]["kl"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", method_names())
def test_a_shared_prefill_equals_a_prefill_of_its_own(backbone, name):
    ids, more, model = token_ids(1, 160), token_ids(1, 4, 1), backbone.model
    for budget in BUDGETS:
        try:
            alone, shared, beside = (new_cache(model, name, budget) for _ in range(3))
            prefill(model, alone, ids)
            break
        except UnreachableBudgetError:
            continue
    else:
        pytest.fail(f"{name} meets none of {BUDGETS}")
    prefill(model, FanOutCache([beside, new_cache(model, "full"), shared]), ids)
    expected = feed(model, alone, more)
    assert torch.equal(feed(model, shared, more), expected)
    assert torch.equal(feed(model, beside, more), expected)
    assert shared.memory_bytes() == alone.memory_bytes()
    assert shared.ledger.device_bytes == alone.ledger.device_bytes


def test_a_shared_prefill_in_chunks_equals_one_forward(backbone):
    ids, more, model = token_ids(1, 100), token_ids(1, 3, 1), backbone.model
    whole, chunked = (new_cache(model, "streaming_llm", 0.25) for _ in range(2))
    prefill(model, FanOutCache([whole]), ids)
    prefill(model, FanOutCache([chunked]), ids, chunk_size=33)
    torch.testing.assert_close(feed(model, chunked, more), feed(model, whole, more), atol=1e-4, rtol=1e-4)


def test_a_shared_prefill_needs_a_cache():
    with pytest.raises(ValueError, match="at least one cache"):
        FanOutCache([])


def test_the_seed_fixes_the_windows(backbone):
    def drawn(seed):
        bench = Fidelity(contexts=(300,), documents=4, continuation=20, seed=seed)
        return [s.meta["token_ids"] for s in bench.samples(backbone)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert all(len(ids) == 320 for ids in drawn(3))


def test_the_limit_caps_the_documents_of_each_context(backbone):
    bench = Fidelity(contexts=(100, 200), documents=5, continuation=10, limit=2)
    assert [s.context_length for s in bench.samples(backbone)] == [100, 100, 200, 200]


def test_a_context_beyond_the_models_length_is_refused(backbone):
    with pytest.raises(ValueError, match=r"needs 4128 tokens.*built for 2048\. Lower bench\.fidelity\.contexts"):
        Fidelity(contexts=(4000,)).samples(backbone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": []}, "contexts must be token counts"),
        ({"documents": 0}, "documents must be >= 1"),
        ({"continuation": 1}, "continuation must be >= 2"),
        ({"step_tokens": 0}, "step_tokens must be >= 1"),
        ({"coverage_every": -1}, "coverage_every >= 0"),
        ({"documents": "many"}, "documents"),
    ],
)
def test_options_out_of_range_are_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        build_bench("fidelity", **options)
