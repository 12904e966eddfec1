"""Tracking (L1): offline, disabled, without a key, without wandb — the run goes on and the local file has it all."""

import json
import logging
import os
import sys
import time
import types

import pytest

from kvcore.tracking import LoggerConfig, Tracker

RUN_CONFIG = {"budget": 0.1, "method": {"streaming_llm": {"num_sinks": 4}}, "bench": {"niah": {"depths": [0.0, 1.0]}}}
SECONDS = 10


def track(mode: str, folder) -> Tracker:
    tracker = Tracker(LoggerConfig(mode=mode), folder, RUN_CONFIG, name="a run")
    tracker.log({"loss": 1.5, "task": "kl"}, step=1)
    tracker.log({"loss": 0.5}, step=2)
    tracker.log_table("summary", [{"method": "full", "value": 0.0}])
    tracker.finish()
    return tracker


def local_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


EXPECTED = [{"step": 1, "loss": 1.5, "task": "kl"}, {"step": 2, "loss": 0.5}]


class FakeRun:
    def __init__(self) -> None:
        self.logged: list = []

    def log(self, values, step=None):
        self.logged.append((values, step))

    def finish(self):
        self.logged.append("finished")


@pytest.fixture
def fake_wandb(monkeypatch):
    """A stand-in for wandb that records how it was started; `online_fails` makes the online start fail."""
    module = types.ModuleType("wandb")
    module.started, module.run, module.online_fails = [], FakeRun(), False
    module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    module.api = types.SimpleNamespace(api_key=None)
    module.Settings = lambda **options: options
    module.Table = lambda columns, data: (columns, data)

    def init(mode, settings, **options):
        module.started.append({"mode": mode, "settings": settings, **options})
        if mode == "online" and module.online_fails:
            raise module.errors.Error("no route to host")
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return module


def test_l1_disabled_writes_the_local_file_only(tmp_path, fake_wandb):
    track("disabled", tmp_path)
    assert local_lines(tmp_path) == EXPECTED
    assert fake_wandb.started == []


def test_l1_without_wandb_the_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        track("offline", tmp_path)
    assert "wandb is not installed" in caplog.text
    assert local_lines(tmp_path) == EXPECTED


def test_l1_online_without_a_key_records_offline(tmp_path, fake_wandb, caplog):
    track("online", tmp_path)
    assert [start["mode"] for start in fake_wandb.started] == ["offline"]
    assert "no wandb key" in caplog.text
    assert local_lines(tmp_path) == EXPECTED


def test_l1_online_without_a_network_falls_back_to_offline(tmp_path, fake_wandb, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    fake_wandb.online_fails = True
    track("online", tmp_path)
    assert [start["mode"] for start in fake_wandb.started] == ["online", "offline"]
    assert fake_wandb.started[0]["settings"]["init_timeout"] < SECONDS
    assert "could not start online (no route to host)" in caplog.text


def test_l1_the_logged_configuration_is_the_plain_nested_dict(tmp_path, fake_wandb):
    track("offline", tmp_path)
    start = fake_wandb.started[0]
    assert start["config"] == RUN_CONFIG
    assert type(start["config"]["method"]["streaming_llm"]) is dict
    assert start["dir"] == str(tmp_path)
    assert fake_wandb.run.logged == [
        ({"loss": 1.5}, 1),
        ({"loss": 0.5}, 2),
        ({"summary": (["method", "value"], [["full", 0.0]])}, None),
        "finished",
    ]


def test_l1_real_wandb_offline_starts_and_ends_without_a_stall(tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    began = time.monotonic()
    tracker = track("offline", tmp_path)
    assert tracker._run is None
    assert local_lines(tmp_path) == EXPECTED
    assert list(tmp_path.glob("wandb/offline-run-*"))
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # starved of processor time a wait is not wandb's
        assert time.monotonic() - began < 2 * SECONDS


def test_an_unknown_mode_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="must be one of online, offline, disabled; received 'on'"):
        LoggerConfig(mode="on")
