"""Groups of samples are cut for processes; one process and two give the same rows and the same score (G9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.bench.base import Sample, build_bench
from kvcore.bench.runner import LARGEST_GROUP, _groups

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(7)]


def evaluate(folder: Path, data: Path, processes: int) -> dict:
    """Run GSM8K on the tiny backbone and read `results.json`."""
    launcher = [sys.executable, "evaluate.py"]
    if processes > 1:
        options = ["--cpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port", "0"]
        launcher.append("evaluate.py")
    command = [
        *launcher,
        "backbone=tiny",
        "bench=gsm8k",
        "bench.gsm8k.num_shots=2",
        "bench.gsm8k.max_new_tokens=4",
        "method=[full,streaming_llm]",
        "budget=0.5",
        f"data_dir={data}",
        f"output_dir={folder}",
        "plots=false",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    loaded: dict = json.loads((folder / "results.json").read_text())
    return loaded


@pytest.mark.parametrize(
    ("num_processes", "sizes"), [(1, [16, 16, 8]), (2, [16, 16, 8]), (4, [10] * 4), (40, [1] * 40)]
)
def test_a_shared_context_is_cut_into_groups(num_processes, sizes):
    samples = [(i, Sample(id=str(i), task="t", context="shared")) for i in range(40)]
    groups = list(_groups(build_bench("gsm8k"), samples, num_processes))
    assert [len(group) for group in groups] == sizes
    assert max(sizes) <= LARGEST_GROUP
    assert [sample for group in groups for sample in group] == samples


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    one, two = (evaluate(tmp_path / f"out{n}", tmp_path, n) for n in (1, 2))
    for results in (one, two):
        for method in ("full", "streaming_llm"):
            ids = [row["id"] for row in results["samples"] if row["method"] == method]
            assert len(ids) == len(set(ids)) == 7

    def scores(results):
        return {(row["method"], row["id"]): (row["prediction"], row["score"]) for row in results["samples"]}

    def summary(results):
        keys = ("method", "task", "metric", "n", "value", "ci_low", "ci_high")
        return sorted(tuple(row[key] for key in keys) for row in results["summary"])

    assert scores(one) == scores(two)
    assert summary(one) == summary(two)
