"""H2O against its algorithm, run token by token with dictionaries."""

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


def literal_scores(row, head, num_tokens):
    """Accumulated attention of every prompt token, from every query of the prompt."""
    scores = dict.fromkeys(range(num_tokens), 0.0)
    for query in range(num_tokens):
        for token, weight in group_mean(row, head, query).items():
            scores[token] += weight
    return scores


def literal_choice(scores, capacity):
    """Positions kept of a dictionary of scores: the newest half, and the highest scores of the rest."""
    tokens = sorted(scores)
    recent = tokens[len(tokens) - capacity // 2 :]
    rest = sorted(set(tokens) - set(recent), key=lambda token: -scores[token])
    return set(recent) | set(rest[: capacity - len(recent)])


@pytest.mark.parametrize("chunk", [None, 11])
def test_prompt_choice_equals_the_algorithm(chunk):
    rows, prompt = [make_row(40, 1), make_row(40, 2)], [40, 27]
    (layer,) = make_layers("h2o", 0.4, scope="layer")
    prefill_layer(layer, rows, prompt, chunk)
    for index, (row, length) in enumerate(zip(rows, prompt, strict=True)):
        for head in range(NUM_KV_HEADS):
            expected = literal_choice(literal_scores(row, head, length), layer.capacity(length))
            assert kept(layer, index, head, row) == expected
    assert not layer._mass  # scores of dropped tokens are gone with the prompt


@pytest.mark.parametrize("count", [1, 3])
def test_decoding_evicts_by_accumulated_scores(count):
    row, length, cap = make_row(64, 3), 34, 16
    (layer,) = make_layers("h2o", cap, scope="layer")
    prefill_layer(layer, [row], [length])
    scores = []
    for head in range(NUM_KV_HEADS):
        every = literal_scores(row, head, length)
        scores.append({token: every[token] for token in literal_choice(every, cap)})
    for first in range(length, 64, count):
        output = step(layer, row, first, count)
        for offset in range(count):
            position = first + offset
            visible = [sorted(s) + list(range(first, position + 1)) for s in scores]
            expected = torch.stack([literal_output(row, q, position, visible[q // 2]) for q in range(NUM_HEADS)])
            torch.testing.assert_close(output[:, offset], expected, atol=1e-4, rtol=1e-4)
        for head in range(NUM_KV_HEADS):
            old, added = sorted(scores[head]), dict.fromkeys([*scores[head], *range(first, first + count)], 0.0)
            for position in range(first, first + count):
                for token, weight in group_mean(row, head, position, [*old, *range(first, position + 1)]).items():
                    added[token] += weight
            total = {token: scores[head].get(token, 0.0) + added[token] for token in added}
            scores[head] = {token: total[token] for token in literal_choice(total, cap)}
            assert kept(layer, 0, head, row) == set(scores[head])


def test_positions_and_scores_are_in_the_budget():
    (layer,) = make_layers("h2o", 0.5)
    assert layer.entry_bytes == layer.spec.entry_bytes + 4 + 4
    prefill_layer(layer, [make_row(100)], [100])
    assert sum(t.nbytes for t in layer.tensors()) <= 0.5 * 100 * 2 * layer.spec.entry_bytes + 8  # + the row's length


def test_bad_option_names_the_value():
    with pytest.raises(ValueError, match=r"recent_share.*1\.5"):
        build_method("h2o", recent_share=1.5)
