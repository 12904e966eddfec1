"""KIVI against a literal reading of section 3.2 of https://arxiv.org/abs/2402.02750, and field report A4."""

import pytest
import torch
from retrieval_cases import (
    HEAD_DIM,
    NUM_KV_HEADS,
    build_layers,
    feed,
    generate,
    literal_attention,
    make_case,
)

from kvcore.attention import attach
from kvcore.baselines.kivi_store import Setting
from kvcore.budget import Budget, UnreachableBudgetError
from kvcore.method import build_method
from kvcore.tiny import build_tiny


def literal_group(numbers, bits):
    """Quantise and restore a list of numbers; scale and zero point as stored, in fp16."""
    low, high = min(numbers), max(numbers)
    scale = float(torch.tensor(max((high - low) / (2**bits - 1), 1e-8)).clamp_min(torch.finfo(torch.half).tiny).half())
    zero = float(torch.tensor(low).half())
    return [zero + scale * min(max(round((x - zero) / scale), 0), 2**bits - 1) for x in numbers]


def literal_cache(case, length, setting):
    """Keys and values [Hkv, n, d] as KIVI would give them back after `length` tokens."""
    keys, values = case.keys[:, :length].clone(), case.values[:, :length].clone()
    for head in range(NUM_KV_HEADS):
        for start in range(0, length - length % setting.residual, setting.group_size):
            for channel in range(HEAD_DIM):
                group = keys[head, start : start + setting.group_size, channel].tolist()
                keys[head, start : start + setting.group_size, channel] = torch.tensor(
                    literal_group(group, setting.bits)
                )
        for token in range(length - min(setting.residual, length)):
            size = min(setting.group_size, HEAD_DIM)
            for start in range(0, HEAD_DIM, size):
                group = values[head, token, start : start + size].tolist()
                values[head, token, start : start + size] = torch.tensor(literal_group(group, setting.bits))
    return keys, values


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outputs_equal_the_paper_formula(bits):
    case = make_case(prompt=77, steps=6)
    setting = Setting(bits, 16, 32)
    layer = build_layers("kivi", 0.9, [case], bits=bits, group_size=16, residual=32)
    for offset in range(6):
        token = case.prompt + offset
        keys, values = literal_cache(case, token, setting)
        keys = torch.cat([keys, case.keys[:, token : token + 1]], dim=1)
        values = torch.cat([values, case.values[:, token : token + 1]], dim=1)
        entries = [[(keys[head, t], values[head, t], 1.0) for t in range(token + 1)] for head in range(NUM_KV_HEADS)]
        output = feed(layer, [case], offset)[0, :, 0]
        torch.testing.assert_close(output, literal_attention(case, token, entries), atol=1e-4, rtol=1e-4)


def test_a4_exact_part_is_the_documented_one_at_every_step():
    residual, case = 32, make_case(prompt=45, steps=512)
    layer = build_layers("kivi", 0.9, [case], bits=2, group_size=16, residual=residual)
    for offset in range(-1, 512):
        if offset >= 0:
            feed(layer, [case], offset)
        length, store = case.prompt + offset + 1, layer.stores[0]
        exact_keys, exact_values = length % residual, min(residual, length)
        assert store.key_tail.tokens.shape[2] == exact_keys
        assert store.value_tail.tokens.shape[2] == exact_values <= residual + 16
        assert torch.equal(store.key_tail.tokens[0], case.keys[:, length - exact_keys : length])
        assert torch.equal(store.value_tail.tokens[0], case.values[:, length - exact_values : length])
        assert store.keys.num_tokens == length - exact_keys
        assert store.values.num_tokens == length - exact_values


def test_a4_shorter_than_the_residual_is_the_full_cache():
    ids = torch.randint(5, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    full, _ = generate("full", 1.0, ids, new=50)
    quantised, _ = generate("kivi", 0.5, ids, new=50, bits=2, residual=128)
    assert torch.equal(full, quantised)


def test_codes_are_packed_and_bytes_are_as_planned():
    case = make_case(prompt=300, steps=1)
    layer = build_layers("kivi", 0.5, [case], bits=2)
    store, setting = layer.stores[0], Setting(2, 32, 128)
    assert store.keys.codes.dtype == torch.uint8
    assert store.keys.codes.numel() == NUM_KV_HEADS * HEAD_DIM * 256 * 2 // 8
    held = sum(t.nbytes for t in layer.tensors()) - store.lengths.nbytes - 2 * store.key_tail.counts.nbytes
    assert held == setting.bytes(300, layer.spec)


def test_rows_of_different_settings_equal_their_solo_runs():
    cases = [make_case(prompt=700, steps=40, seed=1), make_case(prompt=290, steps=40, seed=2)]
    together = build_layers("kivi", 0.28, cases)
    alone = [build_layers("kivi", 0.28, [case]) for case in cases]
    assert len(together.stores) == 2
    for offset in range(0, 40, 2):
        output = feed(together, cases, offset, count=2)
        for row, case in enumerate(cases):
            expected = feed(alone[row], [case], offset, count=2)
            torch.testing.assert_close(output[row : row + 1], expected, atol=1e-5, rtol=1e-5)


def test_budget_in_tokens_moves_rows_to_narrower_settings():
    cases = [make_case(prompt=50, steps=240, seed=1), make_case(prompt=40, steps=240, seed=2)]
    layer = build_layers("kivi", 64, cases)
    seen = []
    for offset in range(240):
        feed(layer, cases, offset)
        length = [case.prompt + offset + 1 for case in cases]
        rows = [next(s for s in layer.stores if s.lengths[row] == n) for row, n in enumerate(length)]
        seen.append(rows[0].setting.bits)
        for store, n in zip(rows, length, strict=True):
            share = store.setting.bytes(n, layer.spec) / (2 * n * HEAD_DIM * 4 * NUM_KV_HEADS)
            assert share <= Budget(64).share(n)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 1


@pytest.mark.parametrize(("budget", "bits"), [(0.5, 8), (0.3, 4), (0.2, 3)])
def test_budget_chooses_the_widest_bits(budget, bits):
    case = make_case(prompt=600, steps=0)
    assert build_layers("kivi", budget, [case]).stores[0].setting.bits == bits


def test_an_unreachable_budget_names_the_smallest_one():
    model, _ = build_tiny()
    with pytest.raises(UnreachableBudgetError, match="the smallest it can reach here is") as error:
        build_method("kivi").new_cache(model, budget=0.05)
    assert 0.05 < error.value.smallest < 0.2
    with pytest.raises(UnreachableBudgetError):
        build_method("kivi", bits=8).new_cache(model, budget=0.2)


def test_options_out_of_range_are_refused():
    attach(build_tiny()[0])
    with pytest.raises(ValueError, match="bits must be null or one of"):
        build_method("kivi", bits=5)
    with pytest.raises(ValueError, match="residual must be a multiple of group_size=32"):
        build_method("kivi", residual=100)
