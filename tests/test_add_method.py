"""The README's guide to a new method, followed to the letter in a copy of the checkout: a file, a config, a line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("kvcore", "sekv", "freqdepth", "conf", "tests", "evaluate.py", "train.py", "pyproject.toml", "README.md")
TINY = ("backbone=tiny", "backbone.device=cpu", "backbone.dtype=float32", "plots=false", "output_dir=out")
BENCH = ("bench=niah", "bench.niah.contexts=[128]", "bench.niah.depths=[0.5]", "bench.niah.max_new_tokens=4")


def guide() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## Add a method\n")[1].split("\n## ")[0]


def method_file() -> str:
    """The guide's class; what follows it is its use."""
    code = re.findall(r"```python\n(.*?)```", guide(), re.DOTALL)[0]
    return code.split("\n\n\ncache = ")[0].rstrip() + "\n"


def config_lines(name: str) -> list[str]:
    """What step 2 says the configuration holds, in its order; the first span of code is the path."""
    step = re.findall(r"^2\. (.*?)(?=^3\. )", guide(), re.DOTALL | re.MULTILINE)[0]
    path, *lines = re.findall(r"`([^`]+)`", step)
    assert path == "conf/method/<name>.yaml"
    return [line.replace("<name>", name) for line in lines]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with the guide's method added; and the method's name."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": ignore} if (ROOT / name).is_dir() else {}))
    code = method_file()
    name = re.findall(r'name: ClassVar\[str\] = "(\w+)"', code)[0]
    class_name = re.findall(r"^class (\w+)\(Method\)", code, re.MULTILINE)[0]
    baselines = folder / "kvcore" / "baselines"
    (baselines / f"{name}.py").write_text(code)
    with (baselines / "__init__.py").open("a") as file:
        file.write(f"from kvcore.baselines.{name} import {class_name} as {class_name}\n")
    (folder / "conf" / "method" / f"{name}.yaml").write_text("\n".join(config_lines(name)) + "\n")
    return folder, name


def run(folder: Path, *arguments: str) -> str:
    """Output of a Python command in the copy, which must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_new_method_is_evaluated_beside_the_others(checkout):
    folder, name = checkout
    run(folder, "evaluate.py", *TINY, *BENCH, f"method=[full,{name}]")
    rows = json.loads((folder / "out" / "results.json").read_text())["summary"]
    assert {row["method"] for row in rows} == {"full", name}


def test_the_new_method_passes_the_contract_and_the_checks_of_its_config(checkout):
    folder, name = checkout
    files = ("tests/baselines/test_contract.py", "tests/test_configs.py", "tests/bench/test_batching.py")
    # -k: its own rows, and the checks that look at every file of conf/
    chosen = f"{name} or registered or opens_with"
    out = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert int(re.findall(r"(\d+) passed", out)[0]) >= 15
