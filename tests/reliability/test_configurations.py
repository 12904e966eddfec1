"""Whatever a user types: one clear message before a model is loaded, or a run that serves.

Configurations go through the code path of `evaluate.py` and `train.py` with the model loader patched, so that reaching
it is seen.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import hydra
import pytest
import torch
from contract_cases import fed
from foundation_cases import run_main
from input_cases import EXTREME, WRONG, ids_of, tiny
from omegaconf import OmegaConf

import evaluate
import freqdepth
import kvcore.baselines
import kvcore.bench.all
import kvcore.bench.runner
import sekv
import train
from kvcore.attention import prefill
from kvcore.bench.base import bench_names, build_bench
from kvcore.cli import config_dir, guard, resolved
from kvcore.method import build_method, method_class, method_names
from sekv.train_config import LossConfig, TrainConfig

REGISTERED = (kvcore.baselines, kvcore.bench.all, sekv, freqdepth)
METHODS = method_names()
BENCHES = [name for name in bench_names() if name != "toy"]
TRIED = "fuzzed configurations"


class Loaded(BaseException):
    """The model loader was reached."""


def no_model(*_: Any) -> None:
    raise Loaded


@functools.cache
def composed(primary: str, *overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        return resolved(hydra.compose(primary, list(overrides)))


@pytest.fixture
def outcome(monkeypatch, capsys, tmp_path, tally):
    """Runs a job with a plain configuration: the error message, or None when it got as far as the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))  # no data
    monkeypatch.setattr(kvcore.bench.runner, "load_backbone", no_model)
    monkeypatch.setattr(train, "load_backbone", no_model)

    def run(primary: str, plain: dict[str, Any], what: str) -> str | None:
        tally(TRIED)
        job = evaluate.evaluate_job if primary == "evaluate" else train.train_job
        try:
            guard(job)(OmegaConf.create(plain))
        except Loaded:
            capsys.readouterr()
            return None
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            pytest.fail(f"{what}: a traceback reaches the user: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{what}: the job ended without a model")
        out, err = capsys.readouterr()
        messages = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(messages) == 1 and "Traceback" not in out + err, f"{what}: {err}"
        assert len(messages[0]) > len("error: "), what
        return err

    return run


def changed(plain: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A configuration with one value set, its node made where it is missing."""
    plain = copy.deepcopy(plain)
    *nodes, last = path.split(".")
    node = plain
    for part in nodes:
        node = node.setdefault(part, {})
    node[last] = value
    return plain


def strings(cls: type, field: str) -> bool:
    """Whether an option may hold any text or any mapping."""
    kind = str(next(f.type for f in dataclasses.fields(cls) if f.name == field))
    return "str" in kind or "dict" in kind or "Literal" in kind


def fuzz_node(outcome, primary: str, plain: dict[str, Any], path: str, cls: type) -> None:
    """Every option of one node: misspelt, of a wrong type, extreme."""
    message = outcome(primary, changed(plain, f"{path}.no_such_option", 1), f"{path}.no_such_option")
    assert message is not None and "no_such_option" in message
    for value in (3, "text", [1], [{"a": 1}]):
        outcome(primary, changed(plain, path, value), f"{path}={value!r}")
    for field in dataclasses.fields(cls):
        option = f"{path}.{field.name}"
        for value in WRONG:
            message = outcome(primary, changed(plain, option, value), f"{option}={value!r}")
            assert message is not None or strings(cls, field.name), f"{option}={value!r} reached the model"
        for value in EXTREME:
            outcome(primary, changed(plain, option, value), f"{option}={value!r}")


@pytest.mark.parametrize("name", METHODS)
def test_options_of_methods(outcome, name):
    plain = composed("evaluate", "backbone=tiny", f"method={name}", "bench=niah")
    fuzz_node(outcome, "evaluate", plain, f"method.{name}", method_class(name))


@pytest.mark.parametrize("name", BENCHES)
def test_options_of_benches(outcome, name):
    plain = composed("evaluate", "backbone=tiny", "method=full", f"bench={name}")
    fuzz_node(outcome, "evaluate", plain, f"bench.{name}", type(build_bench(name)))


@pytest.mark.parametrize(("path", "cls"), [("train", TrainConfig), ("train.losses", LossConfig)])
def test_options_of_training(outcome, path, cls):
    fuzz_node(outcome, "train", composed("train", "backbone=tiny"), path, cls)


@pytest.mark.parametrize("primary", ["evaluate", "train"])
def test_top_level_keys(outcome, primary):
    plain = composed(primary, "backbone=tiny")
    for key in plain:
        without = {name: value for name, value in plain.items() if name != key}
        message = outcome(primary, without, f"without {key}")
        assert message is None or key in message, f"without {key}: {message}"
        for value in (*WRONG, *EXTREME):
            outcome(primary, changed(plain, key, value), f"{key}={value!r}")
    for part in ("backbone", "logger", *(["data"] if primary == "train" else [])):
        for option in [*plain[part], "no_such_option"]:
            for value in (*WRONG, *EXTREME):
                outcome(primary, changed(plain, f"{part}.{option}", value), f"{part}.{option}={value!r}")


@pytest.mark.parametrize("key", ["seed", "budget", "limit"])
@pytest.mark.parametrize("value", ["abc", {"a": 1}, [[1]]])
def test_numbers_of_the_wrong_type_do_not_reach_the_model(outcome, key, value):
    plain = composed("evaluate", "backbone=tiny", "method=full", "bench=niah")
    assert outcome("evaluate", changed(plain, key, value), f"{key}={value!r}") is not None


# the command line itself: what Hydra's grammar makes of it
TYPED = [
    *("budget=", "budget=[", "budget=]", "=3", "==", "bench=[fidelity", "bench=fidelity,niah", "method.full=3"),
    *("++method=3", "~method", "~seed", "bench@foo=fidelity", "backbone=null", "seed=???", "budget=${nope}"),
    *("method={a:1}", "method=🙂", "+bench.fidelity.context_tokens=1e999", "budget=0x10", "budget='", "limit=${seed"),
    *("output_dir=[1]", "hydra.run.dir=[", "hydra=3", "method=[full,[full]]", "bench=[[niah]]", "seed=[", "a b=c"),
]


@pytest.mark.parametrize("argument", TYPED)
def test_odd_command_lines(monkeypatch, capsys, tmp_path, tally, argument):
    tally(TRIED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvcore.bench.runner, "load_backbone", no_model)
    code, out, err = run_main(monkeypatch, capsys, evaluate.main, "backbone=tiny", argument)
    assert code not in (0, None), "accepted"
    assert "Traceback" not in out + err and err.strip()


# --- extreme options that are accepted must serve
def accepted(name: str) -> list[tuple[str, Any]]:
    found = []
    for field in dataclasses.fields(method_class(name)):
        for value in EXTREME:
            try:
                build_method(name, **{field.name: value})
            except ValueError:
                continue
            found.append((field.name, value))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_extreme_options_that_are_accepted_serve_or_are_refused_by_the_cache(name, tally):
    ids, more, failures = ids_of("code")[:, :64], ids_of("table")[:, :2], []
    with torch.inference_mode():
        for option, value in accepted(name):
            tally(TRIED)
            try:
                cache = build_method(name, **{option: value}).new_cache(tiny(), 0.5)
                logits = prefill(tiny(), cache, ids)
                later = fed(tiny(), cache, more, step=2)
            except (ValueError, NotImplementedError, FileNotFoundError):
                continue
            except Exception as error:
                failures.append(f"{option}={value!r}: {type(error).__name__}: {error}")
                continue
            if not (logits.isfinite().all() and later.isfinite().all()):
                failures.append(f"{option}={value!r}: not finite")
    assert not failures, "\n".join(failures)
