"""The runner: resumes after an interruption, shares samples between processes, hides the question while compressing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evaluation_cases import Calls, Toy, toy_plan
from foundation_cases import SMALL

import kvcore.bench.generation
from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, Sample
from kvcore.bench.generation import greedy_answers
from kvcore.bench.runner import evaluate
from kvcore.bench.stopping import StopStrings
from kvcore.budget import UnreachableBudgetError
from kvcore.method import build_method
from kvcore.tiny import byte_tokenizer

pytestmark = pytest.mark.versions
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def backbone():
    tiny = {**SMALL, "num_hidden_layers": 2}
    return load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32", tiny=tiny))


def test_an_interrupted_run_keeps_finished_samples_and_resumes(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        first = Calls(patch, stop_after=7)  # three samples of two methods, and half of the fourth
        with pytest.raises(KeyboardInterrupt):
            evaluate(*toy_plan(), tmp_path)
    assert not (tmp_path / "results.json").exists()
    with monkeypatch.context() as patch:
        second = Calls(patch)
        results = evaluate(*toy_plan(), tmp_path)
    assert len(first.ran) == 7 and len(second.ran) == 8
    assert len(results["samples"]) == 14
    alone = evaluate(*toy_plan(), tmp_path / "fresh")
    assert [r["prediction"] for r in results["samples"]] == [r["prediction"] for r in alone["samples"]]


def kept_keys(monkeypatch, backbone, question, compress_question):
    """Per layer, what streaming_llm kept when it had compressed the context."""
    caches, whole = [], kvcore.bench.generation.prefill

    def spy(model, cache, ids, **kwargs):
        logits = whole(model, cache, ids, **kwargs)
        caches.extend([[layer.keys.clone() for layer in child.layers] for child in cache.children])
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.bench.generation, "prefill", spy)
        bench = Toy(compress_question=compress_question)
        sample = Sample(id="x", task="a", context="Some context. " * 10, question=question, max_new_tokens=2)
        bench.run(backbone, sample, [MethodRun(build_method("snapkv"), 0.5)])
    return caches[0]


def test_the_finished_samples_of_an_unfinished_run_can_be_looked_at(tmp_path):
    with pytest.raises(ValueError, match="holds no finished sample"):
        evaluate(*toy_plan(finished_only=True), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        Calls(patch, stop_after=7)
        with pytest.raises(KeyboardInterrupt):
            evaluate(*toy_plan(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        ran = Calls(patch).ran
        seen = evaluate(*toy_plan(finished_only=True), tmp_path)
        assert not ran
    assert {row["n"] for row in seen["summary"] if row["task"] == "all"} == {3}
    whole = evaluate(*toy_plan(), tmp_path)
    assert [row for row in whole["samples"] if row in seen["samples"]] == seen["samples"]


@pytest.mark.parametrize("compress_question", [False, True])
def test_g8_the_kept_set_depends_on_the_question_only_when_told_so(monkeypatch, backbone, compress_question):
    kept = [kept_keys(monkeypatch, backbone, q, compress_question) for q in ("Where is it?", "When was it?")]
    same = all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert same == (not compress_question)


@pytest.mark.parametrize("compress_question", [False, True])
def test_g8_the_switch_stands_in_every_row(tmp_path, compress_question):
    results = evaluate(*toy_plan(compress_question=compress_question, limit=2), tmp_path)
    for part in ("summary", "samples"):
        assert {row["compress_question"] for row in results[part]} == {compress_question}
    assert {row["score"] for row in results["samples"]} <= {row["metrics"]["letters"] for row in results["samples"]}


def test_samples_with_one_context_share_a_prefill_and_answer_as_alone(backbone, monkeypatch):
    bench, runs = Toy(), [MethodRun(build_method("streaming_llm"), 0.5)]
    samples = [
        Sample(id=str(i), task="a", context="A shared context. " * 8, question=f"q{i}", max_new_tokens=6)
        for i in range(3)
    ]
    alone = [bench.run(backbone, sample, runs)[0]["prediction"] for sample in samples]
    calls, whole = [], kvcore.bench.generation.prefill
    monkeypatch.setattr(kvcore.bench.generation, "prefill", lambda *a, **k: calls.append(1) or whole(*a, **k))
    together = [rows[0]["prediction"] for rows in bench.run_group(backbone, samples, runs)]
    assert (together, len(calls)) == (alone, 1)


def test_an_unreachable_budget_is_an_error_or_left_out_as_asked(tmp_path, monkeypatch):
    def refuse(self, spec, budget):
        raise UnreachableBudgetError(self.name, budget.value, 0.9, "none")

    monkeypatch.setattr(type(build_method("streaming_llm")), "validate", refuse)
    with pytest.raises(UnreachableBudgetError, match=r"smallest it can reach here is 0\.9"):
        evaluate(*toy_plan(), tmp_path)
    results = evaluate(*toy_plan(on_unreachable="skip", limit=1), tmp_path)
    assert {row["label"] for row in results["samples"]} == {"full"}
    with pytest.raises(ValueError, match="no method of this run can serve"):
        evaluate(*toy_plan(on_unreachable="skip", method={"streaming_llm": {}}), tmp_path)


def test_a_budget_out_of_reach_at_a_sample_only_is_left_out_there(tmp_path, monkeypatch, caplog):
    """Checked at the model's longest context it is reachable; short prompts weigh the side data more."""
    method = type(build_method("streaming_llm"))

    def refuse(self, *arguments):
        raise UnreachableBudgetError(self.name, 0.25, 0.9, "none")

    monkeypatch.setattr(method, "new_cache", refuse)
    with pytest.raises(UnreachableBudgetError):
        evaluate(*toy_plan(), tmp_path / "error")
    results = evaluate(*toy_plan(on_unreachable="skip"), tmp_path / "skip")
    assert [row["label"] for row in results["samples"]] == ["full"] * 7
    assert caplog.text.count("left out at 100 tokens") == 1, "tried once, not at every sample"


def test_g7_generation_stops_at_every_end_id_and_at_stop_strings(backbone):
    sample = Sample(id="x", task="a", max_new_tokens=12)
    ids = backbone.tokenizer("some prompt").input_ids
    cache = build_method("full").new_cache(backbone.model)
    free = greedy_answers(backbone, sample, [ids], cache)[0]
    assert len(free) == 12
    cut = Sample(id="x", task="a", max_new_tokens=12, extra_eos_ids=(free[3],))
    cut_short = greedy_answers(backbone, cut, [ids], build_method("full").new_cache(backbone.model))[0]
    assert cut_short == free[: free.index(free[3]) + 1]
    backbone.model.generation_config.eos_token_id = [299, free[1]]
    try:
        stopped = greedy_answers(backbone, sample, [ids], build_method("full").new_cache(backbone.model))[0]
    finally:
        backbone.model.generation_config.eos_token_id = None
    assert stopped == free[: free.index(free[1]) + 1]


def test_g7_stop_strings_are_found_across_tokens_and_only_in_the_answer():
    tokenizer = byte_tokenizer()
    prompt, answer = "Question: a", "b\nQuestion: c"
    ids = torch.tensor([tokenizer(prompt).input_ids + tokenizer(answer).input_ids])
    start = len(tokenizer(prompt).input_ids)
    stop = StopStrings(tokenizer, ["Question:"], start)
    done = [bool(stop(ids[:, :end], None)) for end in range(start + 1, ids.shape[1] + 1)]
    assert done.index(True) == len("b\nQuestion:") - 1


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_g9_two_processes_give_the_score_of_one(tmp_path, batch_size):
    program = (
        "import sys, json; from pathlib import Path; from evaluation_cases import toy_plan;"
        "from kvcore.bench.runner import evaluate; import torch; torch.set_num_threads(1);"
        "evaluate(*toy_plan(bench__toy__batch_size=int(sys.argv[2])), Path(sys.argv[1]))"
    )
    script = tmp_path / "job.py"
    script.write_text(program.replace("; ", ";").replace(";", "\n"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    # on CPUs `accelerate launch --cpu --num_processes 2` starts one process only: torchrun starts both
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += [str(script), str(tmp_path / "two"), str(batch_size)]
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    one = evaluate(*toy_plan(), tmp_path / "one")
    assert max(row["batch"] for row in two["samples"]) == batch_size
    assert len(list((tmp_path / "two").glob("samples.*.jsonl"))) == 2
    for results in (one, two):
        full = [row for row in results["samples"] if row["label"] == "full"]
        assert len(full) == len({row["id"] for row in full}) == 7
    assert [r["prediction"] for r in two["samples"]] == [r["prediction"] for r in one["samples"]]
    scores = [[(r["task"], r["method"], r["n"], r["value"]) for r in res["summary"]] for res in (one, two)]
    assert scores[0] == scores[1]
