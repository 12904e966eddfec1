"""SnapKV against its formula, written out token by token."""

import pytest
import torch
from evicting_cases import NUM_KV_HEADS, group_mean, kept, literal_output, make_layers, make_row, prefill_layer, step

from kvcore.method import build_method


def literal_votes(row, head, num_tokens, window):
    """Attention that each token before the window received from the window's queries, summed."""
    votes = [0.0] * num_tokens
    for query in range(num_tokens - min(window, num_tokens), num_tokens):
        for token, weight in group_mean(row, head, query).items():
            votes[token] += weight
    return votes


def literal_pooled(votes, kernel, pooling):
    half, out = kernel // 2, []
    for index in range(len(votes)):
        near = votes[max(0, index - half) : index + half + 1]
        out.append(max(near) if pooling == "max" else sum(near) / kernel)
    return out


def literal_kept(row, head, num_tokens, window, kernel, pooling, capacity):
    size = min(window, max(1, capacity // 2), num_tokens)
    scores = literal_pooled(literal_votes(row, head, num_tokens, window)[: num_tokens - size], kernel, pooling)
    order = sorted(range(num_tokens - size), key=lambda token: (-scores[token], token))
    return order[: capacity - size], set(range(num_tokens - size, num_tokens))


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("chunk", [None, 17])
def test_kept_tokens_equal_the_formula(pooling, chunk):
    rows, prompt = [make_row(60, 1), make_row(60, 2)], [60, 41]
    (layer,) = make_layers("snapkv", 0.5, scope="layer", window=8, kernel=5, pooling=pooling)
    prefill_layer(layer, rows, prompt, chunk)
    for index, (row, length) in enumerate(zip(rows, prompt, strict=True)):
        for head in range(NUM_KV_HEADS):
            top, window = literal_kept(row, head, length, 8, 5, pooling, layer.capacity(length))
            assert kept(layer, index, head, row) == set(top) | window


def test_generated_tokens_replace_the_lowest_prompt_tokens():
    row, length, cap = make_row(60, 3), 40, 20
    (layer,) = make_layers("snapkv", cap, scope="layer", window=6, kernel=3)
    prefill_layer(layer, [row], [length])
    best = [literal_kept(row, head, length, 6, 3, "max", cap) for head in range(NUM_KV_HEADS)]
    for position in range(length, 60):
        before = [sorted(kept(layer, 0, head, row)) for head in range(NUM_KV_HEADS)]
        output = step(layer, row, position)
        expected = torch.stack([literal_output(row, q, position, [*before[q // 2], position]) for q in range(4)])
        torch.testing.assert_close(output[:, 0], expected, atol=1e-4, rtol=1e-4)
        for head, (top, window) in enumerate(best):
            generated = position + 1 - length
            left = top[: max(0, len(top) - generated)]
            recent = set(sorted(window)[max(0, generated - len(top)) :])
            assert kept(layer, 0, head, row) == set(left) | recent | set(range(length, position + 1))


def test_scores_never_hold_all_queries():
    (layer,) = make_layers("snapkv", 0.2, window=8)
    prefill_layer(layer, [make_row(200)], [200])
    assert layer._queries is None


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("kernel", 4), ("pooling", "sum")])
def test_bad_options_name_the_value(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        build_method("snapkv", **{option: value})
