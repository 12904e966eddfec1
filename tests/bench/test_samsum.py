"""SAMSum: few-shot prompt filled to a length, stop at a line end, ROUGE-L with empty predictions counted (G6)."""

from __future__ import annotations

import json

import pytest

from kvcore.bench.base import build_bench
from kvcore.bench.longbench.data import task_configs
from kvcore.bench.samsum.data import prompts


def make(tmp_path, **options):
    train = [{"id": str(i), "dialogue": f"Ann: hi {i}\r\nBob: bye", "summary": f"They talk\n {i}."} for i in range(200)]
    test = [{"id": f"t{i}", "dialogue": "Ann: cookies?\nBob: yes", "summary": "Ann baked cookies."} for i in range(3)]
    for name, records in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    bench = build_bench("samsum", data_dir=str(tmp_path), **options)
    bench.check()
    return bench


def test_prompt(tmp_path, tiny_backbone):
    samples = make(tmp_path, context=1000).samples(tiny_backbone)
    assert len({s.context for s in samples}) == 1
    context = samples[0].context
    assert 900 <= len(context) <= 1000
    assert context.startswith(prompts()["header"] + "Dialogue: Ann: hi 0\nBob: bye\nSummary: They talk 0.\n\nDialogue:")
    assert samples[0].question == "Dialogue: Ann: cookies?\nBob: yes\nSummary: "
    assert samples[0].task == f"samsum_{context.count('Summary: ')}shot"
    assert samples[0].stop == ("\n",)
    assert samples[0].context_length == 1000
    assert task_configs()["samsum"]["prompt"].startswith(prompts()["header"])


def test_scores(tmp_path, tiny_backbone):
    bench = make(tmp_path, context=500)
    sample = bench.samples(tiny_backbone)[0]
    predictions = ["", ".", "Ann baked cookies.", " Ann baked cookies.\nDialogue: x", "Ann bakes cookies"]
    scores = [bench.score(sample, text)["rouge_l"] for text in predictions]
    assert scores == pytest.approx([0, 0, 100, 100, 100])
    plain = make(tmp_path, context=500, stem=False)
    assert plain.score(sample, "Ann bakes cookies")["rouge_l"] == pytest.approx(200 / 3)


def test_a_context_beyond_the_model_is_refused(tmp_path, tiny_backbone):
    with pytest.raises(ValueError, match=r"context is 16384 tokens; tiny has room for \d+"):
        make(tmp_path, context=16384).samples(tiny_backbone)
