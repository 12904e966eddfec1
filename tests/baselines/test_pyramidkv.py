"""PyramidKV: layer budgets on a line, and SnapKV's choice inside each layer."""

import itertools

import pytest
import torch
from evicting_cases import NUM_KV_HEADS, kept, make_layers, make_row, prefill_layer
from test_snapkv import literal_kept

from kvcore.attention import prefill
from kvcore.method import build_method
from kvcore.tiny import build_tiny


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 30])
@pytest.mark.parametrize(
    ("budget", "tokens"), [(0.1, 1000), (0.5, 1000), (0.9, 300), (128, 600), (0.05, 40), (0.01, 3)]
)
def test_layer_budgets_fall_linearly_and_sum_to_the_budget(num_layers, budget, tokens):
    layers = make_layers("pyramidkv", budget, num_layers, scope="layer")
    sizes = [layer.capacity(tokens) for layer in layers]
    (mean,) = {layer.budget.entries(tokens) for layer in layers}
    assert sum(sizes) == num_layers * mean
    assert sizes == sorted(sizes, reverse=True)
    assert all(1 <= size <= tokens for size in sizes)
    gaps = [a - b for a, b in itertools.pairwise(sizes)]
    assert not gaps or max(gaps) - min(gaps) <= 2  # a line, rounded


def test_ends_of_the_line_equal_the_paper():
    layers = make_layers("pyramidkv", 0.2, 32, scope="layer", window=32, beta=20.0)
    extra = 400 - 32  # entries beside the window
    assert layers[-1].capacity(2000) == pytest.approx(32 + extra / 20, abs=1)
    assert layers[0].capacity(2000) == pytest.approx(32 + 2 * extra - extra / 20, abs=1)
    assert make_layers("pyramidkv", 0.2, 32, scope="layer", beta=1.0)[0].capacity(2000) == 400


def test_each_layer_keeps_the_best_of_its_own_size():
    row, sizes = make_row(60, 4), []
    for layer in make_layers("pyramidkv", 0.4, 4, scope="layer", window=4, kernel=3):
        prefill_layer(layer, [row], [60])
        sizes.append(layer.capacity(60))
        for head in range(NUM_KV_HEADS):
            top, _ = literal_kept(row, head, 60, 4, 3, "max", 60)
            window = set(range(56, 60))
            assert kept(layer, 0, head, row) == set(top[: sizes[-1] - 4]) | window
    assert len(set(sizes)) == 4


def test_unequal_layers_decode_and_shrink_within_an_integer_budget():
    model, _ = build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=4)
    cache = build_method("pyramidkv").new_cache(model, 64)
    ids = torch.randint(5, 300, (1, 160), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        prefill(model, cache, ids[:, :40])
        for start in range(40, 160, 4):
            assert model(ids[:, start : start + 4], cache=cache).logits.isfinite().all()
            sizes = [layer.keys.shape[2] for layer in cache.layers]
            assert sizes == [layer.capacity(start + 4) for layer in cache.layers]
    assert sizes[0] > sizes[-1]
    assert cache.ledger.device_share <= 1
