"""The command line: every mistake is one clear message with exit code 2, before a model is loaded or a file written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from foundation_cases import run_main
from omegaconf import OmegaConf

import evaluate
import kvcore.bench.runner
from kvcore.cli import check_overrides, config_hash

ROOT = Path(__file__).parent.parent
SMALL_RUN = (
    *("backbone=tiny", "backbone.device=cpu", "backbone.dtype=float32", "bench=niah", "bench.niah.contexts=[64]"),
    *("bench.niah.depths=[0.5]", "bench.niah.haystacks=[noise]", "bench.niah.max_new_tokens=2", "plots=false"),
)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs evaluate.py in this process from an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return run_main(monkeypatch, capsys, evaluate.main, *arguments)

    return run


@pytest.fixture
def refused(command, monkeypatch, tmp_path):
    """Asserts that arguments are refused with one message, without a model and without a file; returns it."""

    def no_model(config):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(kvcore.bench.runner, "load_backbone", no_model)

    def run(*arguments):
        code, out, err = command(*arguments)
        assert code != 0
        assert "Traceback" not in out + err
        messages = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(messages) == 1, err
        assert list(tmp_path.iterdir()) == []
        return err

    return run


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("method=streaming_lm", ["unknown method 'streaming_lm'", "Did you mean 'streaming_llm'", "oracle_topk"]),
        ("method=[full,snapvk]", ["unknown method 'snapvk'", "'snapkv'"]),
        ("bench=fidelty", ["unknown bench 'fidelty'", "Did you mean 'fidelity'", "niah"]),
        ("backbone=smollm2", ["unknown backbone 'smollm2'", "'smollm2_135m'"]),
        ("budgte=0.1", ["unknown key 'budgte'", "Did you mean 'budget'"]),
        ("logger=on", ["unknown logger 'on'", "online"]),
    ],
)
def test_an_unknown_name_or_key_is_told_with_close_matches(argument, parts):
    message = check_overrides([argument], "evaluate")
    assert message is not None
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "argument",
    ["method=[full,streaming_llm]", "budget=0.1", "+ablation=x", "hydra.verbose=true", "-m", "bench.niah.x=1"],
)
def test_what_cannot_be_told_without_composing_passes_the_first_check(argument):
    assert check_overrides([argument], "evaluate") is None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["method=streaming_lm"], ["Did you mean 'streaming_llm'"]),
        (["backbone.dtyp=float32"], ["unknown option 'backbone.dtyp'", "dtype"]),
        (["bench=niah", "bench.niah.depth=[0]"], ["no 'depth' here", "depths"]),
        (["method=streaming_llm", "method.streaming_llm.sinks=2"], ["no 'sinks' here", "num_sinks"]),
        (["+method.streaming_llm.sinks=2"], ["has no option 'sinks'", "num_sinks"]),
        (["+colour=red"], ["unknown key 'colour'"]),
        (["budget=0"], ["0 < budget <= 1.0", "received 0"]),
        (["budget=-0.1"], ["received -0.1"]),
        (["budget=1.5"], ["received 1.5"]),
        (["budget=much"], ["received 'much'"]),
        (["budget=1"], ["ambiguous", "1.0"]),
        (["budget=[0.1,0]"], ["received 0"]),
        (["budget=[]"], ["empty list"]),
        (["budget_scope=tokens"], ["bytes, layer", "'tokens'"]),
        (["method=[]"], ["no method given"]),
        (["bench=[]"], ["no bench given"]),
        (["limit=0"], ["limit must be >= 1"]),
        (["limit=some"], ["limit", "'some'"]),
        (["seed=first"], ["seed", "'first'"]),
        (["on_unreachable=ignore"], ["error or skip"]),
        (["backbone.dtype=int4"], ["dtype must be auto"]),
        (["data_dir=/nowhere/at/all"], ["/nowhere/at/all", "expected: *.jsonl"]),
        (["bench=niah", "data_dir=/nowhere/at/all"], ["/nowhere/at/all", "expected: *.jsonl"]),
        (["output_dir=/proc/sekv"], ["/proc/sekv", "cannot be created"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_mistake_is_one_message_before_anything_slow(refused, arguments, parts):
    message = refused(*arguments)
    assert all(part in message for part in parts), message


def test_a_model_that_is_not_there_and_no_network_is_one_message(command):
    code, _, err = command("backbone.path=nobody/no-such-model", "output_dir=out")
    assert code == 2
    assert "error: model 'nobody/no-such-model' is not on this machine" in err and "no network" in err
    assert "Traceback" not in err
    assert not Path("out/results.json").exists()


def test_a_prompt_beyond_the_models_length_is_one_message(command):
    code, _, err = command(*SMALL_RUN, "bench.niah.contexts=[4000]", "output_dir=out")
    assert code == 2
    assert "was built for 2048" in err and "Use a shorter context" in err
    assert not Path("out/results.json").exists()


def test_an_interruption_says_how_to_go_on(command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    code, _, err = command(*SMALL_RUN)
    assert code == 130
    assert "finished results are kept; run the same command again to resume" in err


def test_a_run_writes_results_and_its_configuration_and_resumes(command):
    code, out, err = command(*SMALL_RUN, "output_dir=out", "method=[full,streaming_llm]", "budget=0.5")
    assert code == 0, err
    results = json.loads(Path("out/results.json").read_text())
    assert yaml.safe_load(Path("out/config.yaml").read_text()) == results["config"]
    assert {row["method"] for row in results["summary"]} == {"full", "streaming_llm"}
    assert "streaming_llm" in out and "results: out/results.json" in out
    before = Path("out/samples.0.jsonl").read_text()
    assert command(*SMALL_RUN, "output_dir=out", "method=[full,streaming_llm]", "budget=0.5")[0] == 0
    assert Path("out/samples.0.jsonl").read_text() == before


def test_without_an_output_folder_the_configuration_names_it(command):
    assert command(*SMALL_RUN, "method=full")[0] == 0
    assert command(*SMALL_RUN, "method=full", "seed=3")[0] == 0
    folders = sorted(Path("outputs").iterdir())
    assert len(folders) == 2
    assert {json.loads((f / "results.json").read_text())["config"]["seed"] for f in folders} == {0, 3}


def test_j1_a_sweep_writes_every_job_into_its_own_folder(command):
    for _ in range(2):
        code, _, err = command("-m", *SMALL_RUN, "method=full", "seed=1,2", "output_dir=out")
        assert code == 0, err
    folders = sorted(path.parent for path in Path("out").glob("*/results.json"))
    assert len(folders) == 2
    for folder, other in zip(folders, reversed(folders), strict=True):
        results = json.loads((folder / "results.json").read_text())
        assert yaml.safe_load((folder / "config.yaml").read_text()) == results["config"]
        assert results["config"]["seed"] != json.loads((other / "results.json").read_text())["config"]["seed"]


def test_help_and_the_composed_configuration_are_printed(command):
    _, out, _ = command("--help")
    assert "python evaluate.py bench=niah method=streaming_llm budget=0.1" in out
    assert "oracle_topk" in out
    _, out, _ = command("--cfg", "job", "bench=niah", "budget=0.2")
    shown = OmegaConf.create(out)
    assert shown.budget == 0.2 and list(shown.bench) == ["niah"]


def test_the_hash_of_a_configuration_does_not_depend_on_key_order():
    assert config_hash({"a": 1, "b": [1, 2]}) == config_hash({"b": [1, 2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_the_real_program_ends_with_the_message_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "method=streaming_lm"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: unknown method 'streaming_lm'. Did you mean 'streaming_llm'?"
    )
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []
