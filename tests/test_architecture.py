"""Imports only point down: read from the syntax tree of every file, function bodies included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvcore", "sekv", "freqdepth")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = ("train", "evaluate", "scripts", "tests")

# prefix of a module -> what it must not import; the most specific prefix does not hide the others
FORBIDDEN = {
    "kvcore": ("sekv", "freqdepth", *PROGRAMS),
    "kvcore.kernels": (
        *("kvcore.attention", "kvcore.baselines", "kvcore.bench", "kvcore.budget", "kvcore.cache", "kvcore.exact"),
        "kvcore.layer",
        *("kvcore.method", "kvcore.report", "kvcore.state", "kvcore.backbone"),
    ),
    "kvcore.layer": ("kvcore.attention", "kvcore.cache", "kvcore.kernels", "kvcore.method", "kvcore.baselines"),
    "kvcore.cache": ("kvcore.attention", "kvcore.method", "kvcore.baselines", "kvcore.bench", "kvcore.backbone"),
    "kvcore.baselines": ("kvcore.bench", "kvcore.report", "kvcore.backbone", "kvcore.cli", "conf"),
    "kvcore.bench": ("kvcore.report",),
    "kvcore.report": ("kvcore.bench", "kvcore.baselines", "kvcore.cache"),
    "sekv": ("freqdepth", *PROGRAMS),
    "freqdepth": ("sekv", "kvcore.bench", "kvcore.report", *PROGRAMS),
}
# the packed storage format is below the kernels that read it
LEAVES = {"kvcore.quant": {"kvcore.state"}, "kvcore.state": set(), "kvcore.log": set(), "kvcore.options": set()}
CORE_MUST_NOT = ("kvcore.baselines", "kvcore.bench", "kvcore.report")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names of the project's modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree)
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module or "") if part)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {base} | {name for name in names if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()}
    return {name for name in found if name.split(".")[0] in (*PACKAGES, *PROGRAMS, "conf")}


def inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_nothing_above_it(path):
    module = module_name(path)
    rules = [banned for prefix, banned in FORBIDDEN.items() if inside(module, prefix)]
    if path.parent == ROOT / "kvcore":
        rules.append(CORE_MUST_NOT)
    wrong = {name for name in imports(path) for banned in rules for prefix in banned if inside(name, prefix)}
    assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("module", LEAVES)
def test_the_lowest_modules_import_next_to_nothing(module):
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    assert imports(path) <= LEAVES[module] | {"kvcore"}


def test_no_module_is_imported_in_a_circle():
    graph = {module_name(path): imports(path, top_level_only=True) for path in FILES}
    state: dict[str, str] = {}

    def visit(module: str, trail: list[str]) -> None:
        state[module] = "open"
        for name in sorted(graph[module] & set(graph)):
            # a package that gathers its own modules is no circle
            if inside(module, name) or state.get(name) == "done":
                continue
            assert state.get(name) != "open", f"circle: {' -> '.join([*trail, module, name])}"
            visit(name, [*trail, module])
        state[module] = "done"

    for module in sorted(graph):
        if module not in state:
            visit(module, [])


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_forward_is_replaced_and_nothing_of_transformers_is_patched(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute):
                assert target.attr not in ("forward", "__call__"), f"line {node.lineno} replaces a forward"
                owner = ast.unparse(target.value)
                assert not owner.startswith(("transformers", "torch.nn")), f"line {node.lineno} patches {owner}"


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_the_programs_compose_only(program):
    tree = ast.parse((ROOT / program).read_text(encoding="utf-8"))
    assert not any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(tree))
    modules = imports(ROOT / program)
    assert not {name for name in modules if name.split(".")[0] in ("tests", "scripts")}


def test_the_shared_folder_and_the_network_are_never_needed_by_the_packages():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "../shared" not in text and "/shared/" not in text, path
