"""The attention boundary: bypasses and wrong use are errors, caches do not mix, nothing leaks after a failure."""

import json
import logging
import subprocess
import sys
import threading

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from foundation_cases import SMALL, feed, greedy, left_padded, new_cache, stock_model, tiny_model, token_ids
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvcore.attention
from kvcore.attention import active_cache, active_input_ids, attach, cache_argument, prefill
from kvcore.budget import Budget
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.tiny import build_tiny

pytestmark = pytest.mark.versions


@pytest.fixture
def fresh():
    """A model that a test may spoil."""
    return build_tiny(**SMALL)[0]


def test_l2_one_bypassed_layer_is_an_error_with_the_counts(fresh):
    cache = new_cache(fresh)
    attention = fresh.model.layers[2].self_attn
    whole, attention.forward = attention.forward, lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(RuntimeError, match="saw 3 attention calls and the cache 3 updates in a forward of 4 layers"):
        prefill(fresh, cache, token_ids(1, 10))
    attention.forward = whole
    assert active_cache() is None


def test_l2_an_attention_implementation_switched_behind_our_back_is_an_error(fresh):
    cache = new_cache(fresh)
    fresh.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="saw 0 attention calls"):
        prefill(fresh, cache, token_ids(1, 10))


def test_l2_a_cache_on_a_model_that_was_not_attached_is_an_error(fresh, llama):
    cache = new_cache(llama)
    with pytest.raises(RuntimeError, match="Attach the model first"):
        fresh(token_ids(1, 10), **cache_argument(cache))


@pytest.mark.parametrize(
    ("package", "version"),
    [
        *(("transformers", version) for version in ("4.57.0", "5.25.0", "6.0.0")),
        *(("torch", version) for version in ("2.8.0", "2.14.0+cu130")),
    ],
)
def test_l2_a_version_outside_the_tested_range_is_warned_about(fresh, monkeypatch, caplog, package, version):
    monkeypatch.setattr(getattr(kvcore.attention, package), "__version__", version)
    with caplog.at_level(logging.WARNING):
        attach(fresh)
    assert f"{package} {version} is outside the tested range" in caplog.text


@pytest.mark.parametrize(("package", "version"), [("transformers", "5.24.1"), ("torch", "2.13.0+cpu")])
def test_l2_a_tested_version_is_not_warned_about(fresh, monkeypatch, caplog, package, version):
    monkeypatch.setattr(getattr(kvcore.attention, package), "__version__", version)
    other = {"transformers": "torch", "torch": "transformers"}[package]
    monkeypatch.setattr(getattr(kvcore.attention, other), "__version__", kvcore.attention.TESTED[other][0])
    with caplog.at_level(logging.WARNING):
        attach(fresh)
    assert "outside the tested range" not in caplog.text


def test_every_forward_reaches_every_layer_once(llama):
    seen = []

    class Counting(ExactLayer):
        def attend(self, query, key, value, scale, tokens):
            seen.append((self.layer_idx, query.shape[2]))
            return super().attend(query, key, value, scale, tokens)

    spec = attach(llama)
    cache = CompressedCache(spec, Budget(1.0), lambda: [Counting(spec, Budget(1.0), i) for i in range(4)], "counting")
    prefill(llama, cache, token_ids(1, 10))
    assert seen == []
    feed(llama, cache, token_ids(1, 3), step=3)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_e1_an_unlisted_architecture_is_refused_by_name():
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    with pytest.raises(NotImplementedError, match="'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"):
        attach(AutoModelForCausalLM.from_config(config))


def test_attach_twice_gives_the_same_shape_and_one_hook_pair(fresh):
    assert attach(fresh) is attach(fresh)
    assert len(fresh.model._forward_hooks) == len(fresh.model._forward_pre_hooks) == 1


def test_e1_queries_and_keys_are_the_models_own_after_norm_and_rope(qwen3):
    captured = {}

    def spy(module, query, key, value, *args, **kwargs):
        captured[module.layer_idx] = key
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("spy", spy)
    stock, ids = build_tiny(model_type="qwen3", **SMALL)[0], token_ids(1, 30)
    stock.set_attn_implementation("spy")
    stock(ids)
    cache = new_cache(qwen3)
    prefill(qwen3, cache, ids)
    for layer in cache.layers:
        torch.testing.assert_close(layer.keys, captured[layer.layer_idx], atol=1e-5, rtol=1e-5)


def test_two_caches_interleaved_on_one_model_do_not_mix(llama):
    prompts, more = [token_ids(1, 30, 1), token_ids(1, 45, 2)], token_ids(1, 6, 3)
    alone = []
    for ids in prompts:
        cache = new_cache(llama, "streaming_llm", 0.25)
        prefill(llama, cache, ids)
        alone.append(feed(llama, cache, more))
    caches = [new_cache(llama, "streaming_llm", 0.25) for _ in prompts]
    for cache, ids in zip(caches, prompts, strict=True):
        prefill(llama, cache, ids)
    steps = [[feed(llama, cache, token) for cache in caches] for token in more.split(1, dim=1)]
    for index, expected in enumerate(alone):
        assert torch.equal(torch.cat([step[index] for step in steps], dim=1), expected)


def test_threads_with_their_own_caches_do_not_mix(llama):
    prompts = [token_ids(1, 20 + 7 * index, index) for index in range(4)]
    expected = [greedy(llama, ids, new_cache(llama, "streaming_llm", 0.25)) for ids in prompts]
    got, errors = {}, []

    def work(index):
        try:
            for _ in range(2):
                got[index] = greedy(llama, prompts[index], new_cache(llama, "streaming_llm", 0.25))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(got[index], expected[index]) for index in range(4))


def test_c1_right_padding_is_refused(llama):
    ids, mask = left_padded([20, 9])
    with pytest.raises(NotImplementedError, match="only left padding is supported"):
        greedy(llama, ids, new_cache(llama), mask.flip(1))


def test_a_row_of_nothing_but_padding_is_refused(llama):
    ids, mask = left_padded([20, 9])
    mask[1] = 0
    with pytest.raises(ValueError, match="at least one token that is not padding"):
        prefill(llama, new_cache(llama), ids, mask)


def test_a2_an_empty_prompt_is_refused(llama):
    for run in (prefill, lambda model, cache, ids: model(ids, **cache_argument(cache))):
        with pytest.raises(ValueError, match="at least one token; received 0"):
            run(llama, new_cache(llama), token_ids(1, 0))


def test_more_tokens_than_the_model_was_built_for_are_refused():
    model = tiny_model("llama", max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"built for 64 tokens; this run needs 65\. Shorten"):
        prefill(model, new_cache(model), token_ids(1, 65))
    cache = new_cache(model)
    with pytest.raises(ValueError, match="this run needs 65"):
        greedy(model, token_ids(1, 60), cache, new=10)
    assert active_cache() is None


def test_a_second_prefill_into_a_used_cache_is_refused(llama):
    cache = new_cache(llama)
    prefill(llama, cache, token_ids(1, 10))
    with pytest.raises(ValueError, match=r"this one holds 10 tokens \(call reset"):
        prefill(llama, cache, token_ids(1, 10))


@pytest.mark.parametrize("where", ["before", "inside"])
def test_nothing_stays_active_after_a_failure(fresh, where):
    cache, ids = new_cache(fresh), token_ids(1, 10)
    if where == "before":
        with pytest.raises(ValueError, match="at least one token"):
            fresh(ids[:, :0], **cache_argument(cache))
    else:
        handle = fresh.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("broken")))
        with pytest.raises(OSError, match="broken"):
            fresh(ids, **cache_argument(cache))
        handle.remove()
    assert active_cache() is None and active_input_ids() is None
    assert kvcore.attention._active.stack == []
    cache.reset()
    prefill(fresh, cache, ids)
    assert cache.logical_length == 10


def test_accelerate_device_hooks_do_not_hide_the_cache(fresh):
    for module in (fresh, fresh.model, *fresh.model.layers):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    ids, mask = left_padded([20, 9])
    assert torch.equal(greedy(fresh, ids, new_cache(fresh), mask), greedy(stock_model(), ids, None, mask))


def test_input_embeddings_work_as_well_as_ids(llama):
    ids = token_ids(1, 20)
    cache, other = new_cache(llama), new_cache(llama)
    logits = llama(inputs_embeds=llama.get_input_embeddings()(ids), **cache_argument(cache)).logits
    assert torch.equal(logits, llama(ids, **cache_argument(other)).logits)


def test_k1_import_has_no_side_effects_and_needs_no_gpu():
    program = (
        "import json, torch, transformers.models.llama.modeling_llama as m; before = m.LlamaAttention.forward;"
        "import kvcore.attention, kvcore.kernels, kvcore.baselines, kvcore.cache, sys;"
        "print(json.dumps([m.LlamaAttention.forward is before, torch.cuda.is_initialized(), 'triton' in sys.modules]))"
    )
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(kvcore.attention.__file__).rsplit("/kvcore/", 1)[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    untouched, cuda_started, _ = json.loads(done.stdout.splitlines()[-1])
    assert untouched and not cuda_started
