"""SIGTERM and SIGKILL at random moments and at every file operation: the same command goes on, and nothing is lost.

CI runs a few moments; `--slow` a hundred of each kind and every file operation, and says where they fell.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from children import in_child, killed, operations
from evaluation_cases import toy_plan
from runs import evaluate_toy, outcome_of_training, predictions, train_toy

import kvcore.bench.results
from kvcore.bench.runner import evaluate
from sekv.training_state import pointed

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MOMENTS = [pytest.param(4, id="few"), pytest.param(100, id="hundred", marks=pytest.mark.slow)]
POINTS = [pytest.param(6, id="few"), pytest.param(None, id="all", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _left_behind_is_old(monkeypatch):
    """What a killed run was writing counts as abandoned at once."""
    monkeypatch.setattr(kvcore.bench.results, "ABANDONED_SECONDS", 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Predictions of a run that nothing disturbed, the seconds of one in a child, and its file operations."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = evaluate_toy(folder / "here")
    began = time.perf_counter()
    assert in_child(lambda: evaluate_toy(folder / "child")) == 0
    seconds = time.perf_counter() - began
    return predictions(results), seconds, operations(lambda: evaluate_toy(folder / "counted"), folder / "counted")


def report(capsys, what: str, fell: collections.Counter) -> None:
    with capsys.disabled():
        print(f"\n{what}: {fell.total()} kills ({', '.join(f'{n} {where}' for where, n in sorted(fell.items()))})")


def chosen(total: int, count: int | None) -> list[int]:
    """All of the points 1..total, or `count` spread over them."""
    return list(range(1, total + 1)) if count is None else random.Random(total).sample(range(1, total + 1), count)


# --- evaluation
def resume_evaluation(folder: Path, expected: list[tuple], status: int) -> str:
    """Run the same command again and check it; returns where the kill fell."""
    samples = folder / "samples.0.jsonl"
    lines = samples.read_text().splitlines(keepends=True) if samples.exists() else []
    finished = [line for line in lines if line.endswith("\n")]
    done = (folder / "results.json").exists()
    if done:
        json.loads((folder / "results.json").read_text())  # whole as soon as it is there
    again = evaluate_toy(folder)
    assert predictions(again) == expected
    assert samples.read_text().splitlines(keepends=True)[: len(finished)] == finished  # nothing finished ran again
    assert json.loads((folder / "results.json").read_text())["samples"] == again["samples"]
    assert {path.name for path in folder.iterdir()} <= {".lock", "results.json", "samples.0.jsonl"}
    if not (os.WIFSIGNALED(status) and not done):
        return "after the results"
    return "between samples" if finished else "before the first sample"


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_killed_evaluation_resumes_exactly(tmp_path, undisturbed, capsys, moments):
    expected, seconds, _ = undisturbed
    rng, fell = random.Random(0), collections.Counter()
    for moment in range(moments):
        folder = tmp_path / f"run{moment}"
        after = rng.uniform(0.0, 1.1 * seconds)
        status = in_child(lambda run=folder: evaluate_toy(run), after, SIGNALS[moment % 2])
        fell[resume_evaluation(folder, expected, status)] += 1
    assert fell.total() == moments
    report(capsys, "evaluation, random moments", fell)


@pytest.mark.parametrize("points", POINTS)
def test_an_evaluation_killed_at_a_file_operation_resumes_exactly(tmp_path, undisturbed, capsys, points):
    expected, _, total = undisturbed
    fell = collections.Counter()
    for point in chosen(total, points):
        folder, number = tmp_path / f"run{point}", SIGNALS[point % 2]
        status = in_child(lambda run=folder: evaluate_toy(run), None, number, point, folder)
        assert killed(status, number), point
        fell[resume_evaluation(folder, expected, status)] += 1
    report(capsys, f"evaluation, {total} file operations", fell)


# --- training and its checkpoints
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    began = time.perf_counter()
    assert in_child(lambda: train_toy(folder / "run")) == 0
    seconds = time.perf_counter() - began
    counted = operations(lambda: train_toy(folder / "counted"), folder / "counted")
    return outcome_of_training(folder / "run"), seconds, counted


def where_in_training(folder: Path) -> str:
    checkpoints = folder / "checkpoints"
    if list(checkpoints.glob(".*")):
        return "in a checkpoint"
    if not (checkpoints / "last.json").exists():
        return "before the first checkpoint"
    # whole as soon as it is named
    assert (pointed(folder, "last") / "router.safetensors").exists()
    return "between checkpoints"


def resume_training(folder: Path, trained) -> None:
    (expected, weights), _, _ = trained
    train_toy(folder)
    record, found = outcome_of_training(folder)
    assert record == expected
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_killed_training_resumes_exactly(tmp_path, trained, capsys, moments):
    rng, fell = random.Random(0), collections.Counter()
    for moment in range(moments // 2):
        folder = tmp_path / f"run{moment}"
        for _ in range(2):  # killed twice
            in_child(lambda run=folder: train_toy(run), rng.uniform(0.0, 0.8 * trained[1]), rng.choice(SIGNALS))
            fell[where_in_training(folder)] += 1
        resume_training(folder, trained)
    report(capsys, "training, random moments", fell)


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_training_killed_while_it_writes_a_checkpoint_resumes_exactly(tmp_path, trained, capsys, moments):
    """The kill comes a random time after a checkpoint's folder has appeared."""
    rng, fell = random.Random(0), collections.Counter()
    for moment in range(moments):
        folder = tmp_path / f"run{moment}"
        wanted, delay = rng.randrange(1, 12), rng.uniform(0.0, 0.006)
        # the signal is sent by a child of its own, so that it comes while the write goes on
        in_child(lambda run=folder, n=wanted, d=delay: train_toy_killed_in_checkpoint(run, n, d))
        fell[where_in_training(folder)] += 1
        resume_training(folder, trained)
    report(capsys, "checkpoint writing, random moments", fell)
    assert moments < 100 or fell["in a checkpoint"] >= 25  # a few may all miss on a busy machine


def train_toy_killed_in_checkpoint(run: Path, wanted: int, delay: float) -> None:
    """Train and be killed `delay` seconds after the `wanted`-th checkpoint was begun."""
    import sekv.trainer

    whole, begun = sekv.trainer.save_checkpoint, []

    def watched(*arguments):
        begun.append(1)
        if len(begun) == wanted:
            victim = os.getpid()
            if os.fork() == 0:
                time.sleep(delay)
                os.kill(victim, signal.SIGKILL)
                os._exit(0)
        return whole(*arguments)

    sekv.trainer.save_checkpoint = watched
    train_toy(run)


@pytest.mark.parametrize("points", POINTS)
def test_a_training_killed_at_a_file_operation_resumes_exactly(tmp_path, trained, capsys, points):
    fell = collections.Counter()
    for point in chosen(trained[2], points):
        folder = tmp_path / f"run{point}"
        status = in_child(lambda run=folder: train_toy(run), None, signal.SIGKILL, point, folder)
        assert killed(status, signal.SIGKILL), point
        fell[where_in_training(folder)] += 1
        resume_training(folder, trained)
    report(capsys, f"training, {trained[2]} file operations", fell)


def test_a_kill_between_the_two_pointers_loses_no_best_checkpoint(tmp_path, trained, monkeypatch):
    """The last checkpoint is the best one, and the run is killed before it says so: there is no later step."""
    import sekv.trainer

    point_to = sekv.trainer.point_to

    def killed_there(run, pointer, target):
        if pointer == "best" and target.name == "step-00000020":
            os.kill(os.getpid(), signal.SIGKILL)
        point_to(run, pointer, target)

    with monkeypatch.context() as patch:
        patch.setattr(sekv.trainer, "point_to", killed_there)
        assert killed(in_child(lambda: train_toy(tmp_path)), signal.SIGKILL)
    assert pointed(tmp_path, "last").name == "step-00000020" != pointed(tmp_path, "best").name
    resume_training(tmp_path, trained)


def test_evaluations_leave_the_files_of_others_alone(tmp_path, monkeypatch):
    """Only what was abandoned is cleared away: a young unfinished file may be another process's."""
    monkeypatch.setattr(kvcore.bench.results, "ABANDONED_SECONDS", 60)
    young, old = tmp_path / ".results.json-a.unfinished", tmp_path / ".results.json-b.unfinished"
    for path in (young, old):
        path.write_text("{")
    os.utime(old, (0, 0))
    evaluate(*toy_plan(limit=1), tmp_path)
    assert young.exists() and not old.exists()
