"""The memory planner against the ledger of real caches, and its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_cases import load_script

from kvcore.attention import attach, prefill
from kvcore.backbone import BackboneConfig
from kvcore.bench.plan import method_from_config
from kvcore.budget import Budget
from kvcore.method import build_method, method_names
from kvcore.shapes import SHAPES, backbone_shape
from kvcore.tiny import build_tiny

ROOT = Path(__file__).parent.parent
planner = load_script("plan_memory")

CONTEXT = 1500
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def tiny():
    return build_tiny()[0]


def measured(model, name, budget, **options):
    """Device and host bytes of a cache right after its prefill."""
    cache = build_method(name, **options).new_cache(model, budget)
    ids = torch.randint(5, 290, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        prefill(model, cache, ids)
        before = cache.memory_bytes()
        model(input_ids=ids[:, :1], cache=cache)
    return before, cache.ledger


@pytest.mark.parametrize("budget", [0.1, 0.3, 200], ids=str)
def test_sekv_bytes_are_those_of_the_ledger(tiny, budget):
    plan = planner.plan_memory(build_method("sekv"), attach(tiny), Budget(budget), CONTEXT)
    (device, host), ledger = measured(tiny, "sekv", budget)
    assert sum(plan.device.values()) == pytest.approx(device, rel=TOLERANCE)
    resident = sum(value for name, value in plan.host.items() if not name.startswith("room"))
    assert resident == pytest.approx(host, rel=TOLERANCE)
    assert ledger.h2d_bytes_per_token <= plan.traffic


@pytest.mark.parametrize("budget", [0.1, 0.2], ids=str)
def test_freqdepth_bytes_are_at_most_the_plan_and_near_it(tiny, budget):
    plan = planner.plan_memory(build_method("freqdepth"), attach(tiny), Budget(budget), CONTEXT)
    _, ledger = measured(tiny, "freqdepth", budget)
    assert sum(plan.device.values()) <= Budget(budget).device_bytes(attach(tiny), CONTEXT) * (1 + 1e-9)
    assert ledger.device_bytes <= sum(plan.device.values()) * (1 + TOLERANCE)
    # the window fills while tokens are generated, so right after the prefill it is not full
    assert ledger.device_bytes + plan.device["window and sinks"] >= sum(plan.device.values()) * (1 - TOLERANCE)


@pytest.mark.parametrize("name", sorted(set(method_names()) - {"sekv", "freqdepth"}))
def test_other_methods_stay_within_the_plan(tiny, name):
    budget = 1.0 if name == "full" else 0.4
    plan = planner.plan_memory(build_method(name), attach(tiny), Budget(budget), CONTEXT)
    (device, host), ledger = measured(tiny, name, budget)
    assert device <= sum(plan.device.values()) * (1 + TOLERANCE)
    assert host <= sum(plan.host.values()) * (1 + TOLERANCE) + 1
    assert plan.traffic is None or ledger.h2d_bytes_per_token <= plan.traffic
    assert bool(host) == bool(plan.host)
    if name in ("full", "streaming_llm", "snapkv"):
        assert device == pytest.approx(sum(plan.device.values()), rel=TOLERANCE)


MEASURED = ("quickstart", "sekv_fidelity_bf16", "freqdepth_fidelity_bf16", "baselines_fidelity_bf16")


@pytest.mark.parametrize("file", MEASURED)
def test_the_plan_is_what_the_embedded_backbone_measured(file):
    """Against the ledgers in `results/`: the plan is of the context, they are of the context and its continuation."""
    results = json.loads((ROOT / "results" / f"{file}.json").read_text(encoding="utf-8"))
    own = {key: results["config"]["backbone"][key] for key in ("name", "path", "dtype")}
    # there `auto` was float32: no accelerator
    own["dtype"] = own["dtype"].replace("auto", "float32")
    spec = backbone_shape(BackboneConfig(**own))
    grown = results["config"]["bench"]["fidelity"]["continuation"]
    rows = [
        row for row in results["summary"] if (row["bench"], row["metric"], row["task"]) == ("fidelity", "kl", "all")
    ]
    seen = set()
    for row in rows:
        options = results["config"]["method"][row["method"]]
        plan = planner.plan_memory(
            method_from_config(row["method"], options), spec, Budget(row["budget"]), row["context"]
        )
        device, after = sum(plan.device.values()), 1 + grown / row["context"]
        seen.add(row["method"])
        assert row["device_bytes"] <= device * after * 1.01, row["method"]
        if row["method"] in ("full", "snapkv", "streaming_llm", "sekv", "freqdepth"):
            assert row["device_bytes"] >= device, row["method"]
        if row["method"] == "sekv":
            assert row["host_bytes"] == pytest.approx(sum(plan.host.values()), rel=0.01)
        assert plan.traffic is None or row["h2d_bytes_per_token"] <= plan.traffic, row["method"]
    assert {"full", "sekv"} & seen


def test_every_configured_backbone_has_a_shape():
    from omegaconf import OmegaConf

    from kvcore.cli import config_dir

    for file in (config_dir() / "backbone").glob("*.yaml"):
        path = OmegaConf.load(file).path
        assert path == "tiny" or path in SHAPES, file.name


def test_the_tiny_shape_is_the_models(tiny):
    found, real = backbone_shape(BackboneConfig(name="tiny", path="tiny")), attach(tiny)
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "dtype", "max_positions"):
        assert getattr(found, name) == getattr(real, name)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"Llama-3.1-8B-Instruct.*backbone.path=FOLDER"):
        backbone_shape(BackboneConfig(name="x", path="someone/else"))


def test_the_command_prints_every_part(capsys):
    arguments = ["backbone=llama31_8b", "context=131072", "budget=0.1", "batch=2"]
    planner.main([*arguments, f"results={ROOT / 'results' / 'quickstart.json'}"])
    out = capsys.readouterr().out
    for part in (
        "window",
        "slots",
        "sketch",
        "coarse entries",
        "indices",
        "expansion buffer",
        "token rows",
        "full cache",
    ):
        assert part in out
    assert "32,768.0" in out  # two full caches of 131,072 tokens: 2 x 16 GiB
    assert "upper bound" in out and "measured: " in out
    planner.main(["backbone=llama31_8b", "context=32768", "method=[freqdepth,snapkv]", "budget=0.26"])
    out = capsys.readouterr().out
    assert all(part in out for part in ("coefficients", "bases", "scales", "residuals", "snapkv, budget 0.26"))


def test_mistakes_are_one_message():
    command = [sys.executable, str(ROOT / "scripts" / "plan_memory.py"), "backbone=llama31_8b"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and ran.stderr.startswith("error: ") and "context=131072" in ran.stderr
