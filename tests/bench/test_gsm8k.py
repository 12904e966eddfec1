"""GSM8K: number extraction (G5), few-shot prompt, how many examples fit; golden on genuine records."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from shared_data import first_records, shared

from kvcore.bench.base import build_bench
from kvcore.bench.gsm8k.data import examples_text, prompts, question_text
from kvcore.bench.gsm8k.scoring import answer_number, last_number, marked_number, score

STOPS = ("Question:",)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72 clips, altogether.", "72"),
        ("It costs $29.00", "29"),
        ("130,000", "130000"),
        ("#### -3", "-3"),
        ("#### $1,234.50 in all 7", "1234.5"),
        ("10-3=7", "7"),
        ("loss of -$5", "-5"),
        ("loss of $-5.", "-5"),
        ("it is .5", "0.5"),
        ("9, 10, and 11,", "11"),
        ("16-3-4", "4"),
        ("no number, at all.", None),
        ("", None),
        ("#### none, but 8", "8"),
    ],
)
def test_numbers(text, number):
    assert answer_number(text) == (None if number is None else Decimal(number))


def test_marked_number_goes_first():
    assert answer_number("#### 5\nso 7") == 5
    assert marked_number("7") is None
    assert last_number("5 then 7") == 7


def test_text_after_a_generated_question_is_dropped():
    right = {"exact_match": 1.0, "strict_match": 1.0}
    assert score("#### 5\n\nQuestion: and 7?\n#### 7", "x\n#### 5", STOPS) == right
    assert score("It is 5.\n\nQuestion: and 7?", "x\n#### 5", STOPS) == {"exact_match": 1.0, "strict_match": 0.0}
    assert score("", "x\n#### 5", STOPS) == {"exact_match": 0.0, "strict_match": 0.0}
    assert score("$29.00", "#### 29", STOPS)["exact_match"] == 1.0
    assert score("<think>7</think> 5", "#### 5", STOPS)["exact_match"] == 1.0


def make(tmp_path, num_train=4, size=20, **options):
    train = [{"question": f"q{i} " + "x" * size, "answer": f"a\n#### {i}"} for i in range(num_train)]
    for name, records in (("train", train), ("test", [{"question": "t?", "answer": "#### 1"}] * 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    bench = build_bench("gsm8k", data_dir=str(tmp_path), **{"num_shots": num_train, **options})
    bench.check()
    return bench


def test_all_samples_share_the_examples(tmp_path, tiny_backbone):
    samples = make(tmp_path).samples(tiny_backbone)
    assert {s.task for s in samples} == {"gsm8k_4shot"}
    assert len({s.context for s in samples}) == 1
    assert samples[0].context.startswith("Question: q0 xxxx")
    assert samples[0].context.endswith("\nAnswer: a\n#### 3\n\n")
    assert samples[0].question == "Question: t?\nAnswer:"
    assert "Question:" in samples[0].stop
    assert not samples[0].chat


def test_the_run_says_how_many_examples_fitted(tmp_path, tiny_backbone, caplog):
    bench = make(tmp_path, num_train=20, size=2000)
    sample = bench.samples(tiny_backbone)[0]
    fitted = sample.meta["num_shots"]
    assert 5 <= fitted < 20
    assert sample.task == f"gsm8k_{fitted}shot"
    assert sample.truncated
    assert f"{fitted} of 20 solved examples fit" in caplog.text
    assert len(bench.prompt(tiny_backbone, sample).ids) + 256 <= 16384


def test_too_many_examples_are_refused_early(tmp_path):
    with pytest.raises(ValueError, match="num_shots is 9; the training file holds 4"):
        make(tmp_path, num_shots=9)


# --- golden: genuine records ---


def test_fifty_genuine_examples_stand_in_the_prompt(tiny_backbone):
    bench = build_bench("gsm8k", data_dir=str(shared("gsm8k")), limit=3)
    bench.check()
    train, test = first_records("gsm8k/train.jsonl", 50), first_records("gsm8k/test.jsonl")
    official = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in train)
    assert examples_text(train) == official
    for record in test:
        assert question_text(record) == f"Question: {record['question']}\nAnswer:"
        assert score(record["answer"], record["answer"], prompts()["stop"]) == {"exact_match": 1, "strict_match": 1}
        assert score("I do not know", record["answer"], prompts()["stop"])["exact_match"] == 0
    for sample in bench.samples(tiny_backbone):
        kept = sample.meta["num_shots"]
        assert sample.context == examples_text(train[:kept])


def test_every_genuine_answer_has_its_number():
    for record in first_records("gsm8k/test.jsonl", 1319):
        number = record["answer"].rpartition("#### ")[2].replace(",", "")
        assert marked_number(record["answer"]) == Decimal(number)
