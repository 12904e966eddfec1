"""README and docs say what is true: their Python runs, their commands resolve, what they name exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from script_cases import load_script

import evaluate
import kvcore.bench.base
import kvcore.method
import train
from kvcore.bench.plan import evaluation_plan
from kvcore.cli import config_dir, resolved

ROOT = Path(__file__).resolve().parent.parent
QUICK = "run_quick_experiments.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every fenced block of a language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, code) for page in PAGES for code in pattern.findall(page.read_text(encoding="utf-8"))]


def commands(program: str) -> list[str]:
    """Every command of the pages, and of the script that the first of them names."""
    lines = [line.split("#")[0].strip() for _, code in blocks("bash") for line in code.splitlines()]
    lines += (
        (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8").replace("$python ", "python ").splitlines()
    )
    return [line for line in dict.fromkeys(lines) if line.startswith(f"python {program}")]


def composed(command: str, config_name: str) -> dict:
    """The configuration of a command; of a sweep, that of its first job."""
    overrides = []
    for word in shlex.split(command)[2:]:
        if word.startswith(("-", "hydra", "+hydra")):  # launchers are optional: tests/test_launchers.py
            continue
        parsed = OverridesParser.create().parse_override(word)
        if parsed.is_sweep_override():
            word = f"{parsed.key_or_group}={next(iter(parsed.sweep_string_iterator()))}"
        overrides.append(word)
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return resolved(hydra.compose(config_name, overrides))


@pytest.mark.parametrize("page", dict.fromkeys(name for name, _ in blocks("python")))
def test_python_blocks_run_in_order_on_one_page(page, monkeypatch):
    # pages register methods and benchmarks of their own, which other tests must not see
    for module in (kvcore.method, kvcore.bench.base):
        monkeypatch.setattr(module, "_registry", dict(module._registry))
    namespace: dict = {}
    for name, code in blocks("python"):
        if name == page:
            # as in a file of the reader's own: without the future imports of this one
            exec(compile(code, page, "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("command", commands("evaluate.py"))
def test_evaluate_commands_resolve(command):
    plan = evaluation_plan(composed(command, "evaluate"))
    assert plan.runs
    assert plan.benches


NEED_DATA = ("longbench", "infinitebench", "gsm8k")
# options of benchmarks that make a command small enough to run here; what they may not be is checked by the plan above
SMALL = {
    **{"contexts": [256], "depths": [0.5], "documents": 1, "continuation": 4, "max_new_tokens": 2, "num_samples": 1},
    **{"settings": [[128, 2]], "repeats": 1, "warmup_tokens": 0, "tasks": ["niah_single_1"], "limit": 1},
}


@pytest.mark.parametrize("command", [line for line in commands("evaluate.py") if "hydra/launcher" not in line])
def test_evaluate_commands_run_on_the_tiny_backbone(command, tmp_path, monkeypatch):
    plain = composed(command, "evaluate")
    plain["bench"] = {
        # the prompts of RULER's tasks take some hundred tokens by themselves
        name: options
        | {key: value for key, value in SMALL.items() if key in options}
        | ({"contexts": [704]} if name == "ruler" else {})
        for name, options in plain["bench"].items()
        if name not in NEED_DATA
    }
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        plain["backbone"] = resolved(hydra.compose("evaluate", ["backbone=tiny"]))["backbone"]
    # some of the methods: all of them run in tests/baselines/test_contract.py
    chosen = list(plain["method"].items())
    plain["method"] = dict(chosen[:2] + chosen[-2:])
    # a budget of a few hundred tokens is below what some methods can reach
    plain |= {"on_unreachable": "skip", "plots": False, "budget": 0.4, "data_dir": None, "output_dir": str(tmp_path)}
    evaluate.evaluate_job(OmegaConf.create(plain))
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {row["bench"] for row in results["summary"]} == set(plain["bench"])
    assert len({row["method"] for row in results["summary"]}) >= min(2, len(plain["method"]))


@pytest.mark.parametrize("command", commands(f"scripts/{QUICK}"))
def test_commands_of_all_quick_experiments_name_what_there_is(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script, called = load_script(QUICK.removesuffix(".py")), []
    monkeypatch.setattr(script, "call", lambda *words: called.append(words) or 0)
    assert script.main(shlex.split(command)[2:]) == 0
    assert sum(words[0] == "evaluate.py" for words in called) == len(script.quick_experiments())


@pytest.mark.parametrize("command", commands("train.py"))
def test_train_commands_resolve(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in ("a_train", "a_heldout"):
        (tmp_path / "corpus" / f"{name}.jsonl").write_text('{"text": "Some words.", "meta": {}}\n' * 20)
    assert train.train_plan(composed(command, "train"))


@pytest.mark.parametrize("command", commands("scripts/plan_memory.py"))
def test_planning_commands_run(command, capsys):
    load_script("plan_memory").main(shlex.split(command)[2:])
    assert "full cache" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands("scripts/report.py"))
def test_report_commands_run(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command)[2:]
    arguments[arguments.index("--output") + 1] = str(tmp_path)
    assert load_script("report").main(arguments) == 0
    assert (tmp_path / "index.html").is_file()


def test_every_command_of_the_docs_is_of_a_kind_that_is_tested():
    kinds: tuple[str, ...] = (
        "evaluate.py",
        "train.py",
        *(f"scripts/{name}" for name in ("plan_memory.py", "report.py", QUICK)),
    )
    # the first installs, the second is this test: their commands are tested, and their syntax below
    starts = (*(f"python {kind}" for kind in kinds), "bash scripts/quickstart.sh", "bash scripts/test.sh")
    for page, code in blocks("bash"):
        assert all(line.startswith(starts) for line in code.splitlines()), page
    languages = {kind for page in PAGES for kind in re.findall(r"^```(\S+)", page.read_text("utf-8"), re.MULTILINE)}
    assert languages <= {"python", "bash"}


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_shell_scripts_are_well_formed(script):
    ran = subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def links() -> list[tuple[str, str, str]]:
    """(page, text, target) of every link to a file of this repository."""
    pattern = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)\)")
    return [(page, *found) for page in map(str, PAGES) for found in pattern.findall(Path(page).read_text("utf-8"))]


def test_linked_files_exist_and_define_the_functions_that_are_named():
    assert len(links()) > 40
    for page, text, target in links():
        file = (Path(page).parent / target).resolve()
        assert file.is_file(), f"{page}: {target}"
        name = re.fullmatch(r"`([A-Za-z_.]+)`", text)
        if name and file.suffix == ".py" and name[1] != file.name:
            assert defines(ast.parse(file.read_text("utf-8")).body, name[1].split(".")), f"{page}: {text} in {target}"


def defines(body: list[ast.stmt], path: list[str]) -> bool:
    """Whether a module or class body defines a function or class, members after a dot."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == path[0]:
            return len(path) == 1 or defines(node.body, path[1:])
    return False


def test_the_memory_table_of_the_docs_is_the_planners():
    page = (ROOT / "docs" / "use_in_your_project.md").read_text(encoding="utf-8")
    assert load_script("plan_memory").overview() in page


def test_scripts_named_in_the_readme_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\bscripts/[\w/]+\.(?:sh|py)\b", text))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_registries_are_filled_by_the_command():
    assert evaluate.REGISTERED
