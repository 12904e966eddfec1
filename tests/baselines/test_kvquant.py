"""KVQuant against a literal reading of sections 3.1-3.5 of https://arxiv.org/abs/2401.18079."""

import numpy as np
import pytest
import torch
from retrieval_cases import HEAD_DIM, NUM_KV_HEADS, build_layers, feed, literal_attention, make_case

from kvcore.baselines.kvquant_store import HISTOGRAM_BINS, nuq_levels
from kvcore.budget import UnreachableBudgetError
from kvcore.method import build_method
from kvcore.rope import shift_positions
from kvcore.tiny import build_tiny

OUTLIERS = 0.1  # so that 32 entries of a token hold some


def literal_levels(entries, weights, count, iterations):
    """Weighted k-means of numbers in [-1, 1], seen through a histogram; levels start at the weighted quantiles."""
    mass = [0.0] * HISTOGRAM_BINS
    for entry, weight in zip(entries, weights, strict=True):
        mass[min(int((entry + 1) / 2 * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += weight
    middle = [(index + 0.5) / HISTOGRAM_BINS * 2 - 1 for index in range(HISTOGRAM_BINS)]
    levels, total = [], 0.0
    for index, weight in enumerate(mass):
        total += weight
        while len(levels) < count and total / sum(mass) >= (len(levels) + 0.5) / count:
            levels.append(middle[index])
    for _ in range(iterations):
        members = [[] for _ in levels]
        for center, weight in zip(middle, mass, strict=True):
            nearest = min(range(count), key=lambda i, c=center: abs(c - levels[i]))
            members[nearest].append((center, weight))
        for index, group in enumerate(members):
            if sum(weight for _, weight in group) > 0:
                levels[index] = sum(c * w for c, w in group) / sum(w for _, w in group)
    return sorted(levels)


def nearest(x, levels):
    return min(levels, key=lambda level: abs(x - level))


def literal_keys(plain, bits):
    """Pre-RoPE keys [H, n, d] restored: percentile range per channel, outliers exact, nearest level."""
    low = np.quantile(plain.numpy(), OUTLIERS / 2, axis=1)
    high = np.quantile(plain.numpy(), 1 - OUTLIERS / 2, axis=1)
    center, radius = (high + low) / 2, (high - low) / 2
    normal = (plain.numpy() - center[:, None]) / radius[:, None]
    inside = np.abs(normal) <= 1
    weights = np.broadcast_to(radius[:, None] ** 2, normal.shape)
    levels = literal_levels(normal[inside].tolist(), weights[inside].tolist(), 2**bits, 10)
    restored = plain.clone()
    for head, token, channel in zip(*np.nonzero(inside), strict=True):
        level = nearest(normal[head, token, channel], levels)
        restored[head, token, channel] = float(level * radius[head, channel] + center[head, channel])
    return restored


def literal_values(values, bits):
    """Values [H, n, d] restored: per token over all heads, the extremes exact, the others by the nearest level."""
    count = round(OUTLIERS / 2 * NUM_KV_HEADS * HEAD_DIM)
    restored, rows = values.clone(), []
    for token in range(values.shape[1]):
        flat = values[:, token].flatten()
        order = flat.argsort().tolist()
        inner = order[count : len(order) - count]
        high, low = float(flat[inner].max()), float(flat[inner].min())
        rows.append((token, flat, inner, (high + low) / 2, (high - low) / 2))
    entries = [(float(flat[i]) - center) / radius for _, flat, inner, center, radius in rows for i in inner]
    weights = [radius**2 for _, _, inner, _, radius in rows for _ in inner]
    levels = literal_levels(entries, weights, 2**bits, 10)
    for token, flat, inner, center, radius in rows:
        new = flat.clone()
        for i in inner:
            new[i] = nearest((float(flat[i]) - center) / radius, levels) * radius + center
        restored[:, token] = new.view(NUM_KV_HEADS, HEAD_DIM)
    return restored


def test_keys_values_and_output_equal_the_paper_formula():
    case = make_case(prompt=60, steps=1)
    layer = build_layers("kvquant", 0.9, [case], bits=3, outliers=OUTLIERS, iterations=10)
    frequencies = layer.spec.inverse_frequencies
    positions = torch.arange(1, 60)
    plain = shift_positions(case.keys[:, 1:60], -positions, frequencies)
    expected_plain, expected_values = literal_keys(plain, 3), literal_values(case.values[:, 1:60], 3)
    store = layer.stores[0]
    torch.testing.assert_close(store.keys.restore(0, 59, per_channel=True)[0], expected_plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(store.values.restore(0, 59, per_channel=False)[0], expected_values, atol=1e-4, rtol=1e-4)
    keys = torch.cat([case.keys[:, :1], shift_positions(expected_plain, positions, frequencies), case.keys[:, 60:]], 1)
    values = torch.cat([case.values[:, :1], expected_values, case.values[:, 60:]], 1)
    entries = [[(keys[head, t], values[head, t], 1.0) for t in range(61)] for head in range(NUM_KV_HEADS)]
    output = feed(layer, [case], 0)[0, :, 0]
    torch.testing.assert_close(output, literal_attention(case, 60, entries), atol=1e-3, rtol=1e-3)


def test_levels_are_deterministic_and_follow_the_weights():
    entries = torch.cat([torch.full((100,), -0.5), torch.full((100,), 0.5), torch.full((5,), 0.9)])
    light = nuq_levels(entries, torch.ones(205), 1, 20)
    heavy = nuq_levels(entries, torch.cat([torch.ones(200), torch.full((5,), 1000.0)]), 1, 20)
    assert torch.equal(light, nuq_levels(entries, torch.ones(205), 1, 20))
    assert light[1] < 0.55
    assert heavy[1] > 0.85


def test_outliers_are_exact_and_bytes_are_as_planned():
    case = make_case(prompt=300, steps=5)
    layer = build_layers("kvquant", 0.9, [case], bits=2, outliers=OUTLIERS)
    store, setting = layer.stores[0], layer.settings[0]
    for offset in range(5):
        feed(layer, [case], offset)
    flat = case.values[:, 1:305].transpose(0, 1).flatten()
    places = store.values.index[0].long()
    assert torch.equal(store.values.outlier[0], flat[places])
    assert len(places) == 304 * setting.per_token(layer.spec)
    held = sum(t.nbytes for t in layer.tensors())
    assert held <= setting.bytes(305, layer.spec) * 1.01 + 64


def test_rows_equal_their_solo_runs():
    cases = [make_case(prompt=310, steps=6, seed=1), make_case(prompt=270, steps=6, seed=2)]
    together = build_layers("kvquant", 0.3, cases)
    alone = [build_layers("kvquant", 0.3, [case]) for case in cases]
    for offset in range(0, 6, 2):
        output = feed(together, cases, offset, count=2)
        for row, case in enumerate(cases):
            expected = feed(alone[row], [case], offset, count=2)
            torch.testing.assert_close(output[row : row + 1], expected, atol=1e-5, rtol=1e-5)


def test_an_unreachable_budget_names_the_smallest_one():
    model, _ = build_tiny()
    with pytest.raises(UnreachableBudgetError, match="the smallest it can reach here is"):
        build_method("kvquant").new_cache(model, budget=0.05)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="bits must be null or one of"):
        build_method("kvquant", bits=7)
    with pytest.raises(ValueError, match="outliers must be a share"):
        build_method("kvquant", outliers=0.7)
