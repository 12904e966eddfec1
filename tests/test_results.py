"""Results (J3): what is done is skipped only when everything that matters is the same; files are whole or absent."""

import json
import os
import shutil
from pathlib import Path

import pytest
from evaluation_cases import Calls, toy_plan

from kvcore.bench.results import SampleStore, write_atomically
from kvcore.bench.runner import OutputFolder, evaluate


def ran(monkeypatch, folder, **changes) -> list[tuple[str, str]]:
    """The samples that one run with these changes had to do."""
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        evaluate(*toy_plan(**changes), folder)
    return calls.ran


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a finished run of 7 samples and 2 methods; no test writes to it."""
    folder = tmp_path_factory.mktemp("finished")
    assert len(evaluate(*toy_plan(), folder)["samples"]) == 14
    return folder


@pytest.fixture
def finished(original, tmp_path):
    """A copy of the finished run."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_j3_the_same_configuration_runs_nothing_twice(finished, monkeypatch):
    before = json.loads((finished / "results.json").read_text())
    assert ran(monkeypatch, finished) == []
    assert json.loads((finished / "results.json").read_text()) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"backbone__dtype": "bfloat16"},
        {"budget": 0.25},
        {"limit": 3},
        {"backbone__instruct": False},
        {"compress_question": True},
        {"method__streaming_llm__num_sinks": 2},
        {"budget_scope": "layer"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_j3_a_changed_setting_is_run_anew(finished, monkeypatch, changes):
    done = ran(monkeypatch, finished, **changes)
    expected = changes.get("limit", 7)
    assert sum(method == "streaming_llm" for _, method in done) == expected
    # the full cache does not depend on these
    own = {"budget", "method__streaming_llm__num_sinks"} & set(changes)
    assert sum(method == "full" for _, method in done) == (0 if own else expected)


def test_j3_one_more_budget_or_method_runs_only_what_is_new(finished, monkeypatch):
    done = ran(monkeypatch, finished, budget=[0.5, 0.25])
    assert len(done) == 7 and {method for _, method in done} == {"streaming_llm"}
    summary = json.loads((finished / "results.json").read_text())["summary"]
    assert {(row["method"], row["budget"]) for row in summary} == {
        ("full", 1.0),
        ("streaming_llm", 0.5),
        ("streaming_llm", 0.25),
    }


def test_j3_a_half_written_sample_is_run_again(finished, monkeypatch, caplog):
    path = finished / "samples.0.jsonl"
    path.write_text(path.read_text()[:-40])
    assert len(ran(monkeypatch, finished)) == 1
    assert "half-written" in caplog.text
    assert len(json.loads((finished / "results.json").read_text())["samples"]) == 14
    assert len(ran(monkeypatch, finished)) == 0


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1', "[]", "null"])
def test_j3_a_corrupt_results_file_is_rewritten_from_the_samples(finished, monkeypatch, content):
    (finished / "results.json").write_text(content)
    assert ran(monkeypatch, finished) == []
    assert json.loads((finished / "results.json").read_text())["schema"] == 1


def test_results_of_another_configuration_are_kept_aside(finished, monkeypatch):
    before = json.loads((finished / "results.json").read_text())
    ran(monkeypatch, finished, seed=5)
    kept = [path for path in finished.glob("results-*.json")]
    assert [json.loads(path.read_text()) for path in kept] == [before]
    assert json.loads((finished / "results.json").read_text())["config"]["seed"] == 5


def test_results_follow_the_stable_schema(finished):
    results = json.loads((finished / "results.json").read_text())
    assert set(results) == {"schema", "config", "environment", "summary", "samples"}
    assert {"git", "python", "torch", "transformers", "device", "threads"} <= set(results["environment"])
    columns = {"bench", "task", "method", "backbone", "budget", "budget_scope", "context", "n", "metric", "value"}
    columns |= {"ci_low", "ci_high", "device_share", "device_bytes", "host_bytes", "attended_share"}
    columns |= {"h2d_bytes_per_token", "h2d_stall_ms_per_token", "prefill_seconds", "ms_per_token"}
    assert all(columns <= set(row) for row in results["summary"])
    assert all(
        {"bench", "task", "method", "id", "prediction", "references", "score"} <= set(r) for r in results["samples"]
    )
    assert len(results["summary"]) == 2 * 3  # two methods x (two tasks and all)
    everything = [row for row in results["summary"] if row["task"] == "all" and row["method"] == "full"]
    scores = [row["score"] for row in results["samples"] if row["label"] == "full"]
    assert everything[0]["n"] == 7
    assert everything[0]["value"] == pytest.approx(sum(scores) / 7)
    assert "NaN" not in (finished / "results.json").read_text()


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    held = OutputFolder(tmp_path, main_process=True)
    with pytest.raises(ValueError, match=f"another run is writing to {tmp_path}"):
        OutputFolder(tmp_path, main_process=True)
    held.release()
    OutputFolder(tmp_path, main_process=True).release()


def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, "old")

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def test_rows_of_every_process_are_read(tmp_path):
    row = {"key": "k", "sample_key": "s", "order": 0}
    for rank in (0, 1):
        SampleStore(tmp_path, rank).append([{**row, "sample_key": f"s{rank}", "order": 1 - rank}])
    store = SampleStore(tmp_path)
    assert ("k", "s0") in store and ("k", "s1") in store and ("k", "s2") not in store
    assert [r["sample_key"] for r in store.select(["k"])] == ["s1", "s0"]
    assert store.select(["other"]) == []
