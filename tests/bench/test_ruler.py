"""RULER: lengths, wording and answers of the generated prompts, official prompt files, scorer (G2)."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from itertools import pairwise

import pytest
from shared_data import first_records, shared

from kvcore.bench.base import Sample, build_bench
from kvcore.bench.ruler.data import fragment, read_questions, singular, split_prompt, task_configs, word_list
from kvcore.bench.ruler.fit import LengthError, fit
from kvcore.bench.ruler.generate import make_growth, needle_growth, question_growth

TASKS = tuple(task_configs())
WORDS = ("Some text of our own. It has sentences! Does it? Yes, it does, and some of them are longer. " * 40).split()


def samples_of(backbone, length=4000, **options):
    bench = build_bench("ruler", contexts=(length,), qa_source="invented", source="generate", **options)
    bench.check()
    return bench, bench.samples(backbone)


@pytest.fixture(scope="module")
def generated(tiny_backbone):
    """Two samples of all 13 tasks at 4000 tokens."""
    return samples_of(tiny_backbone, limit=2)


def test_thirteen_tasks_fill_the_length_of_the_models_own_tokenizer(generated, tiny_backbone):
    bench, samples = generated
    assert {s.task.removesuffix("_invented") for s in samples} == set(TASKS)
    assert len({s.id for s in samples}) == len(samples) == 26
    for sample in samples:
        length = len(bench.prompt(tiny_backbone, sample).ids) + sample.max_new_tokens
        assert 4000 - 450 <= length <= 4000, (sample.task, length)


def test_answers_are_in_the_prompt_and_the_official_metric_gives_100(generated):
    bench, samples = generated
    for sample in samples:
        text = sample.context + sample.question
        assert sample.references
        if sample.task != "fwe":
            assert all(reference in text for reference in sample.references), sample.task
        assert bench.score(sample, " ".join(sample.references))["string_match"] == 100
        assert bench.score(sample, "")["string_match"] == 0


def test_the_context_ends_before_the_question(generated):
    for sample in generated[1]:
        assert not any(word in sample.context[-60:] for word in ("What are", "Question: Find"))
        assert sample.question.startswith(("\nWhat ", "\nQuestion: ", "\n\nAnswer the question"))
        # vt and cwe show a worked example, its question included, before the text
        needed = sample.references[0] if sample.task.startswith("niah") else None
        assert needed is None or needed in sample.context


def test_needles_stand_whole_on_sentence_borders():
    for task in ("niah_single_2", "niah_multivalue", "niah_multiquery"):
        for seed in range(20):
            draft = needle_growth(task, WORDS).build(random.Random(seed), 300)
            needles = re.findall(r"One of the special magic numbers for [\w'-]+ is: \d{7}\.", draft.context)
            assert len(needles) == (1 if task == "niah_single_2" else 4)
            parts = re.split(r"One of the special magic numbers for [\w'-]+ is: \d{7}\.", draft.context)
            for before, after in pairwise(parts):
                # the text itself is cut between words, so its end is a border too
                assert before.rstrip().endswith((".", "!", "?")) or before.endswith("\n") or not "".join(after.split())


def test_variables_form_one_chain(generated):
    for sample in (s for s in generated[1] if s.task == "vt"):
        text = sample.context.rpartition("Memorize and track")[2]
        lines = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", text)
        assert [name for name, _ in lines] == list(sample.references)
        assert lines[0][1] in sample.question
        assert [source for _, source in lines[1:]] == list(sample.references[:-1])
        assert sample.answer_prefix.startswith(" Answer: According to the chain(s)")
        assert len(re.findall(r"VAR \w{3} = ", sample.context)) == 5, "the worked example has names of 3 letters"


def test_common_words_are_the_ten_most_common(generated):
    for sample in (s for s in generated[1] if s.task == "cwe"):
        entries = re.findall(r"\d+\. ([^\d]+?)(?= \d+\. |$)", sample.context.rpartition("\n")[2])
        counts = {word: entries.count(word) for word in set(entries)}
        top = sorted(counts, key=counts.__getitem__, reverse=True)[:10]
        assert set(top) == set(sample.references)
        assert min(counts[w] for w in top) == 6, "6 and 1 below 4096 tokens, 30 and 3 above"
        assert max(c for w, c in counts.items() if w not in top) == 1


def test_coded_words_have_no_tie_at_the_third_place(generated):
    for sample in (s for s in generated[1] if s.task == "fwe"):
        words = sample.context.partition("coded words. ")[2].split()
        counts = sorted(((words.count(w), w) for w in set(words) if w != "..."), reverse=True)
        assert {w for _, w in counts[:3]} == set(sample.references)
        assert counts[2][0] > counts[3][0]
        assert words.count("...") > counts[0][0]


def test_same_seed_same_prompts_and_samples_do_not_depend_on_their_number(tiny_backbone):
    options = {"tasks": ("niah_single_1", "fwe")}
    _, one = samples_of(tiny_backbone, 1500, limit=1, **options)
    _, two = samples_of(tiny_backbone, 1500, limit=2, **options)
    _, other = samples_of(tiny_backbone, 1500, limit=1, seed=1, **options)
    assert one[0] == two[0]
    assert one[1] == two[2]
    assert other[0].context != one[0].context


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_1", "vt", "cwe", "fwe", "qa_1"])
def test_short_lengths_end_with_an_error_that_names_the_remedy(tiny_backbone, task):
    with pytest.raises(LengthError, match=rf"{task} does not fit a length of 150 tokens.*Raise bench.ruler.contexts"):
        samples_of(tiny_backbone, 150, limit=1, tasks=(task,))


@pytest.mark.parametrize("length", [700, 4095])
@pytest.mark.parametrize("task", [t for t in TASKS if not t.startswith("qa")])
def test_every_length_ends(task, length):
    def words(text):
        return len(text.split())

    growth = make_growth(task, length, words, WORDS)
    draft, units = fit(growth, "s", lambda d: words(d.context + d.question + d.answer_prefix), length)
    assert words(draft.context + draft.question + draft.answer_prefix) <= length
    assert units >= growth.least


def test_a_length_beyond_the_model_is_refused(tiny_backbone):
    with pytest.raises(ValueError, match=r"asks for 20000 tokens; tiny was built for 16384"):
        samples_of(tiny_backbone, 20000, limit=1)


def test_questions_whose_documents_do_not_fit_are_left_out(tmp_path, tiny_backbone, caplog):
    long, short = "long sentence. " * 400, "The answer is here."
    records = [
        {"question": "first?", "answer": "a", "context": [["T1", [long]]]},
        {"question": "second?", "answer": "here", "context": [["T2", [short]]]},
    ]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(records))
    bench = build_bench("ruler", contexts=(1500,), tasks=("qa_2",), data_dir=str(tmp_path))
    bench.check()
    assert [s.question[-7:] for s in bench.samples(tiny_backbone)] == ["second?"]
    assert "1 questions left out" in caplog.text


def test_own_essays_are_the_haystack(tmp_path, tiny_backbone):
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "Essay one is here. " * 30}))
    bench = build_bench("ruler", contexts=(3000,), tasks=("niah_single_2",), data_dir=str(tmp_path), limit=1)
    assert bench.samples(tiny_backbone)[0].context.count("Essay one is here.") > 100


def test_scorer_of_the_issue_threads():
    # G2: refs {'12','34'}, 'got 12': 50 on NIAH/VT/CWE/FWE, 100 on QA; empty counts 0; scale 0-100
    bench = build_bench("ruler", qa_source="invented")
    for task, config in task_configs().items():
        sample = Sample(id="x", task=task, references=("12", "34"), meta={"metric": config["metric"]})
        assert bench.score(sample, "got 12")["string_match"] == (100 if task.startswith("qa") else 50)
        assert bench.score(sample, "")["string_match"] == 0
        assert bench.score(sample, "<think>12 34</think> 12")["string_match"] == (100 if task.startswith("qa") else 50)


def test_total_is_the_plain_mean_of_the_tasks():
    bench = build_bench("ruler", qa_source="invented")
    rows = [{"task": "vt", "metrics": {"string_match": 100.0}}] * 3 + [
        {"task": "cwe", "metrics": {"string_match": 0.0}}
    ]
    (total,) = bench.summarise(rows)
    assert (total["task"], total["value"], total["n"], total["num_tasks"]) == ("all", 50.0, 4, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("niah_singel_1",)}, "Did you mean 'niah_single_1'"),
        ({"source": "web"}, "source must be one of"),
        ({"qa_source": "web"}, "qa_source must be one of"),
        ({"contexts": ()}, "contexts must be token counts"),
        ({"contexts": (0,)}, "contexts must be token counts"),
        ({"num_samples": 0}, "num_samples >= 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build_bench("ruler", **options)


def test_answer_prefix_follows_the_assistant_header(generated, tiny_backbone):
    bench, samples = generated
    for sample in samples[:4]:
        text = tiny_backbone.tokenizer.decode(bench.prompt(tiny_backbone, sample).ids)
        assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{sample.answer_prefix}")
        assert text.count("<bos>") <= 1


def test_ids_of_context_and_question_are_those_of_one_string(generated, tiny_backbone):
    tokenizer = tiny_backbone.tokenizer
    bench, samples = generated
    for sample in samples:
        one = tokenizer.apply_chat_template(
            [{"role": "user", "content": sample.context + sample.question}], tokenize=False, add_generation_prompt=True
        )
        prompt = bench.prompt(tiny_backbone, sample)
        assert prompt.ids == tokenizer(one + sample.answer_prefix, add_special_tokens=False).input_ids
        assert tokenizer.decode(prompt.context_ids).endswith(sample.context[-40:])


# --- golden: official prompt files, written by the official scripts ---


@pytest.mark.parametrize("task", [t for t in TASKS if t != "qa_2"])
def test_official_prompts_are_read_and_split_whole(task):
    for record in first_records(f"ruler/generated_cl100k/2048/{task}.jsonl"):
        draft = split_prompt(task, record)
        assert draft.context + draft.question == record["input"]
        assert draft.answer_prefix == record["answer_prefix"]
        tail = task_configs()[task]["template"].partition("{context}")[2]
        lead = {tail.partition("{")[0], singular(tail).partition("{")[0]}
        assert draft.question.startswith(tuple(lead))


def test_older_prompts_carry_the_answer_prefix_at_their_end():
    for record in first_records("ruler/kvcache_factory_mirror/4096/niah_multikey_3.jsonl"):
        draft = split_prompt("niah_multikey_3", record)
        assert draft.context + draft.question + draft.answer_prefix == record["input"]
        assert draft.answer_prefix.startswith(" The special magic uuid for ")
        assert draft.question.startswith("\nWhat is the special magic uuid for ")


@pytest.mark.parametrize("task", [t for t in TASKS if t.startswith("niah")])
def test_generated_needle_prompts_have_the_official_wording(task):
    """With its needle, text and names taken out, an official prompt and a generated one are the same string."""

    def skeleton(text):
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "#", text)
        text = re.sub(r"[a-z'é-]+-[\w'é-]+(?= (?:is|mentioned)|, |$)", "#", text)
        return re.sub(r"\d{7}", "#", text)

    official = split_prompt(task, first_records(f"ruler/generated_cl100k/4096/{task}.jsonl", 1)[0])
    ours = needle_growth(task, WORDS).build(random.Random(0), 50)
    assert skeleton(ours.question) == skeleton(official.question)
    assert skeleton(ours.answer_prefix) == skeleton(official.answer_prefix)
    assert ours.context.partition("\n")[0] == official.context.partition("\n")[0]
    needle = skeleton(fragment("needle").format(type_needle_v="@", key="#", value="#")).replace("@", r"\w+")
    assert re.search(needle.replace("#", "(#|.+)"), skeleton(official.context))


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe"])
def test_generated_aggregation_prompts_have_the_official_form(task):
    def skeleton(text):
        text = re.sub(r"\d+\. [^\d]+?(?= \d+\. |\n|$)", "W", text)
        text = re.sub(r"(?<=VAR )[A-Z]{3}\b", "abc", re.sub(r"(?<=VAR )[A-Z]{5}\b", "abcde", text))
        text = re.sub(r"(?:\b[a-z]{6}\b|\.\.\.)(?: (?:[a-z]{6}\b|\.\.\.))+", "C", text)
        text = re.sub(r"(?<=they are:  )[A-Z ]+", "names", text)
        noise = re.escape(fragment("noise"))
        return re.sub(r"(?:W ?)+", "W", re.sub(rf"(?:{noise}\n)+", "N", re.sub(r"\d{5}", "#", text)))

    official = split_prompt(task, first_records(f"ruler/generated_cl100k/4096/{task}.jsonl", 1)[0])
    ours = make_growth(task, 4096, lambda text: len(text) // 4, WORDS).build(random.Random(0), 200)
    assert skeleton(ours.question) == skeleton(official.question)
    assert skeleton(ours.answer_prefix) == skeleton(official.answer_prefix)

    def rules(text):
        # noise may or may not stand between two assignments
        return skeleton(text).replace("N", "")

    assert rules(ours.context) == rules(official.context)


@pytest.mark.parametrize(
    ("task", "file"),
    [("qa_1", "squad_dev_subset_xquad_en.json"), ("qa_2", "hotpotqa_dev_distractor_100.json")],
)
def test_generated_question_prompts_have_the_official_form(task, file):
    dataset = task_configs()[task]["args"]["dataset"]
    questions = read_questions(dataset, shared(f"qa_sources/{file}"))
    for record in first_records(f"ruler/generated_cl100k/4096/{task}.jsonl"):
        official = split_prompt(task, record)
        query = official.question.rpartition("Question: ")[2]
        own = next(q for q in questions.questions if q.query == query)
        ours = question_growth(task, questions, own).build(random.Random(0), record["input"].count("Document "))
        assert ours.question == official.question
        assert ours.answer_prefix == official.answer_prefix
        assert list(ours.references) == record["outputs"]
        documents = re.findall(r"(?m)^Document \d+:$", ours.context)
        assert documents == re.findall(r"(?m)^Document \d+:$", official.context)
        assert all(questions.documents[i] in official.context for i in own.own)


def test_official_files_run_through_data_dir(tiny_backbone):
    bench = build_bench(
        "ruler",
        contexts=(2048,),
        tasks=("fwe", "vt"),
        limit=3,
        source="files",
        data_dir=str(shared("ruler/generated_cl100k")),
    )
    bench.check()
    samples = bench.samples(tiny_backbone)
    official = first_records("ruler/generated_cl100k/2048/fwe.jsonl")
    assert [s.context + s.question for s in samples[:3]] == [r["input"] for r in official]
    assert [list(s.references) for s in samples[:3]] == [r["outputs"] for r in official]
    assert dataclasses.asdict(samples[0])["context_length"] == 2048


def test_word_lists_are_rulers():
    official = sorted(set(shared("ruler/wordlists/nounlist.txt").read_text(encoding="utf-8").split("\n")) - {""})
    assert list(word_list("noun")) == official
