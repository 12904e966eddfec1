"""Full disks and damaged files: one clear message, or a run that goes on; finished work stays.

Kills are in `test_kills.py`, downloads in `test_fetch_faults.py`, data files in `test_prompts.py`.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from children import in_child, on_a_full_disk
from evaluation_cases import Calls, toy_plan
from omegaconf import OmegaConf
from runs import evaluate_toy, outcome_of_training, predictions, train_toy

import kvcore.bench.results
from kvcore.attention import attach
from kvcore.bench.runner import evaluate
from kvcore.cli import explained, guard
from kvcore.tiny import build_tiny
from sekv import SeKV
from sekv.checkpoint import router_config, save_router
from sekv.routing import Router
from sekv.training_state import pointed
from tests.train.toy import ListReporter, toy_trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Predictions of a run that nothing disturbed."""
    return predictions(evaluate_toy(tmp_path_factory.mktemp("undisturbed")))


# --- a disk that is full: the kernel refuses to let files grow beyond a limit
@pytest.mark.parametrize("size", [1, 1000, 6000])
def test_a_disk_that_is_full_during_an_evaluation_loses_nothing(tmp_path, undisturbed, size):
    status = in_child(on_a_full_disk(lambda: evaluate_toy(tmp_path), size))
    assert os.waitstatus_to_exitcode(status) == 2  # one message, see test_what_is_told_about_a_full_disk
    assert not (tmp_path / "results.json").exists()
    assert predictions(evaluate(*toy_plan(), tmp_path)) == undisturbed


def test_a_disk_that_is_full_when_results_are_written_keeps_the_old_ones(tmp_path, monkeypatch, capsys):
    evaluate(*toy_plan(limit=2), tmp_path)
    before = (tmp_path / "results.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.bench.results.os, "replace", full)
        with pytest.raises(SystemExit) as stop:
            guard(lambda _: evaluate(*toy_plan(limit=2), tmp_path))(OmegaConf.create({}))
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert "No space left on device" in err and "run the same command again to resume" in err
    assert (tmp_path / "results.json").read_bytes() == before
    assert not list(tmp_path.glob(".results.json-*"))


def test_a_disk_that_is_full_during_a_checkpoint_keeps_the_last_one(tmp_path):
    train_toy(tmp_path / "whole")
    run = tmp_path / "run"
    trainer = toy_trainer(run, ListReporter(stop_after=4), save_every=2)
    with pytest.raises(SystemExit):
        trainer.train()
    last = pointed(run, "last").name
    status = in_child(on_a_full_disk(lambda: train_toy(run), 600))
    assert os.waitstatus_to_exitcode(status) == 2
    assert pointed(run, "last").name == last and not list((run / "checkpoints").glob(".writing-*"))
    train_toy(run)
    (record, found), (expected, weights) = outcome_of_training(run), outcome_of_training(tmp_path / "whole")
    assert record == expected and all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_is_told_about_a_full_disk():
    message = explained(OSError(28, "No space left on device", "/data/out/samples.0.jsonl"))
    for part in ("/data/out/samples.0.jsonl", "No space left", "finished before is kept", "resume"):
        assert part in message
    assert explained(KeyError("ours")) is None


# --- damaged files
DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "noise": lambda data: bytes(random.Random(0).randrange(256) for _ in range(len(data))),
    "zeros": lambda data: bytes(len(data)),
    "other json": lambda data: b'{"a": 1}',
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    run = tmp_path_factory.mktemp("stopped")
    with pytest.raises(SystemExit):
        toy_trainer(run, ListReporter(stop_after=4), save_every=2).train()
    return run


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["last.json", "trainer.json", "router.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(stopped, tmp_path, file, damage):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = run / "checkpoints" / file if file == "last.json" else pointed(run, "last") / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    trainer = toy_trainer(run, ListReporter())
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        trainer.resume()
    assert str(path) in str(caught.value) or (damage == "other json" and str(path.parent) in str(caught.value))
    assert any(word in str(caught.value) for word in ("train", "new run", "copy", "write")), caught.value


@pytest.fixture(scope="module")
def router_file(tmp_path_factory):
    model = build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=2)[0]
    path = tmp_path_factory.mktemp("router") / "router.safetensors"
    save_router(Router(router_config(attach(model), **SeKV().router_form())), path, "")
    return model, path


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_router_is_named_with_the_remedy(router_file, tmp_path, damage):
    model, whole = router_file
    path = tmp_path / "router.safetensors"
    path.write_bytes(DAMAGE[damage](whole.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path}.*checkpoint=none"):
        SeKV(checkpoint=str(path)).new_cache(model, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_router_with_nan_is_named_with_the_tensor(router_file, tmp_path, value):
    model, _ = router_file
    router = Router(router_config(attach(model), **SeKV().router_form()))
    with torch.no_grad():
        router.raw_tau[0] = value
    save_router(router, tmp_path / "router.safetensors", "")
    with pytest.raises(ValueError, match=r"router\.safetensors: tensor 'raw_tau' holds NaN or infinite"):
        SeKV(checkpoint=str(tmp_path / "router.safetensors")).new_cache(model, 0.5)


def test_sample_files_cut_anywhere_run_only_what_is_lost(tmp_path, undisturbed, monkeypatch):
    evaluate(*toy_plan(), tmp_path / "whole")
    whole = (tmp_path / "whole" / "samples.0.jsonl").read_bytes()
    rng = random.Random(0)
    cuts = [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(5))]
    tails = (b"", b"\0" * 64, b"\xff\xfe{", b'{"key": "k"}\n', b"[]\n", b"3\n")
    for number, cut in enumerate(cuts):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        (folder / "samples.0.jsonl").write_bytes(whole[:cut] + tails[number % len(tails)])
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            results = evaluate(*toy_plan(), folder)
        assert predictions(results) == undisturbed, cut
        lost = 14 - whole[:cut].count(b"\n")
        assert len(calls.ran) in (lost, lost - 1), cut  # without its newline a row may still be whole
