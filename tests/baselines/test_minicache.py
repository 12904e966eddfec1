"""MiniCache against its equations, written out token by token."""

import copy
import math

import pytest
import torch
from evicting_cases import GROUP, NUM_HEADS, NUM_KV_HEADS, SCALE, make_layers, make_row, observe, spec

from kvcore.attention import prefill
from kvcore.baselines.layer_pairs import interpolate
from kvcore.budget import Budget, UnreachableBudgetError
from kvcore.method import build_method
from kvcore.tiny import build_tiny


def literal_restored(first, second, t):
    """Eq. 2 and 3 for one token: the states of the lower and the upper layer [d] after merging, and their angle."""
    a, b = first / first.norm(), second / second.norm()
    angle = math.acos(max(-1.0, min(1.0, float(a @ b))))
    shared = (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)
    return first.norm() * shared, second.norm() * shared, angle


def test_interpolation_equals_the_equation_and_survives_parallel_states():
    first, second = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    shared, distance = interpolate(first, second, 0.6)
    for token in range(7):
        low, _, angle = literal_restored(first[token], second[token], 0.6)
        torch.testing.assert_close(shared[token], low / first[token].norm())
        assert float(distance[token]) == pytest.approx(angle / math.pi, abs=1e-5)
    same, apart = interpolate(first, 3 * first, 0.6)
    torch.testing.assert_close(same, first / first.norm(dim=-1, keepdim=True))
    assert float(apart.max()) < 1e-3
    assert interpolate(torch.zeros(1, 4), torch.ones(1, 4), 0.6)[0].isfinite().all()
    assert interpolate(first, -first, 0.5)[0].isfinite().all()


def build_pair(budget, length, **options):
    """The upper two of four layers, merged, and their rows."""
    lower, upper = make_layers("minicache", budget, 4, **options)[2:]
    rows = [make_row(length + 3, 1), make_row(length + 3, 2)]
    prompts = tuple(observe(layer, [row], [length]) for layer, row in zip((lower, upper), rows, strict=True))
    lower.shared.store.build_pair((lower, upper), prompts)
    lower._length = upper._length = length
    return (lower, upper), rows


@pytest.mark.parametrize(("budget", "eviction"), [(0.95, "none"), (0.95, "snapkv"), (0.95, "recency")])
def test_outputs_equal_attention_over_restored_states(budget, eviction):
    length, t = 40, 0.6
    (lower, upper), rows = build_pair(budget, length, eviction=eviction, retention=0.1)
    assert lower.shared is upper.shared
    restored, angles = [[row.keys.clone(), row.values.clone()] for row in rows], torch.zeros(NUM_KV_HEADS, length)
    for head in range(NUM_KV_HEADS):
        for token in range(length):
            for kind in range(2):
                pair = [restored[side][kind][head, token].clone() for side in range(2)]
                low, high, angle = literal_restored(*pair, t)
                restored[0][kind][head, token], restored[1][kind][head, token] = low, high
                angles[head, token] += angle
        for token in angles[head].argsort(descending=True)[:4]:  # the most distinct 10% stay as they are
            for side, row in enumerate(rows):
                restored[side][0][head, token] = row.keys[head, token]
                restored[side][1][head, token] = row.values[head, token]
    for position in range(length, length + 3):
        visible = position + 1
        for side, (layer, row) in enumerate(zip((lower, upper), rows, strict=True)):
            new = slice(position, visible)
            output = layer.attend(
                row.queries[None, :, new], row.keys[None, :, new], row.values[None, :, new], SCALE, visible
            )
            layer._length = visible
            for query in range(NUM_HEADS):
                head = query // GROUP
                logits = [row.queries[query, position] @ restored[side][0][head, i] * SCALE for i in range(visible)]
                weights = torch.softmax(torch.stack(logits), dim=0)
                expected = weights @ restored[side][1][head, :visible]
                torch.testing.assert_close(output[0, query, 0], expected, atol=1e-4, rtol=1e-4)
        for head in range(NUM_KV_HEADS):  # generated tokens are merged when both layers have attended to them
            for kind in range(2):
                pair = [restored[side][kind][head, position].clone() for side in range(2)]
                restored[0][kind][head, position], restored[1][kind][head, position], _ = literal_restored(*pair, t)


def test_both_layers_keep_the_best_of_their_mean_scores():
    from test_snapkv import literal_pooled, literal_votes

    (lower, _), rows = build_pair(0.3, 60, window=4, kernel=3, retention=0.0)
    store = lower.shared.store
    count = store.plan.tokens(60)
    for head in range(NUM_KV_HEADS):
        votes = torch.tensor([literal_votes(row, head, 60, 4) for row in rows]).mean(0).tolist()
        scores = literal_pooled(votes[:56], 3, "max")
        top = sorted(range(56), key=lambda token: (-scores[token], token))[: count - 4]
        norms = {round(float(rows[0].keys[head, token].norm()), 4) for token in [*top, *range(56, 60)]}
        assert {round(float(x), 4) for x in store.side["key_norm_0"][0, head]} == norms


def test_planned_bytes_are_the_measured_ones():
    model, _ = build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=6)
    for share in (0.05, 0.1, 0.2, 0.5):
        cache = build_method("minicache").new_cache(model, share)
        prefill(model, cache, torch.randint(5, 300, (1, 600)))
        assert 0.96 * share <= cache.ledger.device_share <= share


def test_shared_storage_is_counted_and_reordered_once():
    model, _ = build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=4)
    cache = build_method("minicache").new_cache(model, 0.5)
    prefill(model, cache, torch.randint(5, 300, (3, 40)))
    assert len(cache.stored_states()) == 3  # two single layers and one pair
    before = cache.layers[2].shared.store.keys.clone()
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(cache.layers[3].shared.store.keys, before[[2, 0, 1]])
    assert twin.layers[2].shared is twin.layers[3].shared
    assert torch.equal(twin.layers[3].shared.store.keys, before)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 30, 32])
def test_pairs_lie_in_the_deeper_half(num_layers):
    plan = build_method("minicache").plan(spec(num_layers), Budget(0.5))
    assert plan.num_pairs == num_layers // 4
    assert plan.token_share < 1.0 or num_layers < 4


def test_a_budget_beyond_merging_is_refused_without_eviction():
    model, _ = build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=4)
    method = build_method("minicache", eviction="none")
    with pytest.raises(UnreachableBudgetError, match=r"minicache.*0\.3.*eviction") as caught:
        method.new_cache(model, 0.3)
    cache = method.new_cache(model, math.ceil(caught.value.smallest * 100) / 100)
    prefill(model, cache, torch.randint(5, 300, (1, 300)))
    model(torch.randint(5, 300, (1, 40)), cache=cache)
    assert cache.ledger.device_share <= caught.value.smallest
    assert float(cache.layers[0].attended) == pytest.approx(300 + 41 / 2)  # every token is still there


@pytest.mark.parametrize(("option", "value"), [("start", 1.5), ("interpolation", -1.0), ("retention", 2.0)])
def test_bad_options_name_the_value(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        build_method("minicache", **{option: value})
