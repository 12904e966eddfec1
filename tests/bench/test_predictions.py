"""From sample to answer: one BOS, stock predictions at budget=1.0, what the cache sees, where generation stops."""

from __future__ import annotations

import json

import pytest
import torch

from kvcore.bench.base import MethodRun, Sample, build_bench
from kvcore.bench.generation import greedy_answers
from kvcore.method import build_method


def data(tmp_path):
    """Small data of every benchmark in the official schemas."""
    text = "Ann went home. Bob stayed. " * 20
    files = {
        "longbench/qasper.jsonl": [
            {"input": q, "context": text, "answers": ["Ann"], "length": 1, "all_classes": None, "_id": q}
            for q in ("Who left?", "Who stayed at home?")
        ],
        "longbench/samsum.jsonl": [
            {"input": "Dialogue: x", "context": text, "answers": ["Ann"], "length": 1, "all_classes": None, "_id": "s"}
        ],
        "infinitebench/passkey.jsonl": [
            {"context": text, "input": q, "answer": "12345"} for q in ("What is the pass key?", "Which key?")
        ],
        "gsm8k/train.jsonl": [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(3)],
        "gsm8k/test.jsonl": [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}],
        "samsum/train.jsonl": [{"dialogue": "Ann: hi", "summary": "Hi."}] * 3,
        "samsum/test.jsonl": [{"dialogue": "Bob: hi", "summary": "Hi."}, {"dialogue": "Bob: ho", "summary": "Ho."}],
        "humaneval/HumanEval.jsonl": [
            {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(c): pass"}
        ],
    }
    for name, records in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, records)))
    return tmp_path


BENCHES = {
    "ruler": {"contexts": (1500,), "tasks": ("niah_single_1", "fwe"), "limit": 1},
    "longbench": {"tasks": ("qasper", "samsum")},
    "infinitebench": {"tasks": ("passkey",), "max_answer_tokens": 4},
    "gsm8k": {"num_shots": 3, "max_new_tokens": 4},
    "samsum": {"context": 400, "max_new_tokens": 4},
    "humaneval": {"max_new_tokens": 4, "allow_code_execution": True},
}


def make(name, tmp_path):
    folder = None if name == "ruler" else str(data(tmp_path) / name)
    return build_bench(name, data_dir=folder, **BENCHES[name])


@pytest.mark.parametrize("name", list(BENCHES))
def test_one_bos_at_most_and_the_ids_of_one_string(tmp_path, tiny_backbone, name):
    # G1
    tokenizer = tiny_backbone.tokenizer
    for sample in make(name, tmp_path).samples(tiny_backbone):
        prompt = make(name, tmp_path).prompt(tiny_backbone, sample)
        assert prompt.ids.count(tokenizer.bos_token_id) <= 1
        assert tokenizer.bos_token_id not in prompt.ids[1:]
        text = sample.context + sample.question
        if sample.chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + sample.answer_prefix, add_special_tokens=not sample.chat).input_ids
        assert prompt.context_ids + prompt.question_ids == ids


@pytest.mark.parametrize("name", list(BENCHES))
def test_predictions_at_the_full_budget_are_those_of_stock_generate(tmp_path, tiny_backbone, name):
    # G1: at budget=1.0 predictions equal plain generate on the same ids
    bench = make(name, tmp_path)
    runs = [MethodRun(build_method(method), 1.0) for method in ("full", "streaming_llm")]
    sample = bench.samples(tiny_backbone)[0]
    rows = bench.run(tiny_backbone, sample, runs)
    ids = torch.tensor([bench.prompt(tiny_backbone, sample).ids])
    with torch.inference_mode():
        output = tiny_backbone.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=sample.max_new_tokens,
            min_new_tokens=sample.min_new_tokens or None,
            eos_token_id=[*tiny_backbone.eos_ids, *sample.extra_eos_ids],
            stop_strings=list(sample.stop) or None,
            tokenizer=tiny_backbone.tokenizer,
        )
    expected = tiny_backbone.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert [row["prediction"] for row in rows] == [expected, expected]
    assert all(set(row["metrics"]) <= set(bench.metrics) for row in rows)


@pytest.mark.parametrize("name", ["longbench", "infinitebench", "gsm8k", "samsum"])
def test_the_compressed_part_does_not_change_with_the_question(tmp_path, tiny_backbone, name):
    # G8
    bench = make(name, tmp_path)
    one, two = bench.samples(tiny_backbone)[:2]
    prompts = [bench.prompt(tiny_backbone, sample) for sample in (one, two)]
    assert prompts[0].context_ids == prompts[1].context_ids
    assert prompts[0].question_ids != prompts[1].question_ids


def test_generation_stops_at_every_end_of_the_model_and_of_the_task(tiny_backbone):
    # G7
    run = MethodRun(build_method("full"), 1.0)
    ids = tiny_backbone.tokenizer("Some text to go on from").input_ids

    def answer(**fields):
        sample = Sample(id="x", task="t", max_new_tokens=12, **fields)
        return greedy_answers(tiny_backbone, sample, [ids], run.new_cache(tiny_backbone))[0]

    with torch.inference_mode():
        free = answer()
        assert len(free) == 12
        stop_id = next(token for index, token in enumerate(free) if index >= 2 and token not in free[:index])
        at = free.index(stop_id)
        assert answer(extra_eos_ids=(stop_id,)) == free[: at + 1]
        first = answer(extra_eos_ids=(free[0],), min_new_tokens=1)
        assert len(first) >= 1
        text = tiny_backbone.tokenizer.decode(free[:5], skip_special_tokens=True)
        stopped = answer(stop=(text[2:4],))
        assert len(stopped) <= 12
        assert text[2:4] in tiny_backbone.tokenizer.decode(stopped, skip_special_tokens=True)


def test_questions_on_one_prefill_answer_like_questions_on_their_own(tmp_path, tiny_backbone):
    bench = make("gsm8k", tmp_path)
    runs = [MethodRun(build_method("full"), 1.0), MethodRun(build_method("streaming_llm"), 0.3)]
    samples = bench.samples(tiny_backbone)
    together = bench.run_group(tiny_backbone, samples, runs)
    alone = [bench.run(tiny_backbone, sample, runs) for sample in samples]

    def answers(rows):
        return [[row["prediction"] for row in of_sample] for of_sample in rows]

    assert answers(together) == answers(alone)
