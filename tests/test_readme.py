"""The README says what is true: its Python runs, its commands resolve, its scripts exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import evaluate
import kvcore.method
import train
from kvcore.bench.plan import evaluation_plan
from kvcore.cli import config_dir, resolved

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every fenced block of a language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, code) for page in PAGES for code in pattern.findall(page.read_text(encoding="utf-8"))]


def commands(program: str) -> list[str]:
    lines = [line.split("#")[0].strip() for _, code in blocks("bash") for line in code.splitlines()]
    return [line for line in lines if line.startswith(f"python {program}")]


def composed(command: str, config_name: str) -> dict:
    """The configuration of a command; of a sweep, that of its first job."""
    overrides = []
    for word in shlex.split(command)[2:]:
        if word.startswith("-"):
            continue
        parsed = OverridesParser.create().parse_override(word)
        if parsed.is_sweep_override():
            word = f"{parsed.key_or_group}={next(iter(parsed.sweep_string_iterator()))}"
        overrides.append(word)
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return resolved(hydra.compose(config_name, overrides))


def test_python_blocks_run_in_order_on_one_page(monkeypatch):
    # the page registers a method of its own, which other tests must not see
    monkeypatch.setattr(kvcore.method, "_registry", dict(kvcore.method._registry))
    for page in dict.fromkeys(name for name, _ in blocks("python")):
        namespace: dict = {}
        for name, code in blocks("python"):
            if name == page:
                exec(compile(code, page, "exec"), namespace)


@pytest.mark.parametrize("command", commands("evaluate.py"))
def test_evaluate_commands_resolve(command):
    plan = evaluation_plan(composed(command, "evaluate"))
    assert plan.runs
    assert plan.benches


@pytest.mark.parametrize("command", commands("train.py"))
def test_train_commands_resolve(command):
    assert train.train_plan(composed(command, "train"))


def test_scripts_named_in_the_readme_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\bscripts/[\w/]+\.(?:sh|py)\b", text))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_registries_are_filled_by_the_command():
    assert evaluate.REGISTERED
