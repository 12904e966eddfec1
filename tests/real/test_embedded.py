"""The real embedded backbone, short: it generates, compresses, and finds a needle."""

import importlib.util
from pathlib import Path

import pytest
import torch
from embedded_cases import PACKAGE, embedded_backbone
from transformers import AutoModelForCausalLM

import kvcore.baselines  # noqa: F401 - registers the methods
from kvcore.bench.base import MethodRun
from kvcore.bench.fidelity import Fidelity
from kvcore.bench.niah import NeedleInAHaystack
from kvcore.chat import build_prompt
from kvcore.method import build_method


@pytest.fixture(scope="module")
def backbone():
    return embedded_backbone("float32")


def runs(*named):
    return [MethodRun(build_method(name), budget) for name, budget in named]


@torch.inference_mode()
def test_l4_the_converted_model_predicts_what_the_gguf_file_predicts(backbone):
    package = importlib.util.find_spec(PACKAGE)
    folder = Path(next(iter(package.submodule_search_locations)))
    direct = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").eval()
    ids = backbone.tokenizer("The quick brown fox jumps over the lazy dog. " * 6, return_tensors="pt").input_ids
    ours, theirs = backbone.model(ids).logits, direct(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.95


@torch.inference_mode()
def test_a_streaming_cache_drops_into_generate(backbone):
    prompt = build_prompt(backbone.tokenizer, "The capital of France is", " which city?", chat=True)
    ids = torch.tensor([prompt.ids])
    answers = {}
    for budget in (1.0, 0.5):
        cache = build_method("streaming_llm").new_cache(backbone.model, budget)
        output = backbone.model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
        answers[budget] = backbone.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert cache.ledger.device_share <= budget
    assert "Paris" in answers[1.0]
    assert answers[0.5].strip()


def test_fidelity_on_one_document_orders_the_methods(backbone):
    bench = Fidelity(contexts=(512,), documents=1, continuation=17, step_tokens=16)
    rows = bench.run(
        backbone, bench.samples(backbone)[0], runs(("full", 1.0), ("streaming_llm", 0.1), ("oracle_topk", 0.1))
    )
    full, streaming, oracle = (row["metrics"] for row in rows)
    assert full["kl"] < 1e-5 and full["agreement"] == 1.0
    assert oracle["kl"] < streaming["kl"]
    assert oracle["coverage"] > streaming["coverage"]


def test_the_full_cache_finds_a_needle(backbone):
    bench = NeedleInAHaystack(contexts=(600,), depths=(0.5,), haystacks=("noise",))
    row = bench.run(backbone, bench.samples(backbone)[0], runs(("full", 1.0)))[0]
    assert row["metrics"]["recall"] == 1.0, row["prediction"]
