"""train.py: recipes, validation before loading, a run from end to end, the router it writes, wandb modes (L1)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import train
from kvcore.attention import attach
from kvcore.bench.runner import OutputFolder
from kvcore.cli import config_dir, groups, resolved
from kvcore.tiny import build_tiny
from kvcore.tracking import LoggerConfig, Tracker
from sekv.checkpoint import load_router
from sekv.reporting import RunReporter, keep_until
from sekv.training_state import pointed

BACKBONES = groups()["backbone"]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_has_a_recipe(backbone: str) -> None:
    config = composed(f"backbone={backbone}")
    plan = train.train_plan({**resolved(config), "data": {"kind": "embedded"}})
    assert plan.backbone.name == backbone
    if backbone not in ("smollm2_135m", "tiny"):
        published = plan.train
        assert published.sequence == (8192, 16384, 32768)
        assert (published.steps, published.effective_batch, published.warmup) == (3000, 8, 0.1)
        assert (published.learning_rate, published.weight_decay) == (1e-3, 0.01)
        losses = published.losses
        assert (losses.distill, losses.zoom, losses.reconstruction, losses.budget) == (1.0, 1.0, 0.5, 0.1)
        assert (losses.rank_weight, losses.coverage, losses.positive_weight) == (0.1, 0.9, 10.0)
        assert (plan.method.window, plan.backbone.dtype, config.data.kind) == (512, "bfloat16", "hub")


@pytest.mark.parametrize("data", ["redpajama_v1", "redpajama_v2"])
def test_hub_data_is_described_before_it_is_opened(data: str) -> None:
    plan = train.train_plan(resolved(composed(f"data={data}", "data.revision=main")))
    assert plan.data.subsets


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "train.steps must be >= 1"),
        ("train.query_tokens=4096", "every length must exceed train.query_tokens"),
        ("train.mined_share=1.5", "mined_share must lie in"),
        ("train.losses.coverage=2", "coverage must lie in"),
        ("train.losses.listwise=0", "one of distill, listwise and zoom"),
        ("+train.stepz=3", r"has no option 'stepz'.*Did you mean 'steps'"),
        ("+train.losses.listwize=3", r"has no option 'listwize'.*'listwise'"),
        ("data.kind=web", "data.kind must be one of embedded, local, hub"),
        ("budget=1.5", "budget"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train.train_plan(resolved(composed(override)))


def tiny_run(folder: Path, *more: str) -> DictConfig:
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        texts = [f"{i} " + " ".join(f"word{(i * j) % 97}" for j in range(120)) for i in range(8)]
        corpus.write_text("".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts))
    data = ("data=local", f"data.path={corpus}", "data.heldout_every=4")
    small = ("train.steps=2", "train.save_every=1", "train.eval_every=2", "train.eval_samples=1")
    return composed("backbone=tiny", *data, *small, f"output_dir={folder / 'run'}", *more)


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path)
    train.train_job(config)
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    expected = {"loss/distill", "loss/zoom", "loss/budget", "effective_rank", "expansion_rate", "mass_found"}
    assert expected | {"grad_norm", "learning_rate", "skipped_documents"} <= set(steps[0])
    assert any("eval/criterion" in record for record in records)
    assert yaml.safe_load((run / "config.yaml").read_text()) == OmegaConf.to_container(config, resolve=True)
    assert "step 1/2 loss" in capsys.readouterr().out
    model, _ = build_tiny()
    model.config.backbone_id = "tiny"
    router = load_router(run / "router.safetensors", attach(model))
    best = load_router(pointed(run, "best") / "router.safetensors")
    assert torch.allclose(router.raw_tau, best.raw_tau, atol=1e-2)
    assert float(router.raw_tau.std()) > 0, "thresholds were calibrated per head"
    other, _ = build_tiny(num_hidden_layers=2)
    other.config.backbone_id = "another"
    with pytest.raises(ValueError, match=r"'tiny'.*'another'"):
        load_router(run / "router.safetensors", attach(other))
    train.train_job(config)  # the same command goes on, and finds nothing left to do
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(records)
    with pytest.raises(ValueError, match="already holds checkpoints"):
        train.train_job(tiny_run(tmp_path, "resume=false"))
    with pytest.raises(ValueError, match="seed: 0 there, 5 here"):
        train.train_job(tiny_run(tmp_path, "seed=5"))


def reported(folder: Path, tracker: Tracker) -> list[dict[str, Any]]:
    with RunReporter(2, 0, tracker) as reporter:
        for step in (1, 2):
            reporter.step({"step": step, "loss": 0.5, "seconds": 1.0, "samples": ["a#0"]})
    tracker.finish()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", ["disabled", "offline", "online without a key", "not installed"])
def test_wandb_never_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if case == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif case != "disabled":
        pytest.importorskip("wandb")
    mode = {"disabled": "disabled", "offline": "offline"}.get(case, "online")
    tracker = Tracker(LoggerConfig(mode=mode), tmp_path, {"train": {"steps": 2}}, "run")
    records = reported(tmp_path, tracker)
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["samples"] == ["a#0"]


def test_records_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    keep_until(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_second_training_into_one_folder_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "load_backbone", lambda *_: pytest.fail("the model was loaded"))
    folder = tmp_path / "run"
    first = OutputFolder(folder, main_process=True)
    with pytest.raises(ValueError, match="another run is writing to"):
        train.train_job(composed("backbone=tiny", f"output_dir={folder}"))
    first.release()
