"""Sweeps by Hydra's optional launchers: jobs run in processes that never saw `evaluate.py`, each in its own folder."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.cli import LAUNCHERS

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    *("backbone=tiny", "bench=fidelity", "bench.fidelity.contexts=[128]", "bench.fidelity.documents=1"),
    *("bench.fidelity.continuation=4", "method=[full,streaming_llm]", "budget=0.25", "plots=false"),
]


def launches() -> dict[str, list[str]]:
    """Options of each launcher, as the documentation gives them."""
    text = (ROOT / "docs" / "use_in_your_project.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python evaluate\.py (-m hydra/launcher=.*)$", text, re.MULTILINE)
    chosen = [[word for word in shlex.split(line) if "hydra" in word] for line in lines]
    return {words[0].partition("=")[2]: words for words in chosen}


def test_the_docs_show_every_launcher():
    assert set(launches()) == set(LAUNCHERS)


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_a_sweep_runs_on_a_launcher(launcher, tmp_path):
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins is None or importlib.util.find_spec(f"hydra_plugins.{LAUNCHERS[launcher]}") is None:
        pytest.skip(f"{LAUNCHERS[launcher].replace('_', '-')} is not installed: no sweep ran on {launcher}")
    options = [*launches()[launcher], *SMALL, "seed=0,1", "output_dir=out"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(ROOT / "evaluate.py"), "-m", *options]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/results.json")]
    assert sorted(content["config"]["seed"] for content in found) == [0, 1]
    assert all({row["method"] for row in content["summary"]} == {"full", "streaming_llm"} for content in found)
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "outputs"}, "a launcher leaves files elsewhere"


def test_slurm_jobs_are_prepared_but_not_sent():
    """The options that the documentation gives for a cluster exist in the plugin."""
    if importlib.util.find_spec("hydra_plugins") is None:
        pytest.skip("hydra-submitit-launcher is not installed: its options were not compared")
    config = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    known = set(config.SlurmQueueConf.__dataclass_fields__)
    given = {word.partition("=")[0].rpartition(".")[2] for word in launches()["submitit_slurm"][1:]}
    assert given and given <= known
