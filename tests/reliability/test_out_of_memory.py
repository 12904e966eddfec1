"""Memory that runs out and forwards that fail half-way: messages name what helps, spoilt caches say so."""

from __future__ import annotations

import pytest
import torch
from evaluation_cases import Calls
from foundation_cases import SMALL, feed, new_cache, token_ids
from omegaconf import OmegaConf
from runs import evaluate_toy, predictions

import kvcore.cache
import kvcore.fanout
from kvcore.attention import prefill
from kvcore.cli import explained, guard
from kvcore.memory import PromptMemoryError, is_out_of_memory
from kvcore.tiny import build_tiny

OUT_OF_MEMORY = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you tried"),
    "host": MemoryError(),
}
LEVERS = ("prefill_chunk", "batch_size", "host", "shorter context")


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("chunk", [None, 8])
def test_memory_that_runs_out_in_prefill_names_the_levers(monkeypatch, kind, chunk):
    model = build_tiny(**SMALL)[0]
    cache, ids, whole, calls = (
        new_cache(model, "streaming_llm", 0.5),
        token_ids(1, 30),
        kvcore.cache.prefill_attention,
        [],
    )

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OUT_OF_MEMORY[kind]
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.cache, "prefill_attention", full)
        with pytest.raises(PromptMemoryError, match="'streaming_llm' read a prompt of 1 x 30 tokens") as caught:
            prefill(model, cache, ids, chunk_size=chunk)
    assert all(lever in str(caught.value) for lever in LEVERS)
    assert not cache._staged, "the prompt's keys and values are let go"
    with pytest.raises(RuntimeError, match=r"failed half-way.*reset\(\)"):
        prefill(model, cache, ids)
    cache.reset()
    fresh = new_cache(model, "streaming_llm", 0.5)
    assert torch.equal(prefill(model, cache, ids), prefill(model, fresh, ids))


def test_other_errors_of_a_prefill_stay_what_they_are(monkeypatch):
    model = build_tiny(**SMALL)[0]

    def broken(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(kvcore.cache, "prefill_attention", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        prefill(model, new_cache(model), token_ids(1, 5))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_memory_that_runs_out_in_an_evaluation_is_one_message_and_keeps_what_is_finished(tmp_path, monkeypatch, capsys):
    expected = predictions(evaluate_toy(tmp_path / "undisturbed"))
    whole, calls = kvcore.fanout.prefill_attention, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 4:  # the third sample of a model of two layers
            raise OUT_OF_MEMORY["device"]
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.fanout, "prefill_attention", full)
        with pytest.raises(SystemExit) as stop:
            guard(lambda _: evaluate_toy(tmp_path / "run"))(OmegaConf.create({}))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in err
    assert "out of memory" in err and all(lever in err for lever in LEVERS)
    with monkeypatch.context() as patch:
        ran = Calls(patch)
        assert predictions(evaluate_toy(tmp_path / "run")) == expected
    assert len(ran.ran) == 10


def test_a_decode_step_that_fails_half_way_spoils_the_cache_and_says_so():
    model = build_tiny(**SMALL)[0]
    cache = new_cache(model)
    prefill(model, cache, token_ids(1, 10))

    def broken(*_):
        raise OSError("broken")

    handle = model.model.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(OSError, match="broken"):
        feed(model, cache, token_ids(1, 1))
    handle.remove()
    with pytest.raises(RuntimeError, match="failed half-way"):
        feed(model, cache, token_ids(1, 1))


def test_what_is_told_about_memory():
    assert "prefill_chunk" in explained(OUT_OF_MEMORY["cpu"])
