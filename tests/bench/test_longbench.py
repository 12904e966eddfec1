"""LongBench: prompts, truncation, template exceptions, stop rules and scorers (G3, G6), golden on genuine records."""

from __future__ import annotations

import json

import pytest
from shared_data import ROOT, first_records, shared

from kvcore.bench.base import build_bench
from kvcore.bench.longbench.data import task_configs
from kvcore.bench.longbench.scoring import classification, first_code_line, length_bucket, score
from kvcore.bench.truncation import cut_middle

FEW_SHOT = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def record(context="A long story.", question="Who?", **fields):
    return {
        "input": question,
        "context": context,
        "answers": ["Ann"],
        "length": 5000,
        "dataset": "x",
        "language": "en",
        "all_classes": None,
        "_id": "abc",
        **fields,
    }


def make(tmp_path, task, records, **options):
    extended = options.get("extended", False)
    (tmp_path / f"{task}{'_e' if extended else ''}.jsonl").write_text("\n".join(map(json.dumps, records)))
    bench = build_bench("longbench", tasks=(task,), data_dir=str(tmp_path), **options)
    bench.check()
    return bench


@pytest.mark.parametrize("task", list(task_configs()))
def test_protocol_of_each_task(tmp_path, tiny_backbone, task):
    bench = make(tmp_path, task, [record()])
    (sample,) = bench.samples(tiny_backbone)
    official = task_configs()[task]["prompt"].format(context="A long story.", input="Who?")
    assert sample.context + sample.question == official
    assert "\\n" not in official, "line ends are real"
    assert "\n" in official
    assert sample.chat == (task not in FEW_SHOT)
    newline = tiny_backbone.tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert sample.extra_eos_ids == ((newline,) if task == "samsum" else ())
    assert sample.min_new_tokens == (1 if task == "samsum" else 0)
    assert sample.meta["first_line"] == (task in {"trec", "triviaqa", "samsum"})
    prompt = bench.prompt(tiny_backbone, sample)
    text = tiny_backbone.tokenizer.decode(prompt.ids)
    assert ("<|im_start|>" in text) == (task not in FEW_SHOT)
    assert text.count("<bos>") <= 1
    assert tiny_backbone.tokenizer.decode(prompt.context_ids).endswith("A long story.")


def test_sixteen_tasks_and_thirteen_of_longbench_e():
    assert len(task_configs()) == 16
    assert sum(config["extended"] for config in task_configs().values()) == 13
    with pytest.raises(ValueError, match="narrativeqa"):
        build_bench("longbench", tasks=("narrativeqa",), extended=True)


def test_over_long_prompts_keep_both_halves_and_the_question(tmp_path, tiny_backbone, caplog):
    story = "HEAD " + "x" * 40_000 + " TAIL"
    bench = make(tmp_path, "hotpotqa", [record(story, "Who is it?"), record()])
    caplog.set_level("INFO", "kvcore.bench.longbench.task")
    long, short = bench.samples(tiny_backbone)
    assert (long.truncated, short.truncated) == (True, False)
    assert "1 of 2 prompts were cut" in caplog.text
    assert long.context.startswith("Answer the question based on the given passages.")
    assert "HEAD" in long.context
    assert "TAIL" in long.context
    assert long.question.endswith("Question: Who is it?\nAnswer:")
    prompt = bench.prompt(tiny_backbone, long)
    total = len(prompt.ids) + long.max_new_tokens
    assert 16384 - 4 <= total <= 16384, "the limit less the answer and the template"
    capped = make(tmp_path, "hotpotqa", [record(story)], max_prompt_tokens=1000).samples(tiny_backbone)[0]
    assert len((capped.context + capped.question).encode()) == 1000
    assert capped.context_length == 1000


def test_cut_in_the_middle(tiny_backbone):
    tokenizer = tiny_backbone.tokenizer
    text = "".join(chr(97 + i % 26) for i in range(100))
    cut = cut_middle(tokenizer, text, "QQ", 20)
    assert (cut.context + cut.question, cut.question) == (text[:10] + text[-8:] + "QQ", "QQ")
    assert cut_middle(tokenizer, text, "QQ", 102).truncated is False
    swallowed = cut_middle(tokenizer, "ab", "Q" * 50, 10)
    assert (swallowed.context, swallowed.question) == ("abQQQ", "QQQQQ")
    with pytest.raises(ValueError, match="at least 2 tokens"):
        cut_middle(tokenizer, "ab", "c", 1)


def test_first_line_rule():
    # G3: '\nMusic\nQuestion: x' scores as 'Music' on TREC, TriviaQA and SAMSum
    prediction = "\nMusic\nQuestion: x"
    assert score("classification", prediction, ["Music"], ["Music", "Question"], True) == 1.0
    assert score("classification", prediction, ["Music"], ["Music", "Question"], False) == 0.5
    assert score("f1", prediction, ["Music"], None, True) == 1.0
    assert score("rouge_l", prediction, ["Music"], None, True) == pytest.approx(1.0, abs=1e-6)


def test_rouge_of_empty_predictions():
    # G6
    reference = "Amanda baked cookies. Jerry wants some."
    scores = [score("rouge_l", p, [reference], None, False) for p in ("", ".", "...", " \n", reference)]
    assert scores == [0, 0, 0, 0, pytest.approx(1.0, abs=1e-6)]


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "classes", "value"),
    [
        # values of the official metrics.py (rouge 1.0.1, fuzzywuzzy 0.18.0)
        ("f1", "The answer is Ann Lee.", ["Ann Lee", "Ann"], None, 0.6666666667),
        ("rouge_l", "the cat sat. on the mat", ["the cat lay. on a mat"], None, 0.7272727223140496),
        ("rouge_l", "b c. a", ["a. b c"], None, 0.9999999950000001),
        ("count", "5 or 7, maybe 5", ["5"], None, 2 / 3),
        ("count", "none", ["5"], None, 0.0),
        ("retrieval", "Paragraph 12", ["Paragraph 12"], None, 1.0),
        ("retrieval", "1 2 12 4", ["Paragraph 12"], None, 0.25),
        ("edit_similarity", "# note\n```\n  return x", ["  return y"], None, 0.9),
        ("edit_similarity", "# only comments", ["return"], None, 0.0),
        ("classification", "Other location", ["Other location"], ["Other location", "location"], 1.0),
    ],
)
def test_values_of_the_official_script(metric, prediction, references, classes, value):
    assert score(metric, prediction, references, classes, False) == pytest.approx(value, abs=1e-9)


def test_classification_keeps_the_official_loop():
    # names inside the right name are removed, the one after a removed name is not looked at
    classes = ["a", "ab", "abc"]
    assert classification("abc", "abc", classes) == 0.5
    assert classification("abc", "abc", ["ab", "x", "abc"]) == 1.0
    assert classification("", "abc", classes) == 0.0


def test_small_parts():
    assert first_code_line("\n\n// c\nx = 1\ny") == "x = 1"
    assert [length_bucket(n) for n in (3999, 4000, 7999, 8000)] == ["0-4k", "4-8k", "4-8k", "8k+"]


def test_longbench_e_scores_by_length_class(tmp_path, tiny_backbone):
    records = [record(length=n, _id=str(n)) for n in (1000, 5000, 9000)]
    bench = make(tmp_path, "qasper", records, extended=True)
    assert [s.task for s in bench.samples(tiny_backbone)] == ["qasper_e 0-4k", "qasper_e 4-8k", "qasper_e 8k+"]


def test_scale_and_mean(tmp_path, tiny_backbone):
    bench = make(tmp_path, "hotpotqa", [record()])
    (sample,) = bench.samples(tiny_backbone)
    assert bench.score(sample, "Ann") == {"f1": 100.0}
    rows = [{"task": "hotpotqa", "metrics": {"f1": 100.0}}] * 3 + [
        {"task": "lcc", "metrics": {"edit_similarity": 50.0}}
    ]
    (total,) = bench.summarise(rows)
    assert (total["metric"], total["value"]) == ("average", 75.0)


# --- golden: genuine LongBench records ---


@pytest.mark.parametrize("task", ["narrativeqa", "multi_news"])
def test_genuine_prompts_and_scores(tiny_backbone, task):
    official = json.loads(shared("longbench/config/dataset2prompt.json").read_text(encoding="utf-8"))[task]
    lengths = json.loads(shared("longbench/config/dataset2maxlen.json").read_text(encoding="utf-8"))
    bench = build_bench("longbench", tasks=(task,), data_dir=str(shared("longbench/data")), limit=3)
    samples = bench.samples(tiny_backbone)
    for sample, genuine in zip(samples, first_records(f"longbench/data/{task}.jsonl"), strict=True):
        text = official.format(**genuine)
        ids = tiny_backbone.tokenizer(text, add_special_tokens=False).input_ids
        prompt = bench.prompt(tiny_backbone, sample)
        assert sample.max_new_tokens == lengths[task]
        if not sample.truncated:
            assert sample.context + sample.question == text
            header = tiny_backbone.tokenizer("<|im_start|>user\n", add_special_tokens=False).input_ids
            assert prompt.ids[len(header) : len(header) + len(ids)] == ids
        else:
            kept = sample.context + sample.question
            half = 2 * len(kept) // 5  # characters; the cut is at half of the tokens
            assert text.startswith(kept[:half])
            assert text.endswith(kept[-half:])
        metric = task_configs()[task]["metric"]
        assert bench.score(sample, genuine["answers"][0])[metric] == pytest.approx(100, abs=1e-3)
        assert bench.score(sample, "")[metric] == 0


def test_config_texts_are_the_official_ones():
    prompts = json.loads(shared("longbench/config/dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads(shared("longbench/config/dataset2maxlen.json").read_text(encoding="utf-8"))
    for task, config in task_configs().items():
        assert (config["prompt"], config["max_new_tokens"]) == (prompts[task], lengths[task])


def test_golden_data_is_looked_for_beside_the_checkout():
    assert ROOT.parts[-2:] == ("shared", "data")
