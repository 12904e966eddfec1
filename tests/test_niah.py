"""Needle in a haystack (G4): facts are scored, not wording; lengths are in the model's tokens; needles stand whole."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foundation_cases import SMALL

from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.base import MethodRun, build_bench
from kvcore.bench.niah import NeedleInAHaystack
from kvcore.bench.niah.haystack import NOISE, Haystack, plant
from kvcore.bench.niah.scoring import needle_recall
from kvcore.method import build_method
from kvcore.tiny import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
NEEDLE = "The special magic number for Oslo is 7312345."
TEXT = "First sentence here. Second one follows! Is this the third? The fourth ends it."


@pytest.fixture(scope="module")
def backbone():
    tiny = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    return load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32", tiny=tiny))


@pytest.mark.parametrize(
    ("prediction", "recall"),
    [
        ("The special magic number for Oslo that the text mentions is 7312345, as far as I can see.", 1.0),
        ("7312345", 1.0),
        ("7,312,345.", 1.0),
        ("It is OSLO'S number: 7312345!", 1.0),
        ("Oslo is the capital of Norway.", 0.0),
        ("731234", 0.0),
        ("", 0.0),
        (".", 0.0),
    ],
)
def test_g4_facts_count_and_wording_does_not(prediction, recall):
    assert needle_recall(prediction, ["7312345"]) == recall


def test_g4_several_facts_count_by_their_share():
    facts = ["Dolores Park", "a sandwich"]
    assert needle_recall("eat a SANDWICH in dolores park, on a sunny day", facts) == 1.0
    assert needle_recall("Eat a sandwich.", facts) == 0.5
    with pytest.raises(ValueError, match="at least one fact"):
        needle_recall("anything", [])


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_g4_the_needle_stands_whole_on_a_sentence_border_at_its_depth(depth):
    planted = plant(TEXT, NEEDLE, depth)
    before, found, after = planted.partition(NEEDLE)
    assert found
    assert not before or re.search(r"[.!?]\s$", before)
    assert f"{before.strip()} {after.strip()}".split() == TEXT.split()
    position = len(before) / len(TEXT)
    assert abs(position - depth) <= 0.15
    assert (depth > 0 or not before) and (depth < 1 or not after)


@pytest.mark.parametrize("tokens", [64, 500, 3000])
@pytest.mark.parametrize("kind", ["essay", "noise"])
def test_g4_a_haystack_is_cut_to_its_tokens(kind, tokens):
    tokenizer = byte_tokenizer()
    text = Haystack.load(kind, None).cut(tokenizer, tokens)
    assert abs(len(tokenizer(text, add_special_tokens=False).input_ids) - tokens) <= 1


@pytest.mark.parametrize("context", [500, 1000, 2000])
def test_g4_context_length_is_counted_with_the_models_tokenizer(backbone, context):
    bench = build_bench("niah", contexts=[context], depths=[0.0, 0.5, 1.0], haystacks=["essay", "noise"])
    samples = bench.samples(backbone)
    assert len(samples) == 6
    for sample in samples:
        text = sample.context.partition("\n\n")[2]
        count = len(backbone.tokenizer(text, add_special_tokens=False).input_ids)
        assert abs(count - context) <= 0.01 * context
        assert sample.context.count(f"is {sample.references[0]}.") == 1
        assert sample.context_length == context


def test_samples_are_fixed_by_the_seed(backbone):
    def drawn(seed):
        return NeedleInAHaystack(contexts=(200,), depths=(0.5,), seed=seed).samples(backbone)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    ids = [sample.id for sample in NeedleInAHaystack(contexts=(100, 200)).samples(backbone)]
    assert len(ids) == len(set(ids)) == 20


def test_the_limit_counts_samples_of_each_haystack(backbone):
    samples = NeedleInAHaystack(contexts=(100,), limit=2).samples(backbone)
    assert [sample.task for sample in samples] == ["essay", "essay", "noise", "noise"]


def test_a_folder_of_essays_serves_as_haystack(tmp_path):
    (tmp_path / "one.txt").write_text("An essay of mine. It is short.")
    assert "An essay of mine." in Haystack.load("essay", str(tmp_path)).cut(byte_tokenizer(), 100)
    assert Haystack.load("noise", None).text.startswith(NOISE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": []}, "contexts"),
        ({"contexts": [10]}, "contexts must be token counts >= 64"),
        ({"depths": [1.5]}, r"depths must lie in 0\.0\.\.1\.0"),
        ({"haystacks": ["novel"]}, "must hold 'essay' or 'noise'"),
        ({"limit": 0}, "limit must be >= 1"),
        ({"lenght": 1}, "no option 'lenght'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_bench("niah", **options)


def test_a_haystack_beyond_the_models_length_is_refused(backbone):
    sample = NeedleInAHaystack(contexts=(8192,), depths=(0.5,), haystacks=("noise",)).samples(backbone)[0]
    with pytest.raises(ValueError, match=r"was built for 8192\. Use a shorter context"):
        NeedleInAHaystack().run(backbone, sample, [MethodRun(build_method("full"), 1.0)])


@torch.inference_mode()
def test_g1_full_answers_as_plain_generate_on_the_chat_prompt(backbone):
    bench = NeedleInAHaystack(contexts=(200,), depths=(0.5,), haystacks=("noise",), max_new_tokens=8)
    sample = bench.samples(backbone)[0]
    row = bench.run(backbone, sample, [MethodRun(build_method("streaming_llm"), 1.0)])[0]
    message = [{"role": "user", "content": sample.context + sample.question}]
    chat = backbone.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = backbone.model.generate(**chat, max_new_tokens=8, do_sample=False, eos_token_id=backbone.eos_ids)
    expected = backbone.tokenizer.decode(output[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)
    assert row["prediction"] == expected
    assert row["prompt_tokens"] == chat["input_ids"].shape[1]
    assert row["device_share"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_g9_the_command_on_two_processes_gives_the_recall_of_one(tmp_path):
    """The real command, in batches: as many predictions, unique ids, equal predictions and scores."""
    arguments = [
        *(str(ROOT / "evaluate.py"), "bench=niah", "backbone=tiny", "backbone.device=cpu", "backbone.dtype=float32"),
        *("method=[full,streaming_llm]", "budget=0.3", "plots=false", "bench.niah.haystacks=[noise]"),
        *("bench.niah.contexts=[200,400]", "bench.niah.depths=[0,0.3,0.6,1]", "bench.niah.max_new_tokens=6"),
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    results = []
    for name, start, batch_size in (("one", [], 1), ("two", launch, 3)):
        command = [sys.executable, *start, *arguments, f"bench.niah.batch_size={batch_size}", f"output_dir={name}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((tmp_path / name / "results.json").read_text()))
    two = results[1]
    assert len(list((tmp_path / "two").glob("samples.*.jsonl"))) == 2
    assert max(row["batch"] for row in two["samples"]) > 1
    columns = ("id", "label", "context", "prediction", "score")
    rows = [[tuple(row[column] for column in columns) for row in each["samples"]] for each in results]
    assert rows[0] == rows[1]
    assert len(set(rows[1])) == len(rows[1]) == 16
    columns = ("task", "context", "method", "n", "value")
    values = [[tuple(row[column] for column in columns) for row in each["summary"]] for each in results]
    assert values[0] == values[1]
