"""The real commands, two at a time: sweeps into one root, and evaluations into one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METHODS, DOCUMENTS = ("full", "streaming_llm", "snapkv"), 4
SMALL = [
    *("backbone=tiny", "bench=fidelity", "bench.fidelity.contexts=[256]", f"bench.fidelity.documents={DOCUMENTS}"),
    *("bench.fidelity.continuation=8", f"method=[{','.join(METHODS)}]", "budget=0.25", "plots=false"),
]


def at_once(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and stderr of two equal commands that start together."""
    command = [sys.executable, str(ROOT / "evaluate.py"), *arguments, *SMALL]
    started = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=600)[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def check_ends(ends: list[tuple[int, str]]) -> None:
    """One at least has done everything; the other as well, or it was told in one message that the folder is in use."""
    assert 0 in [code for code, _ in ends], ends
    for code, error in ends:
        told = [line for line in error.splitlines() if line.startswith("error: another run is writing to ")]
        assert (code, len(told)) in ((0, 0), (2, 1)), error
        assert "Traceback" not in error


def check_whole(folder: Path, seed: int) -> None:
    """Every document of every method is there once, and summed up."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["config"]["seed"] == seed
    found = [(row["label"], row["id"]) for row in results["samples"]]
    assert len(found) == len(set(found)) == len(METHODS) * DOCUMENTS
    assert {label for label, _ in found} == {row["method"] for row in results["summary"]} == set(METHODS)
    lines = (folder / "samples.0.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(found) and all(json.loads(line) for line in lines)


@pytest.mark.slow
def test_two_sweeps_into_one_root_leave_every_job_whole(tmp_path):
    check_ends(at_once(tmp_path, "-m", "seed=0,1", "output_dir=out"))
    found = sorted((tmp_path / "out").glob("*/results.json"))
    seeds = [json.loads(path.read_text(encoding="utf-8"))["config"]["seed"] for path in found]
    assert sorted(seeds) == [0, 1]
    for path, seed in zip(found, seeds, strict=True):
        check_whole(path.parent, seed)


@pytest.mark.slow
def test_two_evaluations_into_one_folder_leave_it_whole(tmp_path):
    check_ends(at_once(tmp_path, "seed=3", "output_dir=out"))
    check_whole(tmp_path / "out", 3)
