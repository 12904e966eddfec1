"""Composition of an evicting method with KIVI's quantisation."""

import pytest
import torch
from retrieval_cases import NUM_KV_HEADS, build_layers, exact_entries, feed, literal_attention, make_case

from kvcore.attention import attach
from kvcore.baselines.kivi_store import Setting
from kvcore.budget import Budget
from kvcore.method import build_method
from kvcore.quant import quantize
from kvcore.tiny import build_tiny

WINDOW = {"eviction": "streaming_llm", "eviction_options": {"num_sinks": 4}}


def test_kept_tokens_are_those_of_the_evicting_method_quantised():
    """With a recency window the kept tokens are known: sinks exact, then a contiguous run of the newest ones."""
    case = make_case(prompt=400, steps=1)
    layer = build_layers("compose", 0.2, [case], bits=4, residual=32, **WINDOW)
    pinned, queue = layer.stores
    assert int(pinned.lengths[0]) == 4
    kept = int(queue.lengths[0])
    assert kept > 0.2 * 400 * 1.5  # quantised, many more tokens than entries
    tokens = list(range(400 - kept, 400))
    keys, values = case.keys[:, tokens].clone(), case.values[:, tokens].clone()
    old_keys, old_values = kept - kept % 32, kept - 32
    keys[:, :old_keys] = quantize(keys[None, :, :old_keys], 4, 32, "tokens").dequantize()[0]
    values[:, :old_values] = quantize(values[None, :, :old_values], 4, 16, "channels").dequantize()[0]
    entries = [
        exact_entries(case, head, [*range(4), 400]) + [(keys[head, i], values[head, i], 1.0) for i in range(kept)]
        for head in range(NUM_KV_HEADS)
    ]
    output = feed(layer, [case], 0)[0, :, 0]
    torch.testing.assert_close(output, literal_attention(case, 400, entries), atol=1e-4, rtol=1e-4)


def test_queue_gives_up_its_lowest_ranks_first_and_keeps_the_budget():
    case = make_case(prompt=300, steps=120)
    layer = build_layers("compose", 0.15, [case], bits=4, **WINDOW)
    spec = layer.spec
    for offset in range(120):
        feed(layer, [case], offset)
        tokens = 300 + offset + 1
        held = sum(t.nbytes for t in layer.tensors())
        assert held <= 1.02 * Budget(0.15).device_bytes(spec, tokens) / spec.num_layers + 64
        queue = layer.stores[1]
        exact = queue.value_tail.tokens[0]
        assert torch.equal(exact, case.values[:, tokens - exact.shape[1] : tokens])
        # what is left of the quantised values is a run that ends where the exact ones begin
        old = int(queue.lengths[0]) - exact.shape[1]
        run = case.values[:, tokens - exact.shape[1] - old : tokens - exact.shape[1]]
        restored = queue.values.dequantize()[0, :, :old]
        assert float((restored - run).abs().max()) < 0.4


@pytest.mark.parametrize("eviction", ["streaming_llm", "snapkv", "h2o", "scissorhands", "pyramidkv", "chunkkv"])
def test_every_eviction_composes(eviction):
    case = make_case(prompt=300, steps=8)
    layer = build_layers("compose", 0.2, [case], eviction=eviction)
    for offset in range(0, 8, 4):
        assert feed(layer, [case], offset, count=4).isfinite().all()


def test_rows_equal_their_solo_runs():
    cases = [make_case(prompt=310, steps=40, seed=1), make_case(prompt=270, steps=40, seed=2)]
    together = build_layers("compose", 0.15, cases)
    alone = [build_layers("compose", 0.15, [case]) for case in cases]
    for offset in range(0, 40, 4):
        output = feed(together, cases, offset, count=4)
        for row, case in enumerate(cases):
            expected = feed(alone[row], [case], offset, count=4)
            torch.testing.assert_close(output[row : row + 1], expected, atol=1e-5, rtol=1e-5)


def test_methods_that_merge_tokens_are_refused():
    with pytest.raises(ValueError, match="keeps tokens as they are; 'quest' does not"):
        build_method("compose", eviction="quest").make_layers(attach(build_tiny()[0]), Budget(0.2))
    with pytest.raises(ValueError, match="unknown method 'snapkw'"):
        build_method("compose", eviction="snapkw")


def test_entries_of_the_budget_fill_its_bytes():
    spec, setting = attach(build_tiny()[0]), Setting(4, 32, 32)
    case = make_case(prompt=600, steps=0)
    layer = build_layers("compose", 0.1, [case], **WINDOW)
    layer_bytes = 0.1 * spec.full_bytes(600) / spec.num_layers
    assert layer_bytes * 0.8 < setting.bytes(int(sum(s.lengths[0] for s in layer.stores)), spec) <= layer_bytes
