"""One block of one row: exactness limits, attention on coefficients, folding, modes and the byte allowance.

Legend: J layers, H KV heads, n tokens, d head dimension.
"""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch

import kvcore.baselines  # noqa: F401 - registers `full`
from freqdepth.cache import FreqDepthCache, LayerBlock
from freqdepth.method import FreqDepth
from freqdepth.modes import SmallestBytesError
from freqdepth.plan import PlanWriter
from freqdepth.probe import ProbeCollector, ProbePlan, attention_entropy, probe_layer
from freqdepth.window import FLOAT8, restored, rounded, window_scale
from kvcore.attention import attach, prefill
from kvcore.budget import UnreachableBudgetError
from kvcore.kernels import native
from kvcore.kernels.reference import decode_attention
from kvcore.method import build_method
from kvcore.tiny import build_tiny

UNLIMITED = 1e12


@pytest.fixture(scope="module")
def model():
    small = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}
    return build_tiny(num_hidden_layers=4, **small)[0]


def compressed(model, monkeypatch, options: dict, allowed: float = UNLIMITED, tokens: int = 150) -> FreqDepthCache:
    """A cache of a random prompt whose blocks may spend `allowed` bytes each."""
    monkeypatch.setattr(LayerBlock, "_allowed", lambda self, tokens: allowed)
    monkeypatch.setattr(FreqDepth, "smallest_share", lambda self, spec: 0.0)
    cache = build_method("freqdepth", **options).new_cache(model, budget=0.9)
    prefill(model, cache, torch.randint(5, 300, (1, tokens), generator=torch.Generator().manual_seed(0)))
    return cache


def logits_after(model, cache, steps: int) -> torch.Tensor:
    ids = torch.randint(5, 300, (1, steps), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(steps)], dim=1)


WHOLE = [
    {"basis": "dct", "heads": "single", "block_size": 2, "low_frequencies": 2},
    {"basis": "dct", "heads": "single", "block_size": 3, "low_frequencies": 3},
    {"basis": "aligned_dct", "heads": "single", "block_size": 4, "low_frequencies": 4},
    {"basis": "klt", "heads": "joint", "block_size": 4, "basis_bits": 16, "key_rank": 128, "value_rank": 128},
    {"basis": "klt", "heads": "single", "block_size": 3, "basis_bits": 16, "key_rank": 48, "value_rank": 48},
    {"basis": "klt", "heads": "joint", "block_size": 4, "basis_bits": 16, "key_rank": 128, "value_rank": 128,
     "keys": "pre_rope"},
]  # fmt: skip


@pytest.mark.parametrize("options", WHOLE, ids=lambda o: f"{o['basis']}-{o['heads']}-{o['block_size']}-{o.get('keys')}")
def test_all_coefficients_unquantised_equal_the_full_cache(model, monkeypatch, options) -> None:
    whole = {**options, "coefficient_bits": (16,), "modes": ("shared",), "window": 16, "window_bits": 16}
    cache = compressed(model, monkeypatch, whole)
    assert cache.blocks[0].rows[0].num_middle > 100
    full = build_method("freqdepth").new_cache(model, budget=1.0)
    prefill(model, full, torch.randint(5, 300, (1, 150), generator=torch.Generator().manual_seed(0)))
    assert (logits_after(model, cache, 24) - logits_after(model, full, 24)).abs().max() < 1e-4
    # 24 steps make the window overflow: folded tokens (the prompt's 16 were compressed with it) are exact, too
    report = cache.blocks[0].rows[0].report
    assert report.folded_tokens == 8
    assert report.fold_error / 8 < 1e-8


def test_all_heads_exact_equal_the_full_cache_token_for_token(model, monkeypatch) -> None:
    cache = compressed(model, monkeypatch, {"modes": ("exact",), "window_bits": 16})
    full = build_method("full").new_cache(model, budget=1.0)
    prefill(model, full, torch.randint(5, 300, (1, 150), generator=torch.Generator().manual_seed(0)))
    exact, reference = logits_after(model, cache, 40), logits_after(model, full, 40)
    assert torch.equal(exact.argmax(-1), reference.argmax(-1))
    assert (exact - reference).abs().max() < 1e-4


@pytest.mark.parametrize("heads", ["joint", "single"])
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("residual_bits", [4, 16])
def test_attention_equals_attention_over_the_reconstruction(
    model, monkeypatch, heads, num_queries, residual_bits
) -> None:
    """Absorbed bases, corrections and the window give what plain attention over rebuilt keys and values gives."""
    options = {"heads": heads, "block_size": 2, "residual_tokens": 8, "residual_bits": residual_bits, "window_bits": 16}
    cache = compressed(model, monkeypatch, options, allowed=120_000)
    row = cache.blocks[1].rows[0]
    assert set(row.report.modes) <= {"residual", "shared"}
    assert "residual" in row.report.modes
    assert row.num_hidden > 0
    row.hidden = None  # read the whole middle: hidden tokens have a test of their own
    keys, values = (side.rebuild(side.coefficients.coefficients()) for side in (row.keys, row.values))
    for side, residual, basis in (
        (keys, row.residual_keys, row.keys.basis),
        (values, row.residual_values, row.values.basis),
    ):
        for layer in range(2):
            rebuilt = side[layer].flatten(0, 1)
            for index, head in enumerate(residual.heads):
                rebuilt[head, :8] += residual.rebuilt(layer, basis)[index]
    query, key, value = (
        torch.randn(8, num_queries, 16),
        torch.randn(2, num_queries, 16),
        torch.randn(2, num_queries, 16),
    )
    all_keys = torch.cat([keys[1].flatten(0, 1), row.window_keys[1], key], dim=1)
    all_values = torch.cat([values[1].flatten(0, 1), row.window_values[1], value], dim=1)
    bias = torch.zeros(num_queries, all_keys.shape[1])
    bias[:, -num_queries:] = torch.full((num_queries, num_queries), float("-inf")).triu(1)
    expected, _ = decode_attention(query[None], all_keys[None], all_values[None], 0.25, bias)
    found = row.attend(1, query, key, value, 0.25)
    assert (found - expected[0]).abs().max() < 5e-3 * expected.abs().max()


def test_residual_tokens_are_the_worst_and_stand_first(model, monkeypatch) -> None:
    options = {"block_size": 4, "residual_tokens": 6, "residual_bits": 16, "key_rank": 8, "value_rank": 8}
    corrected = compressed(model, monkeypatch, options, allowed=200_000).blocks[0].rows[0]
    plain = compressed(model, monkeypatch, {**options, "modes": ("shared",)}, allowed=200_000).blocks[0].rows[0]
    assert corrected.residual_keys.num_tokens == 6
    assert sum(corrected.report.loss) < sum(plain.report.loss)
    moved, order = corrected.keys.coefficients.coefficients()[0], plain.keys.coefficients.coefficients()[0]
    first = [(order - moved[i]).abs().sum(-1).argmin().item() for i in range(6)]
    assert len(set(first)) == 6
    assert first != list(range(6))


def test_window_follows_its_policy_and_folding_is_bounded(model) -> None:
    """A4: after the prefill and every step exactly the newest 16..31 tokens are exact and equal the full cache's."""
    method = build_method("freqdepth", window=16, fold=16, block_size=3, window_bits=16)
    cache, full = method.new_cache(model, budget=0.6), build_method("full").new_cache(model)
    ids = torch.randint(5, 300, (1, 400), generator=torch.Generator().manual_seed(0))
    prefill(model, cache, ids)
    prefill(model, full, ids)
    more = torch.randint(5, 300, (1, 70), generator=torch.Generator().manual_seed(1))
    for step in range(70):
        row = cache.blocks[0].rows[0]
        exact = 16 + step % 16
        assert row.window_keys[0].shape[1] == 4 + exact
        assert torch.equal(row.window_keys[0][:, 4:], full.layers[0].keys[0][:, -exact:])
        assert torch.equal(row.window_values[0][:, :4], full.layers[0].values[0][:, :4])
        assert row.attended(0) == 400 + step
        for each in (cache, full):
            with torch.no_grad():
                model(more[:, step : step + 1], cache=each)
    assert row.report.folded_tokens == 48
    assert 0 < row.report.fold_error / 48 < 1
    assert cache.ledger.device_share <= 0.6 * 1.02


@pytest.mark.parametrize("native_form", [True, False])
def test_a_layer_leaves_nothing_behind_but_its_window_entry(model, monkeypatch, native_form: bool) -> None:
    """Counted over every tensor of the process: what the ledger's walk does not reach counts, too, and so do layers in
    the middle of a block."""
    if not native_form:
        monkeypatch.setattr(native, "off_reason", lambda: "not in this test")
    options = {"block_size": 4, "residual_tokens": 8, "window_bits": 16}
    row = compressed(model, monkeypatch, options, allowed=120_000).blocks[0].rows[0]
    assert "residual" in row.report.modes
    assert row.keys.basis.planes
    query, key, value = torch.randn(8, 1, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    for layer in range(4):
        before = _live_bytes()
        row.attend(layer, query, key, value, 0.25)
        assert _live_bytes() - before == key.nbytes + value.nbytes


def _live_bytes() -> int:
    """Bytes of the storages of every tensor that exists."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_long_decode_merges_folds_and_stays_within_the_budget(model) -> None:
    cache = build_method("freqdepth", block_size=4, fold=64).new_cache(model, budget=0.5)
    prefill(model, cache, torch.randint(5, 300, (1, 700)))
    with torch.no_grad():
        for _ in range(12):
            model(torch.randint(5, 300, (1, 64)), cache=cache)
    first = cache.blocks[0].rows[0].keys.coefficients
    assert first.main_tokens > 700
    assert cache.ledger.device_share <= 0.5 * 1.02


def test_token_budget_never_grows(model) -> None:
    cache = build_method("freqdepth", block_size=4, fold=64).new_cache(model, budget=200)
    prefill(model, cache, torch.randint(5, 300, (1, 600)))
    for _ in range(20):
        with torch.no_grad():
            model(torch.randint(5, 300, (1, 64)), cache=cache)
        assert cache.memory_bytes()[0] <= 1.02 * cache.budget.device_bytes(cache.spec, cache.logical_length)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"basis": "dct", "heads": "single", "block_size": 2, "coefficient_bits": (16,)}, 0.3),
        ({"modes": ("exact",)}, 0.5),
        ({"block_size": 4, "key_rank": 120, "value_rank": 120, "coefficient_bits": (16,)}, 0.2),
    ],
    ids=["dct", "all exact", "fixed rank"],
)
def test_unreachable_budget_names_the_smallest_and_the_levers(model, options, budget) -> None:
    method = build_method("freqdepth", **options)
    ids = torch.randint(5, 300, (1, 400))
    with pytest.raises(
        UnreachableBudgetError, match=r"smallest it can reach here is .*block_size.*coefficient_bits"
    ) as error:
        prefill(model, method.new_cache(model, budget=budget), ids)
    smallest = error.value.smallest
    assert budget < smallest <= 2.0
    if smallest < 0.6:  # what the message says is true, up to the side data of a prompt this short
        prefill(model, method.new_cache(model, budget=smallest + 0.25), ids)


def test_modes_of_the_published_form_follow_the_budget(model) -> None:
    """More bytes turn shared heads into residual and exact ones; the probe's loss falls; the bytes are met."""
    published = {"basis": "dct", "heads": "single", "block_size": 2, "coefficient_bits": (16,), "residual_bits": 16,
                 "probe_weighting": "uniform", "window": 16}  # fmt: skip
    losses, seen = [], set()
    for budget in (0.6, 0.75, 0.9):
        cache = build_method("freqdepth", **published).new_cache(model, budget=budget)
        prefill(model, cache, torch.randint(5, 300, (1, 400), generator=torch.Generator().manual_seed(2)))
        reports = [block.rows[0].report for block in cache.blocks]
        losses.append(sum(sum(report.loss) for report in reports))
        seen |= {mode for report in reports for mode in report.modes}
        assert cache.ledger.device_share <= budget * 1.02
    assert losses == sorted(losses, reverse=True)
    assert {"residual", "exact"} <= seen


def test_smallest_bytes_error_says_so() -> None:
    assert "at least 12 bytes" in str(SmallestBytesError(12.0))


def test_probe_takes_recent_boundary_and_high_entropy_rows(model) -> None:
    plan = ProbePlan(16, frozenset({7}))
    ids = torch.full((1, 320), 9)
    ids[0, [50, 100]] = 7
    collector = ProbeCollector(plan)
    query, keys = torch.randn(1, 8, 320, 16), torch.randn(2, 320, 16)
    for start in (0, 200):  # chunks
        stop = min(start + 200, 320)
        plan.find_boundaries(ids[:, start:stop], start)
        collector.observe(query[:, :, start:stop], stop, [0])
    queries, positions = collector.probe(0, 0, keys, 0.25)
    assert queries.shape == (2, 4, 16, 16)
    assert positions[-8:].tolist() == list(range(312, 320))
    assert {50, 100} <= set(positions.tolist())
    assert torch.equal(queries[1, 2, -1], query[0, 6, 319])
    rest = [p for p in positions[:-8].tolist() if p not in (50, 100)]
    others = [p for p in range(0, 312, 32) if p not in rest]
    chosen = attention_entropy(_grouped(query, rest), torch.tensor(rest), keys, 0.25)
    left = attention_entropy(_grouped(query, others), torch.tensor(others), keys, 0.25)
    assert len(rest) == 6
    assert chosen.min() >= left.max() or not others


def _grouped(query: torch.Tensor, positions: list[int]) -> torch.Tensor:
    return query[0][:, positions].unflatten(0, (2, 4))


@pytest.mark.parametrize("weighting", ["attention", "uniform"])
def test_uniform_probe_is_equation_two(weighting: str) -> None:
    keys, values = torch.randn(2, 60, 16), torch.randn(2, 60, 16)
    queries = torch.randn(2, 4, 10, 16)
    probe = probe_layer(queries, torch.arange(50, 60), keys, values, 0.25, weighting, 1e-6)
    assert probe.key_weight.shape == (2, 16)
    assert bool((probe.key_weight > 0).all() and (probe.value_weight > 0).all())
    if weighting == "uniform":
        energy = (queries.square().mean((1, 2)) / 16 * keys.square().sum(1)).sum(-1)
        assert torch.allclose(
            probe.key_weight.square() * energy[:, None], queries.square().mean((1, 2)) / 16, rtol=1e-3
        )


def test_options_are_checked() -> None:
    wrong = [
        {"block_size": 1}, {"basis": "fft"}, {"heads": "all"}, {"coefficient_bits": (5,)}, {"modes": ("none",)},
        {"fold": 12}, {"window": 0}, {"basis": "dct"}, {"probe_queries": 1}, {"residual_bits": 1}, {"basis_bits": 1},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match="received"):
            build_method("freqdepth", **options)


def test_attach_is_the_only_thing_needed(model) -> None:
    assert attach(model).num_layers == 4
    assert list(itertools.chain(*FreqDepth(block_size=3).blocks(4))) == [0, 1, 2, 3]


def test_eight_bit_window_is_close_whatever_the_size_of_its_numbers(model) -> None:
    """8-bit floats lose about 0.1% of the energy of every head, and folding reads what attention reads."""
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 3e3])[:, None, None]
    scale = window_scale(x)
    stored = rounded(x, FLOAT8, scale)
    back = restored(stored, torch.float32, scale)
    assert stored.element_size() == 1
    assert ((back - x).square().sum((1, 2)) < 2e-3 * x.square().sum((1, 2))).all()
    assert torch.equal(rounded(back, FLOAT8, scale).float(), stored.float())  # rounding again changes nothing
    assert restored(rounded(100 * x, FLOAT8, scale), torch.float32, scale).isfinite().all()


@pytest.mark.parametrize("where", [40, 120, 200])
def test_a_rare_passage_in_repetitive_text_is_corrected(model, monkeypatch, where: int) -> None:
    """Tokens that stand out are kept, wherever they stand and whatever the probe looks at."""
    ids = torch.arange(5, 13).repeat(32)
    ids[where : where + 6] = torch.tensor([250, 133, 277, 181, 219, 166])
    plans = []
    store = PlanWriter.plan
    monkeypatch.setattr(PlanWriter, "plan", lambda self, plan: (plans.append(plan), store(self, plan)))
    prefill(model, build_method("freqdepth", block_size=4).new_cache(model, budget=0.25), ids[None])
    corrected = plans[0].order[0, : plans[0].count] + 4  # after the sinks
    # 2% of the tokens, but most of what is corrected
    assert int(((corrected >= where) & (corrected < where + 6)).sum()) > len(corrected) / 2


def test_tokens_in_the_window_are_read_once_and_then_in_their_compressed_form(model, monkeypatch) -> None:
    """The prompt's newest tokens are compressed with it, hidden until the window moves on: attended tokens add up, and
    leaving the window changes nothing but their form."""
    options = {"block_size": 2, "window": 16, "window_bits": 16, "key_rank": 64, "value_rank": 64, "basis_bits": 16,
               "coefficient_bits": (16,), "residual_tokens": 8, "residual_bits": 16}  # fmt: skip
    row = compressed(model, monkeypatch, options).blocks[0].rows[0]
    query, key, value = torch.randn(8, 1, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    before = copy.deepcopy(row).attend(1, query, key, value, 0.25)
    assert (row.num_hidden, row.num_middle, row.attended(1)) == (16, 150 - 4, 150)
    for layer in range(2):  # seven more than the window holds would fold nothing
        extra = torch.zeros(2, 8, 16)
        row.window_keys[layer] = torch.cat([row.window_keys[layer], extra], dim=1)
        row.window_values[layer] = torch.cat([row.window_values[layer], extra], dim=1)
    row.fold()
    assert (row.num_hidden, row.attended(1), row.report.folded_tokens) == (8, 158, 0)
    for layer in range(2):
        row.window_keys[layer] = row.window_keys[layer][:, :-8]
        row.window_values[layer] = row.window_values[layer][:, :-8]
    assert (row.attend(1, query, key, value, 0.25) - before).abs().max() < 1e-4
