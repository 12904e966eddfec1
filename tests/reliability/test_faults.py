"""Kills, full disks, damaged files, memory that runs out: a clear error or an exact resume, and nothing lost.

Runs that are killed are forked children of this process, so that a moment costs a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from evaluation_cases import Calls, toy_plan
from foundation_cases import SMALL, feed, new_cache, token_ids
from omegaconf import OmegaConf

import kvcore.bench.results
import kvcore.cache
import kvcore.fanout
from kvcore.attention import attach, prefill
from kvcore.bench.runner import evaluate
from kvcore.cli import explained, guard
from kvcore.memory import PromptMemoryError, is_out_of_memory
from kvcore.tiny import build_tiny
from sekv import SeKV
from sekv.checkpoint import load_router, router_config, save_router
from sekv.routing import Router
from sekv.training_state import pointed
from tests.train.toy import ListReporter, toy_trainer

MOMENTS = 4  # in CI; 100 under the slow marker


def in_child(work: Callable[[], object], kill_after: float | None = None, number: int = signal.SIGKILL) -> int:
    """Run `work` in a forked child, killed after so many seconds; returns the wait status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # pytest's own streams and handlers are no part of the program
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends soon
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, number)
    return os.waitpid(child, 0)[1]


def predictions(results: dict) -> list[tuple]:
    return [(r["id"], r["label"], r["budget"], r["prediction"], r["metrics"]) for r in results["samples"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of a run that nothing disturbed, and the seconds of one in a child."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = evaluate(*toy_plan(), folder / "here")
    began = time.perf_counter()
    assert in_child(lambda: evaluate(*toy_plan(), folder / "child")) == 0
    return predictions(results), time.perf_counter() - began


def kill_and_resume_evaluation(folder: Path, undisturbed, moment: int) -> None:
    expected, seconds = undisturbed
    rng = random.Random(moment)
    number = (signal.SIGKILL, signal.SIGTERM)[moment % 2]
    in_child(lambda: evaluate(*toy_plan(), folder), rng.uniform(0.0, 1.1 * seconds), number)
    samples = folder / "samples.0.jsonl"
    finished = (
        [line for line in samples.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if samples.exists()
        else []
    )
    again = evaluate(*toy_plan(), folder)
    assert predictions(again) == expected
    kept = samples.read_text().splitlines(keepends=True)
    assert kept[: len(finished)] == finished  # nothing finished ran again
    assert json.loads((folder / "results.json").read_text())["samples"] == again["samples"]
    assert {path.name for path in folder.iterdir()} <= {".lock", "results.json", "samples.0.jsonl"}


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_killed_evaluation_resumes_exactly(tmp_path, undisturbed, moment):
    kill_and_resume_evaluation(tmp_path / "run", undisturbed, moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(100, 200))
def test_a_killed_evaluation_resumes_exactly_at_a_hundred_moments(tmp_path, undisturbed, moment):
    kill_and_resume_evaluation(tmp_path / "run", undisturbed, moment)


def train_toy(run: Path) -> None:
    trainer = toy_trainer(run, ListReporter(), save_every=2)
    if (run / "checkpoints" / "last.json").is_file():
        trainer.resume()
    trainer.train()


def outcome_of_training(run: Path) -> tuple[dict, dict]:
    folder = pointed(run, "last")
    record = json.loads((folder / "trainer.json").read_text())
    best = pointed(run, "best").name
    return {**record, "seconds": None, "pointed": (folder.name, best)}, load_router(
        folder / "router.safetensors"
    ).state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    began = time.perf_counter()
    assert in_child(lambda: train_toy(folder)) == 0
    return outcome_of_training(folder), time.perf_counter() - began


def kill_and_resume_training(folder: Path, trained, moment: int) -> None:
    (expected, weights), seconds = trained
    rng = random.Random(moment)
    for _ in range(2):  # killed twice
        number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        in_child(lambda: train_toy(folder), rng.uniform(0.0, 0.8 * seconds), number)
    train_toy(folder)
    record, found = outcome_of_training(folder)
    assert record == expected
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not list((folder / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_killed_training_resumes_exactly(tmp_path, trained, moment):
    kill_and_resume_training(tmp_path / "run", trained, moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(100, 200))
def test_a_killed_training_resumes_exactly_at_a_hundred_moments(tmp_path, trained, moment):
    kill_and_resume_training(tmp_path / "run", trained, moment)


# --- a disk that is full: the kernel refuses to let files grow beyond a limit
def limited(work: Callable[[], object], size: int) -> Callable[[], object]:
    def run() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return guard(lambda _: work())(OmegaConf.create({}))

    return run


@pytest.mark.parametrize("size", [1, 1000, 6000])
def test_a_disk_that_is_full_during_an_evaluation_loses_nothing(tmp_path, undisturbed, size):
    status = in_child(limited(lambda: evaluate(*toy_plan(), tmp_path), size))
    assert os.waitstatus_to_exitcode(status) == 2  # one message, see test_what_is_told_about_a_full_disk
    assert not (tmp_path / "results.json").exists()
    assert predictions(evaluate(*toy_plan(), tmp_path)) == undisturbed[0]


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
    status = in_child(limited(lambda: train_toy(run), 600))
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
        assert predictions(results) == undisturbed[0], cut
        lost = 14 - whole[:cut].count(b"\n")
        assert len(calls.ran) in (lost, lost - 1), cut  # without its newline a row may still be whole


# --- memory
OUT_OF_MEMORY = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you tried"),
    "host": MemoryError(),
}
LEVERS = ("prefill_chunk", "batch_size", "host", "shorter context")


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("chunk", [None, 8])
def test_memory_that_runs_out_in_prefill_names_the_levers(monkeypatch, kind, chunk):
    model = build_tiny(**SMALL)[0]
    cache, ids, whole, calls = (
        new_cache(model, "streaming_llm", 0.5),
        token_ids(1, 30),
        kvcore.cache.prefill_attention,
        [],
    )

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OUT_OF_MEMORY[kind]
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.cache, "prefill_attention", full)
        with pytest.raises(PromptMemoryError, match="'streaming_llm' read a prompt of 1 x 30 tokens") as caught:
            prefill(model, cache, ids, chunk_size=chunk)
    assert all(lever in str(caught.value) for lever in LEVERS)
    assert not cache._staged, "the prompt's keys and values are let go"
    with pytest.raises(RuntimeError, match=r"failed half-way.*reset\(\)"):
        prefill(model, cache, ids)
    cache.reset()
    fresh = new_cache(model, "streaming_llm", 0.5)
    assert torch.equal(prefill(model, cache, ids), prefill(model, fresh, ids))


def test_other_errors_of_a_prefill_stay_what_they_are(monkeypatch):
    model = build_tiny(**SMALL)[0]

    def broken(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(kvcore.cache, "prefill_attention", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        prefill(model, new_cache(model), token_ids(1, 5))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_memory_that_runs_out_in_an_evaluation_is_one_message_and_keeps_what_is_finished(
    tmp_path, monkeypatch, capsys, undisturbed
):
    whole, calls = kvcore.fanout.prefill_attention, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 4:  # the third sample of a model of two layers
            raise OUT_OF_MEMORY["device"]
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.fanout, "prefill_attention", full)
        with pytest.raises(SystemExit) as stop:
            guard(lambda _: evaluate(*toy_plan(), tmp_path))(OmegaConf.create({}))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in err
    assert "out of memory" in err and all(lever in err for lever in LEVERS)
    with monkeypatch.context() as patch:
        ran = Calls(patch)
        assert predictions(evaluate(*toy_plan(), tmp_path)) == undisturbed[0]
    assert len(ran.ran) == 10


def test_a_decode_step_that_fails_half_way_spoils_the_cache_and_says_so():
    model = build_tiny(**SMALL)[0]
    cache = new_cache(model)
    prefill(model, cache, token_ids(1, 10))

    def broken(*_):
        raise OSError("broken")

    handle = model.model.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(OSError, match="broken"):
        feed(model, cache, token_ids(1, 1))
    handle.remove()
    with pytest.raises(RuntimeError, match="failed half-way"):
        feed(model, cache, token_ids(1, 1))


def test_what_is_told_about_memory():
    assert "prefill_chunk" in explained(OUT_OF_MEMORY["cpu"])
