"""The contract of every registered method: each rule of the field reports that says "every method", over the registry.

A new method joins by being registered. Row names (A1, C2, ...) are those of the field reports.
Legend: n prompt tokens, q tokens of a decode step.
"""

import copy
import importlib
import itertools

import pytest
import torch
from contract_cases import (
    attempt,
    fed,
    generate,
    left_padded,
    live_storages,
    prefilled,
    stored,
    stored_of_row,
    token_ids,
)

import kvcore.baselines  # noqa: F401 - registers the methods
from kvcore.attention import prefill
from kvcore.baselines.eviction import EvictingLayer
from kvcore.budget import Budget
from kvcore.exact import ExactLayer
from kvcore.method import build_method, method_class, method_names
from kvcore.tiny import build_tiny

pytestmark = pytest.mark.versions


for _package in ("sekv", "freqdepth"):
    try:
        importlib.import_module(f"{_package}.cache")
    except ImportError:
        continue

NAMES = method_names()
# methods that keep the whole cache by definition: no byte budget to hold
UNBOUNDED = [n for n in NAMES if method_class(n).reference_only or getattr(method_class(n), "ignores_budget", False)]
BOUNDED = [n for n in NAMES if n not in UNBOUNDED]
# prefills alone and in a batch differ by fp32 noise, enough to move an 8-bit code by one level (measured: 0.004 in a
# logit, 1e-5 with exact rows), so that comparison uses exact rows
SOLO_OPTIONS = {"sekv": {"row_bits": 0}}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models():
    """Tiny models by their number of layers."""
    small = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}
    return {layers: build_tiny(num_hidden_layers=layers, **small)[0] for layers in (1, 2, 4)}


@pytest.fixture
def model(models):
    return models[4]


@pytest.mark.parametrize("name", NAMES)
def test_full_budget_equals_stock(model, name):
    """Standing rule: budget=1.0 gives the full cache's tokens, alone and in a left-padded batch."""
    ids, mask = left_padded([token_ids(1, n, n)[0] for n in (9, 40)])
    stock = generate(model, ids, None, mask, max_new_tokens=12)
    cache = build_method(name).new_cache(model, 1.0)
    assert torch.equal(generate(model, ids, cache, mask, max_new_tokens=12), stock)
    solo = build_method(name).new_cache(model, 1.0)
    assert torch.equal(generate(model, ids[1:], solo, max_new_tokens=12), stock[1:])


@pytest.mark.parametrize("name", NAMES)
def test_a1_every_prompt_is_compressed_and_reset_leaves_nothing(model, name):
    method, cache = build_method(name), None
    for seed in range(3):
        ids = token_ids(1, 60, seed)
        cache, logits = prefilled(model, name, ids, method=method)
        fresh, fresh_logits = prefilled(model, name, ids)
        assert cache.memory_bytes() == fresh.memory_bytes()
        assert torch.equal(logits, fresh_logits)
    more = token_ids(1, 6, 9)
    expected = fed(model, fresh, more)
    assert torch.equal(fed(model, cache, more), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not live_storages([cache.layers, cache.stored_states()])
    assert cache.ledger.device_bytes == cache.ledger.decode_tokens == 0
    prefill(model, cache, ids)
    assert torch.equal(fed(model, cache, more), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a2_short_prompts_and_tight_budgets(models, name):
    reached = 0
    for layers, length, budget in itertools.product((1, 2, 4), (1, 2, 3, 8), (0.01, 0.05, 0.5, 1.0)):
        model = models[layers]
        done = attempt(model, name, budget, token_ids(1, length))
        if done is None:  # a method may refuse, naming what it can reach
            continue
        reached += 1
        cache, logits = done
        assert logits.isfinite().all()
        assert fed(model, cache, token_ids(1, 1, 1)).isfinite().all()
        assert all(float(layer.attended) >= 1 for layer in cache.layers)
    assert reached >= 12  # the whole cache at the least
    with pytest.raises(ValueError, match="at least one token"):
        prefill(models[1], build_method(name).new_cache(models[1], 0.5), token_ids(1, 0))


@pytest.mark.parametrize("name", NAMES)
def test_a3_step_lengths_and_attention_backends(model, name):
    ids, more = token_ids(1, 60), token_ids(1, 16, 1)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    _, full_logits = prefilled(model, "full", ids)
    exact = model(torch.cat([ids, more], dim=1)).logits[:, 60:]
    whole = build_method(name).new_cache(model, 1.0)
    prefill(model, whole, ids)
    start, logits = prefilled(model, name, ids)
    twin, _ = prefilled(eager, name, ids)
    torch.testing.assert_close(logits, full_logits, atol=1e-4, rtol=1e-4)
    for step in (1, 2, 16):
        one, other, unbounded = copy.deepcopy(start), copy.deepcopy(twin), copy.deepcopy(whole)
        torch.testing.assert_close(fed(model, one, more, step), fed(eager, other, more, step), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(fed(model, unbounded, more, step), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a5_one_context_many_questions_and_continuation(model, name):
    context = token_ids(1, 60)
    base, _ = prefilled(model, name, context)
    before = [tensor.clone() for tensor in stored(base)]
    questions = [token_ids(1, 3, 1), token_ids(1, 5, 2), token_ids(1, 3, 1)]
    answers = [generate(model, torch.cat([context, q], dim=1), copy.deepcopy(base)) for q in questions]
    assert torch.equal(answers[0], answers[2])
    assert all(torch.equal(a, b) for a, b in zip(before, stored(base), strict=True))
    fresh, _ = prefilled(model, name, context)
    assert torch.equal(generate(model, torch.cat([context, questions[1]], dim=1), fresh), answers[1])

    whole = generate(model, torch.cat([context, questions[0]], dim=1), copy.deepcopy(base), max_new_tokens=16)
    cache = copy.deepcopy(base)
    half = generate(model, torch.cat([context, questions[0]], dim=1), cache)
    assert torch.equal(generate(model, half, cache), whole)
    by_hand, logits = copy.deepcopy(base), None
    logits = fed(model, by_hand, questions[0], step=3)
    tokens = [logits[:, -1:].argmax(-1)]
    for _ in range(15):
        tokens.append(fed(model, by_hand, tokens[-1])[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(tokens, dim=1), whole[:, -16:])


@pytest.mark.parametrize("name", NAMES)
def test_b1_positions_are_logical(model, name):
    ids, seen = token_ids(1, 100), []
    cache, _ = prefilled(model, name, ids)
    full, _ = prefilled(model, "full", ids)
    for layer, exact in zip(cache.layers, full.layers, strict=True):
        if isinstance(layer, EvictingLayer) and type(layer).compress is EvictingLayer.compress:
            # keys stay at their original positions
            distance = torch.cdist(layer.keys[0], exact.keys[0], compute_mode="donot_use_mm_for_euclid_dist")
            assert float((distance.amin(-1) * layer.priority[0].isfinite()).max()) < 1e-4
    hook = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    generate(model, torch.cat([ids, token_ids(1, 1, 3)], dim=1), cache, max_new_tokens=3)
    hook.remove()
    assert [int(position) for position in seen] == [100, 101, 102]
    assert cache.logical_length == cache.get_seq_length() == 103


@pytest.mark.parametrize("name", NAMES)
def test_c1_left_padded_rows_equal_solo_runs(model, name):
    prompts = [token_ids(1, n, n)[0] for n in (7, 23)]
    ids, mask = left_padded(prompts)
    cache, _ = prefilled(model, name, ids, mask)
    share = cache.budget.value
    out = generate(model, ids, build_method(name).new_cache(model, share), mask)
    for row, prompt in enumerate(prompts):
        solo = generate(model, prompt[None], build_method(name).new_cache(model, share))
        assert torch.equal(out[row, ids.shape[1] :], solo[0, len(prompt) :]), f"row {row}"
    with pytest.raises(NotImplementedError, match="left padding"):
        prefill(model, build_method(name).new_cache(model, share), ids, mask.flip(1))


@pytest.mark.parametrize("name", NAMES)
def test_c2_rows_do_not_mix(model, name):
    prompts = [token_ids(1, n, n)[0] for n in (33, 20, 48)]
    more = token_ids(3, 4, 5)
    noise_free = build_method(name, **SOLO_OPTIONS.get(name, {}))
    cache, _ = prefilled(model, name, *left_padded(prompts), method=noise_free)
    logits = fed(model, cache, more)
    share = cache.budget.value
    for row, prompt in enumerate(prompts):
        solo, _ = prefilled(model, name, prompt[None], budgets=(share,), method=noise_free)
        alone = fed(model, solo, more[row : row + 1])[0]
        torch.testing.assert_close(alone, logits[row], atol=1e-3, rtol=1e-3)
    cache, _ = prefilled(model, name, *left_padded(prompts))
    logits = fed(model, cache, more)
    share = cache.budget.value
    prompts[1] = token_ids(1, 20, 77)[0]
    changed, _ = prefilled(model, name, *left_padded(prompts), budgets=(share,))
    assert torch.equal(fed(model, changed, more)[[0, 2]], logits[[0, 2]])
    for row in (0, 2):
        for old, new in zip(stored_of_row(cache, row, 3), stored_of_row(changed, row, 3), strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("name", NAMES)
def test_d1_beams_reorder_everything(model, name):
    ids, mask = left_padded([token_ids(1, n, n)[0] for n in (33, 20, 48)])
    cache, _ = prefilled(model, name, ids, mask)
    fed(model, cache, token_ids(3, 3, 4))
    before, order = [stored_of_row(cache, row, 3) for row in range(3)], torch.tensor([2, 0, 1])
    twin = copy.deepcopy(cache)
    cache.reorder_cache(order)
    for row, source in enumerate(order.tolist()):
        for old, new in zip(before[source], stored_of_row(cache, row, 3), strict=True):
            assert torch.equal(old, new)
    more = token_ids(3, 3, 5)
    assert torch.equal(fed(model, cache, more[order]), fed(model, twin, more)[order])
    beams = {"num_beams": 3, "num_return_sequences": 3}
    whole = build_method(name).new_cache(model, 1.0)
    assert torch.equal(generate(model, ids, whole, mask, **beams), generate(model, ids, None, mask, **beams))
    share = cache.budget.value
    several = generate(
        model, ids, build_method(name).new_cache(model, share), mask, do_sample=True, num_return_sequences=3
    )
    assert several.shape == (9, ids.shape[1] + 8)


@pytest.mark.parametrize("name", NAMES)
def test_d2_prompt_lookup_is_refused_or_equal(model, name):
    ids = token_ids(1, 12).repeat(1, 4)
    share = prefilled(model, name, ids)[0].budget.value
    plain = generate(model, ids, build_method(name).new_cache(model, share))
    looked_up, refusal = plain, ""
    try:
        looked_up = generate(model, ids, build_method(name).new_cache(model, share), prompt_lookup_num_tokens=3)
    except NotImplementedError as error:
        refusal = str(error)
    assert torch.equal(looked_up, plain)
    assert not refusal or (name in refusal and "prompt-lookup" in refusal)


@pytest.mark.parametrize("name", NAMES)
def test_f1_bytes_are_those_of_live_storages(model, name):
    cache, _ = prefilled(model, name, token_ids(2, 120))
    for _ in range(4):
        fed(model, cache, token_ids(2, 1))
        assert sum(live_storages([cache.layers, cache.stored_states()]).values()) == sum(cache.memory_bytes())
    whole, _ = prefilled(model, name, token_ids(1, 120), budgets=(1.0,))
    if all(isinstance(layer, ExactLayer) for layer in whole.layers):
        keys_and_values = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
        assert keys_and_values == whole.spec.full_bytes(120)  # 2 KV heads, not 8 query heads


@pytest.mark.parametrize("name", BOUNDED)
def test_f2_budget_is_met(model, name):
    met = 0
    for budget in (0.05, 0.1, 0.2, 0.5):
        done = attempt(model, name, budget, token_ids(1, 512))
        if done is None:
            continue
        met += 1
        cache, _ = done
        fed(model, cache, token_ids(1, 12, 1), step=3)
        assert cache.ledger.device_share <= budget
    assert met, f"{name} meets no budget up to 0.5 at 512 tokens"


@pytest.mark.parametrize("name", BOUNDED)
def test_f3_cap_holds_through_a_long_generation(models, name):
    model, cap = models[2], 128
    cache, _ = prefilled(model, name, token_ids(1, 64), budgets=(cap,))
    for step in range(64):
        fed(model, cache, token_ids(1, 8, step), step=8)
        device_bytes, _ = cache.memory_bytes()
        assert device_bytes <= Budget(cap).device_bytes(cache.spec, cache.logical_length), step
    assert cache.logical_length == 64 + 512
