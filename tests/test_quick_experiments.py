"""The quick experiments as one command, and results that may be committed."""

import json
import os

import pytest
from script_cases import load_script
from test_report import results

quick = load_script("run_quick_experiments")
publisher = load_script("publish_results")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One experiment, run by the command on the tiny backbone."""
    folder = tmp_path_factory.mktemp("quick")
    small = ["backbone=tiny", "bench.zoom.contexts=[300]", "bench.zoom.depths=[0.5]", "bench.zoom.max_new_tokens=2"]
    arguments = [*small, "--only", "sekv_zoom", "--output", str(folder / "out"), "--publish", str(folder / "results")]
    assert quick.main(arguments) == 0
    return folder


def test_an_experiment_is_run_timed_reported_and_published(finished):
    assert (finished / "out" / "report" / "index.html").is_file()
    times = json.loads((finished / "out" / "times.json").read_text())
    assert times["sekv_zoom"]["processor_seconds"] > 1
    text = (finished / "results" / "sekv_zoom.json").read_text()
    assert str(finished) not in text
    content = json.loads(text)
    assert content["command"].startswith("python evaluate.py experiment=sekv_zoom backbone=tiny")
    assert content["config"]["output_dir"] is None and content["samples"] and content["environment"]
    run = json.loads((finished / "out" / "sekv_zoom" / "results.json").read_text())
    assert content["summary"] == run["summary"], "published numbers are those of the run"


def test_one_that_fails_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    called = []
    monkeypatch.setattr(quick, "call", lambda *words: called.append(words) or ("experiment=pareto" in words))
    assert quick.main(["--only", "pareto", "sekv_zoom", "--output", str(tmp_path)]) == 1
    assert [words[1] for words in called] == ["experiment=pareto", "experiment=sekv_zoom"]
    assert "not complete: pareto" in capsys.readouterr().err


def test_times_of_resumed_runs_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "call", lambda *words: 0)
    seconds = iter((0.0, 10.0, 10.0, 12.0))
    monkeypatch.setattr(quick, "processor_seconds", lambda: next(seconds))
    for _ in range(2):
        assert quick.run(["python", "evaluate.py"], tmp_path / "name", tmp_path / "times.json") == 0
    assert json.loads((tmp_path / "times.json").read_text())["name"]["processor_seconds"] == 12.0


def test_published_results_hold_no_path_of_the_machine():
    content = results() | {"config": {"output_dir": os.path.abspath("x"), "data_dir": None}}
    content["config"]["bench"] = {"gsm8k": {"data_dir": str(publisher.ROOT.parent / "data" / "gsm8k")}}
    portable = publisher.portable(content, "python evaluate.py")
    assert portable["config"]["output_dir"] is None
    assert portable["config"]["bench"]["gsm8k"]["data_dir"] == os.path.join("..", "data", "gsm8k")
    assert content["config"]["output_dir"] is not None, "the original is left alone"
    content["config"]["backbone"] = {"path": os.path.abspath("model")}
    with pytest.raises(ValueError, match=r"config.backbone.path holds the absolute path"):
        publisher.portable(content)


def test_what_is_no_result_is_not_published(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"rows": []}')
    assert publisher.main([str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "not a results file" in capsys.readouterr().err


def test_every_table_and_figure_is_among_them():
    names = quick.quick_experiments()
    assert names[0] == "quickstart" and len(names) == 12
    assert not any(name.endswith("_paper") for name in names)
