"""G7, models that think: a budget of its own for the thoughts, and no thought in what is scored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from evaluation_cases import Toy
from test_chat import QWEN3
from transformers import LogitsProcessor, LogitsProcessorList

from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, Sample, build_bench
from kvcore.bench.stopping import answer_after_thinking
from kvcore.bench.truncation import prompt_room
from kvcore.method import build_method

THOUGHTS = "<think>\nIs it 1234567?\nQuestion: or 89?\n</think>\n\n"


class Script(LogitsProcessor):
    """Makes every row say a text of its own, then the end of a turn."""

    def __init__(self, tokenizer, texts: list[str], prompt_tokens: int) -> None:
        self.ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids, scores):
        at = input_ids.shape[1] - self.prompt_tokens
        forced = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(self.ids):
            forced[row, ids[min(at, len(ids) - 1)]] = 0.0
        return forced


@pytest.fixture
def thinker(monkeypatch):
    """A tiny backbone with Qwen3's template; `says(texts)` decides what its rows generate."""
    tiny = {"model_type": "qwen3", "max_position_embeddings": 1024}
    options = {"device": "cpu", "dtype": "float32", "tiny": tiny, "enable_thinking": True, "thinking_tokens": 80}
    backbone = load_backbone(BackboneConfig(name="tiny", path="tiny", **options))
    backbone.tokenizer.chat_template = QWEN3
    whole = backbone.model.generate

    def says(*texts):
        def generate(input_ids, **kwargs):
            script = Script(backbone.tokenizer, list(texts), input_ids.shape[1])
            return whole(input_ids=input_ids, logits_processor=LogitsProcessorList([script]), **kwargs)

        monkeypatch.setattr(backbone.model, "generate", generate)

    backbone.says = says
    return backbone


def rows(backbone, count: int = 1, **fields):
    runs = [MethodRun(build_method("full"), 1.0)]
    sample = Sample(id="x", task="a", context="Some context.", question=" What?", **{"max_new_tokens": 8, **fields})
    samples = [dataclasses.replace(sample, id=str(i), context=f"Some context {i}.") for i in range(count)]
    return [of_sample[0] for of_sample in Toy(batch_size=count).run_group(backbone, samples, runs)]


def test_the_answer_after_the_thoughts_is_what_counts(thinker):
    thinker.says(THOUGHTS + "42")
    row = rows(thinker)[0]
    assert row["prediction"] == "42"
    assert row["metrics"] == {"letters": 0.0}
    assert row["thinking"]
    assert row["new_tokens"] == len(THOUGHTS) + 3  # the end of the turn included


def test_the_answer_keeps_the_tasks_own_length(thinker):
    thinker.says(THOUGHTS + "42 and very many more words")
    row = rows(thinker)[0]
    assert row["prediction"] == "42 and v"
    assert row["new_tokens"] == len(THOUGHTS) + 8


def test_stops_of_the_task_end_the_answer_and_not_the_thoughts(thinker):
    thinker.says(THOUGHTS + "4\n2Question: x")
    assert rows(thinker, max_new_tokens=20, stop=("Question:",))[0]["prediction"] == "4\n2Question:"
    assert rows(thinker, max_new_tokens=20, stop=("\n",))[0]["prediction"] == "4\n"
    newline = thinker.tokenizer("\n").input_ids[0]
    assert rows(thinker, max_new_tokens=20, extra_eos_ids=(newline,))[0]["prediction"] == "4\n2Question: x"


def test_thoughts_that_do_not_end_are_no_answer(thinker):
    thinker.says("<think>" + "7" * 500)
    row = rows(thinker)[0]
    assert row["prediction"] == ""
    assert row["new_tokens"] == 80 + 8


def test_an_answer_without_thoughts_keeps_its_length(thinker):
    thinker.says("forty-two and more")
    assert rows(thinker)[0]["prediction"] == "forty-tw"


def test_rows_of_a_batch_think_for_different_times(thinker):
    thinker.says(THOUGHTS + "42", "<think>\n</think>\n\na long answer", "no thought")
    assert [row["prediction"] for row in rows(thinker, 3)] == ["42", "a long a", "no thoug"]


def test_without_thinking_nothing_is_added_or_dropped(thinker):
    thinker.config = dataclasses.replace(thinker.config, enable_thinking=False)
    thinker.says("<think>" + "7" * 50)
    row = rows(thinker)[0]
    assert row["prediction"] == "<think>7"
    assert not row["thinking"]


def test_a_prompt_without_the_chat_template_does_not_think(thinker):
    thinker.says("<think>" + "7" * 50)
    assert rows(thinker, chat=False)[0]["prediction"] == "<think>7"


def test_the_room_for_thoughts_counts_against_the_models_length(thinker):
    sample = Sample(id="x", task="a", context="x" * 920, question="?", max_new_tokens=8)
    with pytest.raises(ValueError, match="88 are to be generated"):
        Toy().prompt(thinker, sample)
    with_thoughts = prompt_room(thinker, 8, chat=True)
    assert prompt_room(thinker, 8, chat=False) > with_thoughts
    thinker.config = dataclasses.replace(thinker.config, thinking_tokens=100)
    assert prompt_room(thinker, 8, chat=True) == with_thoughts - 20


def test_an_answer_prefix_does_not_stand_before_the_thoughts(thinker):
    sample = Sample(id="x", task="a", context="x", question="?", answer_prefix=" The answer is", max_new_tokens=8)
    assert thinker.tokenizer.decode(Toy().prompt(thinker, sample).ids).endswith("assistant\n")
    thinker.config = dataclasses.replace(thinker.config, enable_thinking=False)
    assert thinker.tokenizer.decode(Toy().prompt(thinker, sample).ids).endswith("</think>\n\n The answer is")


def test_a_needle_named_only_in_the_thoughts_is_not_found(thinker):
    bench = build_bench("niah", contexts=(200,), depths=(0.5,), haystacks=("noise",))
    sample = bench.samples(thinker)[0]
    number = sample.references[0]
    runs = [MethodRun(build_method("full"), 1.0)]
    thinker.says(f"<think>{number}</think>\n\nno idea")
    assert bench.run(thinker, sample, runs)[0]["metrics"] == {"recall": 0.0}
    thinker.says(f"<think>?</think>\n\n{number}")
    assert bench.run(thinker, sample, runs)[0]["metrics"] == {"recall": 1.0}


@pytest.mark.parametrize("text", ["", "\n", "<", "<thi", "<think>", "<think>\nso", "<think>a</thi"])
def test_marks_that_are_not_whole_are_no_answer(text):
    assert answer_after_thinking(text) == ""


def test_a_budget_for_thoughts_below_one_token_is_refused():
    with pytest.raises(ValueError, match=r"backbone\.thinking_tokens must be >= 1 token; received 0"):
        BackboneConfig(name="tiny", path="tiny", thinking_tokens=0)
