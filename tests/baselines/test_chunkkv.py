"""ChunkKV against its algorithms, written out chunk by chunk."""

import copy

import pytest
from evicting_cases import NUM_KV_HEADS, kept, make_layers, make_row, observe, prefill_layer, step
from test_snapkv import literal_votes

from kvcore.method import build_method


def literal_chunks(row, head, num_tokens, window, chunk, capacity):
    """Chunks (lists of positions) before the window, best first, and how many of them fit."""
    prefix = num_tokens - window
    votes = literal_votes(row, head, num_tokens, window)
    chunks = [list(range(start, min(start + chunk, prefix))) for start in range(0, prefix, chunk)]
    chunks.sort(key=lambda tokens: (-sum(votes[t] for t in tokens), tokens[0]))
    return chunks, (capacity - window) // chunk


@pytest.mark.parametrize("chunk", [None, 13])
def test_whole_chunks_equal_the_algorithm(chunk):
    rows, prompt = [make_row(64, 5), make_row(64, 6)], [64, 47]
    layers = make_layers("chunkkv", 0.5, 1, scope="layer", window=6, chunk=5)
    prefill_layer(layers[0], rows, prompt, chunk)
    for index, (row, length) in enumerate(zip(rows, prompt, strict=True)):
        for head in range(NUM_KV_HEADS):
            chunks, fitting = literal_chunks(row, head, length, 6, 5, layers[0].capacity(length))
            expected = {token for tokens in chunks[:fitting] for token in tokens} | set(range(length - 6, length))
            assert kept(layers[0], index, head, row) == expected


def test_choice_is_reused_by_the_next_layers_and_forgotten():
    first, second = make_row(50, 7), make_row(50, 8)
    layers = make_layers("chunkkv", 0.5, 3, scope="layer", window=4, chunk=5, reuse_layers=2)
    for layer, row in zip(layers, (first, second, second), strict=True):
        layer.build(observe(layer, [row], [50]))
    for head in range(NUM_KV_HEADS):
        assert kept(layers[1], 0, head, second) == kept(layers[0], 0, head, first)
        assert kept(layers[2], 0, head, second) != kept(layers[1], 0, head, second)
    assert not layers[0].shared.rows  # nothing shared outlives the prefill
    twin = copy.deepcopy(layers)
    assert twin[0].shared is twin[1].shared
    assert twin[0].shared is not layers[0].shared


def test_lowest_chunk_is_evicted_token_by_token():
    row, length, cap = make_row(80, 9), 50, 24
    (layer,) = make_layers("chunkkv", cap, 1, scope="layer", window=4, chunk=5)
    prefill_layer(layer, [row], [length])
    free = cap - 4 - 4 * 5
    for position in range(length, length + free + 7):
        step(layer, row, position)
    for head in range(NUM_KV_HEADS):
        chunks, fitting = literal_chunks(row, head, length, 4, 5, cap)
        assert fitting == 4
        best = {token for tokens in chunks[:2] for token in tokens}
        left = kept(layer, 0, head, row)
        assert best <= left  # the lowest chunk is gone, the next one begun
        assert not set(chunks[3]) & left
        assert len(set(chunks[2]) & left) == 3
        assert len(left) == cap


def test_chunks_shrink_to_a_tiny_budget():
    (layer,) = make_layers("chunkkv", 6, 1, scope="layer", chunk=10)
    prefill_layer(layer, [make_row(30)], [30])
    assert int(layer.priority.isfinite().sum(-1).min()) == 6


@pytest.mark.parametrize(("option", "value"), [("chunk", 0), ("reuse_layers", 0)])
def test_bad_options_name_the_value(option, value):
    with pytest.raises(ValueError, match=f"{option} must be >= 1"):
        build_method("chunkkv", **{option: value})
