"""The wheel (J2): built without a network, it carries conf/ and runs from any folder."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("conf", "freqdepth", "kvcore", "sekv", "train.py", "evaluate.py", "pyproject.toml", "README.md", "LICENSE")
PROGRAM = """
import json, sys
import evaluate

report = {"file": evaluate.__file__, "codes": []}
for arguments in (["--help"], ["--cfg", "job", "bench=niah"], ["method=streaming_lm"], ["budgte=1"]):
    sys.argv = ["sekv-evaluate", *arguments]
    print("###", *arguments, flush=True)
    try:
        evaluate.main()
        report["codes"].append(0)
    except SystemExit as stop:
        report["codes"].append(stop.code or 0)
print("###")
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of a copy of the sources, so that building leaves nothing in the checkout."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel without a network needs pip and setuptools in this environment")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = target.glob("*.whl")
    return path


def test_j2_the_wheel_carries_every_configuration_and_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    for package in ("kvcore", "sekv", "freqdepth"):
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
    assert expected | {"train.py", "evaluate.py"} <= names
    assert not {name for name in names if name.startswith(("tests/", "scripts/"))}


def test_j2_the_wheel_names_both_commands(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    assert "sekv-evaluate = evaluate:main" in text and "sekv-train = train:main" in text


def test_j2_the_installed_command_works_from_another_folder(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "elsewhere", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    _, shown_help, shown_config, *_, last = done.stdout.split("###")
    report = json.loads(last)
    assert report["file"] == str(tmp_path / "site" / "evaluate.py")
    assert report["codes"] == [0, 0, 2, 2]
    assert "python evaluate.py bench=niah" in shown_help
    assert "budget: 0.1" in shown_config and "contexts:" in shown_config
    assert "unknown method 'streaming_lm'. Did you mean 'streaming_llm'" in done.stderr
    assert "unknown key 'budgte'. Did you mean 'budget'" in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
