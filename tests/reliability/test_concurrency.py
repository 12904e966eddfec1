"""Several at once: runs into one folder, caches on one model, threads; and attention replaced behind our back."""

from __future__ import annotations

import copy
import functools
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from contract_cases import fed, prefilled, token_ids
from evaluation_cases import toy_plan
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import freqdepth
import kvcore.attention
import kvcore.baselines
import sekv
from kvcore.attention import NAME, attach, attention_forward, cache_argument, prefill
from kvcore.bench.runner import evaluate
from kvcore.method import build_method, method_names
from kvcore.tiny import build_tiny

pytestmark = pytest.mark.versions
REGISTERED = (kvcore.baselines, sekv, freqdepth)
METHODS = method_names()
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PROMPTS = [token_ids(1, 48, 1), token_ids(1, 61, 2)]
MORE = [token_ids(1, 5, 3), token_ids(1, 5, 4)]


@functools.cache
def model():
    return build_tiny(**SMALL, initializer_range=0.3, eos_token_id=None)[0]


@pytest.fixture
def fresh():
    return build_tiny(**SMALL, eos_token_id=None)[0]


@pytest.mark.parametrize("name", METHODS)
def test_two_caches_in_turn_on_one_model_equal_each_alone(name):
    with torch.inference_mode():
        first, _ = prefilled(model(), name, PROMPTS[0])
        second, _ = prefilled(model(), name, PROMPTS[1], budgets=(first.budget.value, 0.85))
        alone = [fed(model(), copy.deepcopy(c), more) for c, more in zip((first, second), MORE, strict=True)]
        # chunk by chunk and token by token, in turn
        share = second.budget.value
        again = build_method(name).new_cache(model(), share, prefill_tokens=61)
        model()(input_ids=PROMPTS[1][:, :20], **cache_argument(again))
        turns: list[list[torch.Tensor]] = [[], []]
        for step in range(5):
            turns[0].append(fed(model(), first, MORE[0][:, step : step + 1]))
            if step == 1:
                model()(input_ids=PROMPTS[1][:, 20:], **cache_argument(again))
            turns[1].append(fed(model(), second, MORE[1][:, step : step + 1]))
        for found, expected in zip(turns, alone, strict=True):
            assert torch.equal(torch.cat(found, dim=1), expected)
        undisturbed = build_method(name).new_cache(model(), share, prefill_tokens=61)
        for piece in (PROMPTS[1][:, :20], PROMPTS[1][:, 20:]):
            model()(input_ids=piece, **cache_argument(undisturbed))
        assert torch.equal(fed(model(), again, MORE[0]), fed(model(), undisturbed, MORE[0]))


@pytest.mark.parametrize("name", METHODS)
def test_threads_with_their_own_models_and_caches_do_not_mix(name):
    models = [build_tiny(seed=seed, **SMALL, initializer_range=0.3, eos_token_id=None)[0] for seed in range(2)]

    def work(index: int) -> torch.Tensor:
        with torch.inference_mode():
            cache, _ = prefilled(models[index], name, PROMPTS[index])
            return fed(models[index], cache, MORE[index])

    expected, found, errors = [work(0), work(1)], {}, []

    def thread(index: int) -> None:
        try:
            found[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
    assert all(torch.equal(found[index], expected[index]) for index in range(2))


def children(*works) -> list[int]:
    """Exit codes of works that run at the same time in forked processes."""
    started = []
    for work in works:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            except ValueError as error:
                code = 2 if "another run is writing to" in str(error) else 3
            finally:
                os._exit(code)
        started.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


def test_of_two_evaluations_into_one_folder_one_runs_and_one_is_told(tmp_path):
    codes = children(*[lambda: evaluate(*toy_plan(), tmp_path / "run")] * 2)
    assert 0 in codes and set(codes) <= {0, 2}  # the second may also come after the first has ended
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["samples"]) == 14
    assert len((tmp_path / "run" / "samples.0.jsonl").read_text().splitlines()) == 14


def sweep(root: Path) -> None:
    """A sweep: one folder a job, named by the configuration; a folder in use is passed over."""
    for seed in (1, 2):
        plan, config = toy_plan(seed=seed, limit=2)
        try:
            evaluate(plan, config, root / f"seed{seed}")
        except ValueError as error:
            if "another run is writing to" not in str(error):
                raise


def test_two_sweeps_into_one_root_leave_every_job_whole(tmp_path):
    assert children(lambda: sweep(tmp_path), lambda: sweep(tmp_path)) == [0, 0]
    for seed in (1, 2):
        folder = tmp_path / f"seed{seed}"
        assert len(json.loads((folder / "results.json").read_text())["samples"]) == 4
        assert len((folder / "samples.0.jsonl").read_text().splitlines()) == 4


# --- a transformers that no longer calls the attention function (L2)
def bypass_registry(model, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, sdpa_attention_forward)


def bypass_implementation(model, monkeypatch):
    model.set_attn_implementation("sdpa")


def bypass_hooks(model, monkeypatch):
    decoder = model.get_decoder()
    decoder._forward_hooks.clear()
    decoder._forward_pre_hooks.clear()


def bypass_layer(model, monkeypatch):
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))


@pytest.mark.parametrize("when", ["before the prefill", "before a step"])
@pytest.mark.parametrize("bypass", [bypass_registry, bypass_implementation, bypass_hooks, bypass_layer])
def test_l2_attention_replaced_after_attach_is_an_error(fresh, monkeypatch, bypass, when):
    cache = build_method("streaming_llm").new_cache(fresh, 0.5)
    if when == "before a step":
        prefill(fresh, cache, PROMPTS[0])
        fed(fresh, cache, MORE[0][:, :2])  # steps of one token: the next one looks like those
    bypass(fresh, monkeypatch)
    with pytest.raises(RuntimeError, match=r"attention function saw|was not announced a forward"):
        fed(fresh, cache, MORE[0][:, :1]) if when == "before a step" else prefill(fresh, cache, PROMPTS[0])


def test_l2_the_registry_still_holds_our_function():
    attach(model())
    assert AttentionInterface()[NAME] is attention_forward
