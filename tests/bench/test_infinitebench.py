"""InfiniteBench: official templates, labels, cutting and scorers; golden on the authors' records."""

from __future__ import annotations

import json

import pytest
from shared_data import first_records, shared

from kvcore.bench.base import build_bench
from kvcore.bench.infinitebench.data import TASKS, max_new_tokens, split_prompt, template_names
from kvcore.bench.infinitebench.scoring import label_of, score

CHOICE = {"answer": ["Ann"], "options": ["Bob", "Ann", "Eve", "Joe"]}


@pytest.mark.parametrize(
    ("task", "prediction", "label", "value"),
    [
        ("passkey", " 72577.", "72577", 1),
        ("passkey", "The pass key is 72577", "72577", 1),
        ("passkey", "7 2577", "72577", 0),
        ("passkey", "", "72577", 0),
        ("number_string", "digits: 0012 34", "0012", 1),
        ("kv_retrieval", 'is "a-b". ok', "a-b", 1),
        ("kv_retrieval", "xa-b", "a-b", 0),
        ("math_find", "is 94, or 3", 94, 1),
        ("math_find", "is 94.0", 94, 0),
        ("math_find", "is 3.5", 3.5, 1),
        ("math_find", "none", 94, 0),
        ("code_run", "The value: -3.", -3, 1),
        ("code_run", "-3 or so", -3, 0),
        ("code_run", "", 3, 0),
        ("code_debug", "B. because", ["foo", "B"], 1),
        ("code_debug", "The answer is: foo", ["foo", "B"], 1),
        ("code_debug", "The answer is: A", ["foo", "B"], 0),
        ("code_debug", "The answer is:", ["foo", "B"], 0),
        ("longbook_choice_eng", "B", ["Ann", "B"], 1),
        ("longbook_choice_eng", "So the option is B", ["Ann", "B"], 1),
        ("longbook_choice_eng", "I say: C", ["Ann", "B"], 0),
        ("longbook_choice_eng", "", ["Ann", "B"], 0),
        ("longdialogue_qa_eng", "It is Gus.", "GUS", 1),
        ("longbook_qa_eng", "the Ann", ["Bob", "Ann"], 1),
        ("longbook_qa_eng", "", ["Bob"], 0),
        ("math_calc", "1, 4, 9", [1, 4, 8], 2 / 3),
        ("longbook_sum_eng", "", ["a b"], 0),
        ("longbook_sum_eng", ".", ["a b"], 0),
        ("longbook_sum_eng", "a b", ["a b"], 1),
    ],
)
def test_scorers(task, prediction, label, value):
    assert score(task, prediction, label) == pytest.approx(value)


def test_math_calc_may_drop_the_repeated_first_number():
    assert score("math_calc", "7 1 4 8", [1, 4, 8], drop_first_number=True) == 1


def test_labels():
    assert label_of("longbook_choice_eng", CHOICE) == label_of("code_debug", CHOICE) == ["Ann", "B"]
    assert label_of("code_debug", {"answer": ["foo", "C"], "options": []}) == ["foo", "C"]
    assert label_of("passkey", {"answer": ["123"]}) == label_of("passkey", {"answer": 123}) == "123"
    assert label_of("math_find", {"answer": ["3.5"]}) == 3.5
    assert label_of("code_run", {"answer": "22"}) == 22
    assert label_of("longbook_sum_eng", {"answer": "text"}) == ["text"]
    assert label_of("longdialogue_qa_eng", {"answer": ["GUS"]}) == "GUS"
    assert label_of("math_calc", {"answer": [1, 2]}) == [1, 2]


@pytest.mark.parametrize("template", template_names())
@pytest.mark.parametrize("task", TASKS)
def test_every_template_fills_and_keeps_the_context_first(task, template):
    question = {"code_run": "value of func_5(-4).", "math_find": "The second largest number of the list is: "}
    record = {"context": "CON{TEXT}", "input": question.get(task, "Q?"), **CHOICE}
    context, rest = split_prompt(task, template, record)
    assert context.endswith("CON{TEXT}")
    assert "{" not in context.removesuffix("CON{TEXT}") + rest.replace("${", "")
    if task == "math_find":
        assert "What is the second largest number in the following list?" in context
    if task == "code_run":
        assert "func_5" in context + rest


def test_questions_in_another_form_are_named():
    with pytest.raises(ValueError, match="math_find: the question 'x' does not match"):
        split_prompt("math_find", "gpt4", {"context": "", "input": "x"})


def test_long_contexts_are_cut_in_the_middle(tmp_path, tiny_backbone):
    record = {"context": "A" * 20_000 + "B" * 20_000, "input": "What is the pass key?", "answer": "12345"}
    (tmp_path / "passkey.jsonl").write_text(json.dumps(record))
    bench = build_bench("infinitebench", tasks=("passkey",), data_dir=str(tmp_path))
    (sample,) = bench.samples(tiny_backbone)
    assert sample.truncated
    assert sample.question == "\n\nWhat is the pass key?\n\nThe pass key is"
    assert (sample.max_new_tokens, sample.chat) == (6, False)
    assert 16384 - 3 <= len(bench.prompt(tiny_backbone, sample).ids) + 6 <= 16384
    assert bench.score(sample, " 12345") == {"accuracy": 100.0}
    chat = build_bench("infinitebench", tasks=("passkey",), data_dir=str(tmp_path), template="gpt4")
    assert chat.samples(tiny_backbone)[0].chat


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("paskey",)}, "Did you mean 'passkey'"),
        ({"template": "gpt5"}, "Did you mean 'gpt4'"),
        ({"max_prompt_tokens": 1}, "max_prompt_tokens must be >= 2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build_bench("infinitebench", **options)


# --- golden: records of the authors, and records made by their functions ---


@pytest.mark.parametrize("template", template_names())
@pytest.mark.parametrize(
    ("task", "variant"),
    [("passkey", "8192"), ("number_string", "8192_generated"), ("kv_retrieval", "75keys_from_lost_in_the_middle")],
)
def test_genuine_retrieval_prompts_and_scores(tiny_backbone, task, variant, template):
    official = json.loads(shared("infinitebench/prompt_templates.json").read_text(encoding="utf-8"))
    text = official["templates"][f"{template}_templates"][task]
    bench = build_bench(
        "infinitebench",
        tasks=(task,),
        variant=variant,
        template=template,
        data_dir=str(shared("infinitebench")),
        limit=3,
        max_prompt_tokens=100_000,
    )
    for record in first_records(f"infinitebench/{task}_{variant}.jsonl"):
        context, question = split_prompt(task, template, record)
        assert context + question == text.format(context=record["context"], input=record["input"])
        assert score(task, f" {record['answer']}.", label_of(task, record)) == 1
        assert score(task, "", label_of(task, record)) == 0
    samples = bench.samples(tiny_backbone)
    assert len({sample.id for sample in samples}) == 3
    assert max_new_tokens(task) == official["max_new_tokens"][task] == samples[0].max_new_tokens


@pytest.mark.parametrize(("task", "file"), [("math_find", "math_find_2500"), ("code_run", "code_run")])
def test_generated_records_score(task, file):
    for record in first_records(f"infinitebench/{file}_generated.jsonl"):
        context, question = split_prompt(task, "yarn_mistral", record)
        assert record["context"] in context
        assert score(task, f" {record['answer']}", label_of(task, record)) == 1
        assert (record["input"] in question) == (task == "math_find")
