"""Scissorhands against its algorithm, run token by token with dictionaries."""

import pytest
import torch
from evicting_cases import (
    NUM_HEADS,
    NUM_KV_HEADS,
    group_mean,
    kept,
    literal_output,
    make_layers,
    make_row,
    prefill_layer,
    step,
)

from kvcore.method import build_method


def literal_counts(row, head, num_tokens, history):
    """How often each prompt token got less than average attention from the newest `history` tokens."""
    counts = dict.fromkeys(range(num_tokens), 0)
    for query in range(max(0, num_tokens - history), num_tokens):
        for token, weight in group_mean(row, head, query).items():
            counts[token] += weight < 1.0 / (query + 1)
    return counts


def literal_choice(counts, capacity, recent):
    """The newest `recent` tokens and, of the rest, those with the lowest counts; of equal counts the newer stays."""
    tokens = sorted(counts)
    safe = tokens[len(tokens) - recent :]
    rest = sorted(set(tokens) - set(safe), key=lambda token: (counts[token], -token))
    return set(safe) | set(rest[: capacity - len(safe)])


@pytest.mark.parametrize("chunk", [None, 11])
def test_prompt_choice_equals_the_algorithm(chunk):
    rows, prompt = [make_row(50, 1), make_row(50, 2)], [50, 31]
    (layer,) = make_layers("scissorhands", 0.4, scope="layer", history=20, recent=4)
    prefill_layer(layer, rows, prompt, chunk)
    for index, (row, length) in enumerate(zip(rows, prompt, strict=True)):
        for head in range(NUM_KV_HEADS):
            expected = literal_choice(literal_counts(row, head, length, 20), layer.capacity(length), 4)
            assert kept(layer, index, head, row) == expected


@pytest.mark.parametrize("drop_share", [0.5, 0.0])
def test_decoding_drops_the_most_ignored(drop_share):
    row, length, cap, recent = make_row(70, 3), 40, 16, 3
    (layer,) = make_layers("scissorhands", cap, scope="layer", history=20, recent=recent, drop_share=drop_share)
    prefill_layer(layer, [row], [length])
    counts = []
    for head in range(NUM_KV_HEADS):
        every = literal_counts(row, head, length, 20)
        counts.append({token: every[token] for token in literal_choice(every, cap, recent)})
    sizes = set()
    for position in range(length, 70):
        output = step(layer, row, position)
        visible = [[*sorted(c), position] for c in counts]
        expected = torch.stack([literal_output(row, q, position, visible[q // 2]) for q in range(NUM_HEADS)])
        torch.testing.assert_close(output[:, 0], expected, atol=1e-4, rtol=1e-4)
        for head in range(NUM_KV_HEADS):
            weights = group_mean(row, head, position, visible[head])
            average = 1.0 / len(weights)
            total = {token: counts[head].get(token, 0) + (weights[token] < average) for token in weights}
            drops = max(1, int(drop_share * cap)) if len(total) > cap else 0
            # the new token is stored after the drop, so it is not a candidate
            old = {token: total[token] for token in total if token != position}
            left = literal_choice(old, len(old) - drops, recent - 1)
            counts[head] = {token: total[token] for token in [*left, position]}
            assert kept(layer, 0, head, row) == set(counts[head])
            sizes.add(len(counts[head]))
    assert max(sizes) == cap
    assert min(sizes) == (cap - cap // 2 + 1 if drop_share else cap)


@pytest.mark.parametrize(("option", "value"), [("history", 0), ("recent", -1), ("drop_share", 1.0)])
def test_bad_options_name_the_value(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        build_method("scissorhands", **{option: value})
