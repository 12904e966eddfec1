"""The training loop: resume (H3), several processes, divergence, signals, checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sekv.schedule import Curriculum, budget_weight, learning_rate_factor
from sekv.trainer import DivergedError, Interrupted
from sekv.training_state import pointed
from tests.train import toy
from tests.train.toy import ListReporter, ToyObjective, toy_trainer

ROOT = Path(__file__).resolve().parents[2]
COMPARED = ("step", "loss", "loss/listwise", "learning_rate", "budget_weight", "grad_norm", "tokens", "samples")


def trained(run: Path, **options: Any) -> ListReporter:
    reporter = ListReporter()
    toy_trainer(run, reporter, **options).train()
    return reporter


def assert_same_records(first: list[dict[str, Any]], second: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    assert [r["step"] for r in first] == [r["step"] for r in second]
    for one, two in zip(first, second, strict=True):
        for name in COMPARED:
            expected = pytest.approx(two[name], rel=tolerance, abs=tolerance) if name != "samples" else two[name]
            assert one[name] == expected, (one["step"], name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
@pytest.mark.parametrize("workers", [0, 1])
def test_ten_steps_a_signal_and_ten_more_equal_twenty(tmp_path: Path, number: int, workers: int) -> None:
    whole = trained(tmp_path / "whole")
    assert len({name for record in whole.steps for name in record["samples"]}) < 4 * 20, "an epoch border is crossed"
    first = ListReporter(stop_after=10, number=number)
    with pytest.raises(Interrupted) as stopped:
        toy_trainer(tmp_path / "parts", first, workers=workers).train()
    assert stopped.value.code == 128 + number
    second = ListReporter()
    again = toy_trainer(tmp_path / "parts", second, workers=workers)
    again.resume()
    assert again.progress.step == 10
    again.train()
    assert_same_records(first.steps + second.steps, whole.steps)
    assert first.evaluations + second.evaluations == whole.evaluations


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    one = trained(tmp_path / "one")
    # on CPUs `accelerate launch --cpu --num_processes 2` starts one process only: torchrun starts both
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(Path(toy.__file__)), str(tmp_path)], check=True, env=environment, timeout=120)
    two = json.loads((tmp_path / "records.json").read_text())
    assert two["processes"] == 2
    assert_same_records(two["steps"], one.steps, tolerance=1e-5)
    for first, second in zip(two["evaluations"], one.evaluations, strict=True):
        assert first == pytest.approx(second, rel=1e-5)


def test_effective_batch_must_divide_among_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.num_processes", property(lambda self: 3))
    with pytest.raises(ValueError, match="multiple of the number of processes; received 4 and 3"):
        toy_trainer(tmp_path, ListReporter())


def test_nan_stops_and_names_step_part_and_layer(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, ListReporter(), ToyObjective(poison_step=8))
    with pytest.raises(DivergedError, match=r"step 9: loss part 'listwise' is nan in layer 1.*last good checkpoint"):
        trainer.train()
    kept = pointed(tmp_path, "last")
    assert kept.name == "step-00000007"
    assert all(bool(p.isfinite().all()) for p in trainer.objective.router.parameters())


def test_infinite_gradient_names_the_parameter(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, ListReporter())
    trainer.objective.router.log_gain.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(DivergedError, match="step 1: the gradient of log_gain is not finite"):
        trainer.train()


def test_last_and_best_are_kept_and_nothing_half_written(tmp_path: Path) -> None:
    reporter = trained(tmp_path, keep=1)
    folder = tmp_path / "checkpoints"
    best = min(reporter.evaluations, key=lambda record: record["eval/criterion"])["step"]
    assert pointed(tmp_path, "last").name == "step-00000020"
    assert pointed(tmp_path, "best").name == f"step-{best:08d}"
    assert {path.name for path in folder.glob("*")} == {"last.json", "best.json", "step-00000020", f"step-{best:08d}"}


def test_failed_write_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer(tmp_path, ListReporter(), eval_every=0)

    def full_disk(*args: Any, **kwargs: Any) -> None:
        if trainer.progress.step == 14:
            raise OSError("No space left on device")

    monkeypatch.setattr("sekv.training_state.write_tensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert pointed(tmp_path, "last").name == "step-00000007"
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))


def test_resume_refuses_other_settings_and_other_backbones(tmp_path: Path) -> None:
    trained(tmp_path, steps=2)
    other = toy_trainer(tmp_path, ListReporter(), steps=2)
    other.settings["seed"] = 1
    with pytest.raises(ValueError, match="seed: 0 there, 1 here"):
        other.resume()
    foreign = toy_trainer(tmp_path, ListReporter(), steps=2)
    foreign.spec = dataclasses.replace(toy.SPEC, backbone_id="another")
    with pytest.raises(ValueError, match=r"'toy'.*'another'"):
        foreign.resume()


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no 'last' checkpoint"):
        toy_trainer(tmp_path, ListReporter()).resume()


def test_schedules() -> None:
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[-1] < 0.001
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    weights = [budget_weight(step, 100, 0.1) for step in range(100)]
    assert weights[49] == weights[99] == pytest.approx(0.1)
    assert weights[0] == pytest.approx(0.002)
    curriculum = Curriculum((8, 16, 32), 3000, 8)
    assert [curriculum(index * 8) for index in (0, 999, 1000, 1999, 2000, 9999)] == [8, 8, 16, 16, 32, 32]


def test_optimizer_state_is_restored_exactly(tmp_path: Path) -> None:
    first = toy_trainer(tmp_path, ListReporter(), steps=3)
    first.train()
    second = toy_trainer(tmp_path, ListReporter(), steps=3)
    second.resume()
    for one, two in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(one, two)
        for key, value in first.optimizer.state[one].items():
            assert torch.equal(value, second.optimizer.state[two][key])
