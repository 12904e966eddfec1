"""Samples run together give the rows that they give alone: every method, unequal lengths, stops, shared contexts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from evaluation_cases import Toy, toy_plan

import freqdepth
import kvcore.bench.generation
import sekv
from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, Sample, build_bench
from kvcore.bench.batching import LARGEST_GROUP, SHORTEST_SHARE, batches, work_groups
from kvcore.bench.generation import greedy_answers
from kvcore.bench.runner import evaluate
from kvcore.budget import UnreachableBudgetError
from kvcore.method import build_method, method_names

REGISTERED = (sekv, freqdepth)
WORDS = ("river", "stone", "lamp", "green", "seven", "winter", "paper", "cloud", "bridge", "silver")


@pytest.fixture(scope="module")
def backbone():
    # large weights keep the two best tokens far apart, so that noise of 1e-6 changes no answer
    tiny = {"hidden_size": 48, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}
    return load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32", tiny=tiny))


def text(seed: int, characters: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(characters))[:characters]


def samples_of(lengths: Sequence[int], **fields) -> list[Sample]:
    """Samples with contexts of the given lengths (bytes, so tokens) and questions of one length."""
    return [
        Sample(id=str(i), task="a", context=text(i, n), question=f" Ask {i}?", max_new_tokens=6, **fields)
        for i, n in enumerate(lengths)
    ]


def run_of(name: str, backbone) -> MethodRun:
    """The method at the smallest of some budgets that it can meet."""
    for budget in (0.3, 0.5, 0.85, 1.0):
        try:
            run = MethodRun(build_method(name), budget)
            Toy().run(backbone, samples_of([300])[0], [run])
            return run
        except UnreachableBudgetError:
            continue
    raise AssertionError(f"{name} serves no budget")


EQUAL = ("prediction", "metrics", "new_tokens", "prompt_tokens", "references", "truncated")


def assert_same_rows(together, alone):
    for one, other in zip(together, alone, strict=True):
        for row, expected in zip(one, other, strict=True):
            assert [row[key] for key in EQUAL] == [expected[key] for key in EQUAL]
            assert set(row) == set(expected)


@pytest.mark.parametrize("compress_question", [False, True], ids=["context", "with_question"])
@pytest.mark.parametrize("name", method_names())
def test_a_batch_gives_the_rows_of_single_samples(backbone, name, compress_question):
    samples, runs = samples_of([300, 295, 297]), [run_of(name, backbone)]
    alone = [Toy(compress_question=compress_question).run(backbone, sample, runs) for sample in samples]
    bench = Toy(batch_size=3, compress_question=compress_question)
    together = bench.run_group(backbone, samples, runs)
    assert_same_rows(together, alone)
    assert {row["batch"] for rows in together for row in rows} == {3}
    for column in ("device_share", "device_bytes", "host_bytes", "attended_share"):
        of_one = [rows[0][column] for rows in alone]
        measured = together[0][0][column]
        # storages of unequal rows are as wide as the widest: a batch never looks smaller than its samples
        assert 0.99 * sum(of_one) / 3 <= measured <= 1.05 * max(of_one), column


@pytest.mark.parametrize("name", method_names())
def test_questions_on_one_context_are_answered_in_a_batch_as_alone(backbone, name, monkeypatch):
    runs = [run_of(name, backbone)]
    questions = [" Ask 1?", " Ask 2?", " A longer question, 3?", " Ask 4?"]
    samples = [
        Sample(id=str(i), task="a", context=text(0, 300), question=question, max_new_tokens=6)
        for i, question in enumerate(questions)
    ]
    alone = [Toy().run(backbone, sample, runs) for sample in samples]
    calls, whole = [], kvcore.bench.generation.prefill
    monkeypatch.setattr(kvcore.bench.generation, "prefill", lambda *a, **k: calls.append(1) or whole(*a, **k))
    together = Toy(batch_size=4).run_group(backbone, samples, runs)
    assert len(calls) == 1
    assert [rows[0]["batch"] for rows in together] == [3, 3, 1, 3]
    assert_same_rows(together, alone)


def test_prompts_without_a_context_are_batched(backbone):
    runs = [MethodRun(build_method("full"), 1.0), MethodRun(build_method("streaming_llm"), 0.5)]
    samples = [Sample(id=str(i), task="a", question=text(i, 100 - i), max_new_tokens=6, chat=False) for i in range(3)]
    together = Toy(batch_size=3).run_group(backbone, samples, runs)
    assert [row["batch"] for rows in together for row in rows] == [3] * 6
    assert_same_rows(together, [Toy().run(backbone, sample, runs) for sample in samples])


def test_each_row_of_a_batch_ends_at_its_own_end(backbone):
    run = MethodRun(build_method("full"), 1.0)
    prompts = [backbone.tokenizer(text(seed, 50 + seed)).input_ids for seed in range(3)]

    def answers(ids, **fields):
        sample = Sample(id="x", task="a", **{"max_new_tokens": 12, **fields})
        return greedy_answers(backbone, sample, ids, run.new_cache(backbone))

    free = answers(prompts)
    assert free == [answers([prompt])[0] for prompt in prompts]
    eos = free[1][4]
    ended = answers(prompts, extra_eos_ids=(eos,))
    assert len(ended[1]) < 12 and len({len(answer) for answer in ended}) > 1
    assert ended == [answers([prompt], extra_eos_ids=(eos,))[0] for prompt in prompts]
    stop = backbone.tokenizer.decode(free[2][3:5])
    stopped = answers(prompts, stop=(stop,))
    assert len(stopped[2]) <= 5
    assert stopped == [answers([prompt], stop=(stop,))[0] for prompt in prompts]
    both = {"stop": (stop,), "extra_eos_ids": (eos,), "min_new_tokens": 2}
    assert answers(prompts, **both) == [answers([prompt], **both)[0] for prompt in prompts]


def test_only_prompts_of_similar_length_and_equal_questions_and_settings_are_batched():
    samples = samples_of([100] * 6)
    lengths = [(1000, 10), (990, 10), (1000, 11), (int(1000 * SHORTEST_SHARE) - 10, 10), (995, 10), (1000, 10)]
    assert batches(samples, lengths, 8) == [[0, 1, 4, 5], [2], [3]]
    assert sorted(index for batch in batches(samples, lengths, 2) for index in batch) == list(range(6))
    assert batches(samples, lengths, 1) == [[i] for i in range(6)]
    for change in ({"chat": False}, {"max_new_tokens": 9}, {"stop": ("x",)}, {"extra_eos_ids": (3,)}):
        other = [samples[0], Sample(**{**vars(samples[1]), **change})]
        assert batches(other, [(1000, 10)] * 2, 8) == [[0], [1]]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_groups_hold_every_sample_once_and_give_every_process_a_share(num_processes):
    contexts = ["one"] * 3 + ["two", "three", "four", "five"] + ["six"] * 20
    samples = [(i, Sample(id=str(i), task="t", context=context)) for i, context in enumerate(contexts)]
    groups = work_groups(samples, num_processes, batch_size=4, lengths=[(100, 5)] * len(samples))
    assert sorted((item for group in groups for item in group), key=lambda item: item[0]) == samples
    assert max(map(len, groups)) <= LARGEST_GROUP
    singles = [group for group in groups if group[0][1].context in ("two", "three", "four", "five")]
    assert max(map(len, singles)) <= -(-4 // num_processes)
    assert len(groups) >= num_processes
    apart = work_groups(samples, share_context=False, batch_size=4, lengths=[(100, 5)] * len(samples))
    assert {len(group) for group in apart} == {4, 3}


def test_a_run_in_batches_gives_the_results_of_one_by_one_and_resumes(tmp_path):
    alone = evaluate(*toy_plan(), tmp_path / "alone")
    plan = toy_plan(bench={"toy": {"batch_size": 3}})
    together = evaluate(*plan, tmp_path / "together")
    assert max(row["batch"] for row in together["samples"]) == 3
    same = ("id", "task", "label", "prediction", "score")
    rows = [[tuple(row[key] for key in same) for row in results["samples"]] for results in (alone, together)]
    assert rows[0] == rows[1]
    stored = tmp_path / "together" / "samples.0.jsonl"
    lines = stored.read_text().splitlines()
    stored.write_text("\n".join(lines[:5]) + "\n")  # in the middle of a batch
    again = evaluate(*plan, tmp_path / "together")
    assert [tuple(row[key] for key in same) for row in again["samples"]] == rows[0]


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"bench\.niah\.batch_size must be >= 1 sample; received 0"):
        build_bench("niah", batch_size=0)
