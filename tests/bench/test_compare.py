"""`scripts/compare.py`: pairs by sample, names what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path):
    rows = [
        {
            "label": label,
            "budget": budget,
            "bench": "ruler",
            "task": "vt",
            "context": 2048,
            "sample_key": f"vt|2048|{i}",
            "metrics": {"string_match": value + 10.0 * i},
        }
        for label, budget, value in (("sekv", 0.1, 20.0), ("sekv", 0.2, 25.0), ("snapkv", 0.1, 15.0))
        for i in range(6)
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"config": {"backbone": {"name": "tiny"}}, "samples": rows}))
    return path


def test_difference_on_the_same_samples(script, results, capsys):
    assert script.main([str(results), "--methods", "sekv@0.1", "snapkv"]) == 0
    printed = capsys.readouterr().out
    assert "sekv@0.1 minus snapkv" in printed
    (result,) = script.compare(script.read_rows(results), "sekv@0.2", "snapkv").values()
    assert (result.difference.value, result.difference.low, result.difference.high) == (10.0, None, None)
    assert (result.wins, result.losses, result.difference.n) == (6, 0, 6)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["sekv", "snapkv"], "sekv@0.1, sekv@0.2"),
        (["skev@0.1", "snapkv"], "no samples of 'skev@0.1'"),
    ],
)
def test_what_cannot_be_compared_is_named(script, results, capsys, methods, message):
    assert script.main([str(results), "--methods", *methods]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_results_is_named(script, tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert script.main([str(tmp_path / "x.json"), "--methods", "a", "b"]) == 2
    assert "is no results.json" in capsys.readouterr().err
