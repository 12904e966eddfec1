"""The paper's backbone without its weights: every configuration resolves, and RULER runs on a tiny one of its make."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from foundation_cases import run_main
from test_chat import LLAMA3

import evaluate
from kvcore.bench.plan import evaluation_plan
from kvcore.cli import groups
from kvcore.tiny import build_tiny

# what sets Llama 3.1 apart: grouped heads, scaled RoPE, several ends of a turn
LLAMA31 = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 131072,
    "eos_token_id": [2, 4],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture
def folder(tmp_path):
    """A random checkpoint of the architecture with a byte tokenizer and the family's chat template."""
    model, tokenizer = build_tiny(**LLAMA31)
    tokenizer.chat_template = LLAMA3
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("bench", groups()["bench"])
def test_the_configuration_of_every_bench_resolves(monkeypatch, capsys, bench):
    arguments = ("--cfg", "job", "--resolve", f"bench={bench}", "backbone=llama31_8b")
    code, out, err = run_main(monkeypatch, capsys, evaluate.main, *arguments)
    assert code == 0, err
    plan = evaluation_plan(yaml.safe_load(out))
    assert [one.name for one in plan.benches] == [bench]
    assert plan.backbone.path == "meta-llama/Llama-3.1-8B-Instruct"


def test_ruler_runs_on_the_papers_backbone(monkeypatch, capsys, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    arguments = (
        *("bench=ruler", "backbone=llama31_8b", f"backbone.path={folder}", "backbone.device=cpu"),
        *("method=[full,streaming_llm]", "budget=0.1", "limit=1", "plots=false", "output_dir=out"),
        *("bench.ruler.qa_source=invented", "bench.ruler.contexts=[8192]"),
    )
    code, _, err = run_main(monkeypatch, capsys, evaluate.main, *arguments)
    assert code == 0, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = results["samples"]
    assert len({row["task"] for row in rows}) == 13
    assert len(rows) == 26
    assert all(math.isfinite(row["score"]) and row["new_tokens"] >= 1 for row in rows)
    assert all(row["prompt_tokens"] <= 8192 for row in rows)
    assert max(row["device_share"] for row in rows if row["label"] == "streaming_llm") <= 0.102
    assert [row["num_tasks"] for row in results["summary"] if row["task"] == "all"] == [13, 13]
