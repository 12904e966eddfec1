"""FreqDepthCache in the life of a generation: rows apart, beams, resets, copies (A1, A2, A5, C1, C2, D1, D2).

The registry-wide contract runs these for every method; here they are stated for rows that are stored apart.
"""

from __future__ import annotations

import copy

import pytest
import torch

from freqdepth.report import block_statistics, bytes_by_part, plot_modes, plot_spectrum
from kvcore.attention import prefill
from kvcore.kernels import prefill_attention
from kvcore.method import build_method
from kvcore.tiny import build_tiny

OPTIONS = {"block_size": 3, "window": 8, "fold": 8, "num_sinks": 2}
LENGTHS = (130, 90, 160)


@pytest.fixture(scope="module")
def model():
    small = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}
    return build_tiny(num_hidden_layers=4, **small)[0]


def prompt(length: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 300, (1, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts]).long()
    return ids, mask


def new_cache(model, budget: float = 0.5, **options):
    return build_method("freqdepth", **{**OPTIONS, **options}).new_cache(model, budget=budget)


def generate(model, ids, cache, tokens=10, mask=None):
    # without a mask a generated token 0 would be taken for padding when a run is continued
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, cache=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0,
    )[:, ids.shape[1] :]  # fmt: skip


def equal(mine: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(mine) == len(other) and all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a1_one_method_object_many_prompts_and_reset(model) -> None:
    method = build_method("freqdepth", **OPTIONS)
    outputs = []
    for seed in range(3):
        cache = method.new_cache(model, budget=0.5)
        outputs.append(generate(model, prompt(180, seed), cache))
        assert 0.4 < cache.ledger.device_share <= 0.5 * 1.02
    cache.reset()
    assert cache.logical_length == 0
    assert cache.memory_bytes() == (0, 0)
    assert not any(block.rows or block.probes for block in cache.blocks)
    assert torch.equal(generate(model, prompt(180, 1), cache), outputs[1])


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_a2_short_prompts(num_layers: int) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "eos_token_id": None}
    tiny = build_tiny(num_hidden_layers=num_layers, **small)[0]
    for length in (1, 2, 3, 8):
        for budget in (0.01, 0.5, 1.0):
            cache = new_cache(tiny, budget)
            logits = prefill(tiny, cache, prompt(length, 0))
            with torch.no_grad():
                after = tiny(prompt(3, 1), cache=cache).logits
            assert torch.isfinite(logits).all()
            assert torch.isfinite(after).all()
            for block in cache.blocks:
                assert all(keys.shape[1] >= 1 for keys in block.rows[0].window_keys)


def test_a5_a_stored_context_serves_several_questions(model) -> None:
    stored = new_cache(model)
    prefill(model, stored, prompt(180, 0))
    before = [tensor.clone() for tensor in stored.row_tensors(0)]
    answers = []
    for seed in (1, 2, 1):
        cache = copy.deepcopy(stored)
        with torch.no_grad():
            answers.append(torch.cat([model(t, cache=cache).logits for t in prompt(8, seed).split(1, dim=1)], dim=1))
    assert torch.equal(answers[0], answers[2])
    assert equal(before, stored.row_tensors(0))
    # one run equals a continued one
    whole = generate(model, prompt(180, 0), new_cache(model), 16)
    cache = new_cache(model)
    first = generate(model, prompt(180, 0), cache, 8)
    rest = generate(model, torch.cat([prompt(180, 0), first], 1), cache, 8)
    assert torch.equal(torch.cat([first, rest], dim=1), whole)


def test_c1_c2_rows_equal_their_solo_runs_and_never_mix(model) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    ids, mask = left_padded(prompts)
    batch = new_cache(model)
    tokens = generate(model, ids, batch, mask=mask)
    for row, one in enumerate(prompts):
        solo = new_cache(model)
        assert torch.equal(generate(model, one, solo), tokens[row : row + 1])
        for mine, alone in zip(batch.row_tensors(row), solo.row_tensors(0), strict=True):
            assert mine.shape == alone.shape
    prompts[1] = prompt(LENGTHS[1], 77)
    changed = new_cache(model)
    again = generate(model, left_padded(prompts)[0], changed, mask=mask)
    assert torch.equal(again[[0, 2]], tokens[[0, 2]])
    for row in (0, 2):
        assert equal(batch.row_tensors(row), changed.row_tensors(row))


def test_d1_beams_move_whole_rows(model) -> None:
    ids, mask = left_padded([prompt(length, seed) for seed, length in enumerate(LENGTHS)])
    cache = new_cache(model)
    prefill(model, cache, ids, mask)
    before = [[tensor.clone() for tensor in cache.row_tensors(row)] for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert all(equal(cache.row_tensors(new), before[old]) for new, old in enumerate([2, 0, 1]))
    assert cache.row_tokens() == [160, 130, 90]
    cache.batch_repeat_interleave(2)
    assert all(equal(cache.row_tensors(new), before[old]) for new, old in enumerate([2, 2, 0, 0, 1, 1]))
    # repeated rows are copies: decoding one leaves the other alone
    pointers = [{t.data_ptr() for t in cache.row_tensors(row)} for row in (0, 1)]
    assert not pointers[0] & pointers[1]
    cache.batch_select_indices(torch.tensor([0, 4]))
    assert equal(cache.row_tensors(1), before[1])
    beams = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids[:1], cache=new_cache(model), **beams)
    assert found.shape[0] == 3


def test_d2_rollback_is_refused_by_name(model) -> None:
    cache = new_cache(model)
    prefill(model, cache, prompt(120, 0))
    with pytest.raises(NotImplementedError, match=r"freqdepth.*crop"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match=r"freqdepth.*prompt-lookup"):
        cache.activate_past_recording()


def chunked_difference(model, seed: int, reference: str = "whole", **options) -> float:
    """Largest difference of a logit between a prefill in chunks and one forward (or the full cache)."""
    chunks = new_cache(model, **options)
    other = new_cache(model, **options) if reference == "whole" else build_method("full").new_cache(model, budget=1.0)
    for cache, size in ((other, None), (chunks, 64)):
        prefill(model, cache, prompt(200, seed), chunk_size=size)
    ids = prompt(10, 1)
    with torch.no_grad():
        return float((model(ids, cache=other).logits - model(ids, cache=chunks).logits).abs().max())


def test_chunked_prefill_equals_one_forward(model) -> None:
    unquantised = {"coefficient_bits": (16,), "modes": ("shared",), "window_bits": 16, "budget": 0.9}
    assert max(chunked_difference(model, seed, **unquantised) for seed in range(4)) < 0.01
    # with codes another summation order turns directions of equal energy and tips codes over: well below what they cost
    # (of two versions that differ in rounding only, 4 prompts give ratios of 0.48 and 0.55, 12 prompts 0.37 and 0.44)
    apart = [chunked_difference(model, seed) for seed in range(12)]
    lost = [chunked_difference(model, seed, "full") for seed in range(12)]
    assert sum(apart) < sum(lost) / 2


def test_prefill_holds_one_block_in_full(model) -> None:
    cache = new_cache(model, 0.3, block_size=2)
    prefill(model, cache, prompt(240, 0))
    full = cache.spec.full_bytes(240)
    assert cache.ledger.prefill_device_bytes <= full * (2 / 4 + 0.3)


@pytest.mark.parametrize(
    ("dtype", "budget", "exact"),
    [
        (torch.bfloat16, 0.1, False),
        (torch.bfloat16, 0.15, True),
        (torch.bfloat16, 0.26, True),
        (torch.float32, 0.05, False),
        (torch.float32, 0.1, True),
    ],
)
def test_the_window_is_exact_where_the_budget_has_two_bits_per_number(dtype, budget, exact) -> None:
    for bits, kept in ((None, exact), (8, False), (16, True)):
        stored = build_method("freqdepth", window_bits=bits).window_dtype(dtype, budget)
        assert stored == (dtype if kept else torch.float8_e4m3fn)


@pytest.mark.parametrize("window_bits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_multi_query(dtype: torch.dtype, window_bits: int) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1, "eos_token_id": None}
    tiny = build_tiny(dtype=dtype, num_hidden_layers=4, **small)[0]
    cache = new_cache(tiny, 0.4, window_bits=window_bits)
    generate(tiny, prompt(200, 0), cache)
    assert cache.blocks[0].rows[0].window_keys[0].dtype == (torch.float8_e4m3fn if window_bits == 8 else dtype)
    assert cache.ledger.device_share <= 0.4 * 1.02


def test_budget_scope_layer_is_refused(model) -> None:
    with pytest.raises(NotImplementedError, match="budget_scope='bytes'"):
        build_method("freqdepth").new_cache(model, budget=0.1, budget_scope="layer")


def test_blocks_across_devices_are_refused(model) -> None:
    cache = new_cache(model)
    cache.begin_forward(1, 100, None)
    query, keys = torch.randn(1, 8, 100, 16), torch.randn(1, 2, 100, 16)
    for layer in range(2):
        cache._staged[layer] = (keys, keys)
        cache.take_prefill(layer, query, keys, 0.25)
    cache._staged[2] = (keys, keys)
    cache._staged[1] = (keys.to("meta"), keys.to("meta"))
    with pytest.raises(NotImplementedError, match=r"layers 0\.\.2 share one block but lie on cpu, meta"):
        cache.take_prefill(2, query, keys, 0.25)


def test_report_accounts_for_every_byte_and_plots(model, tmp_path) -> None:
    cache = new_cache(model)
    with pytest.raises(ValueError, match="no compressed block"):
        block_statistics(cache)
    generate(model, prompt(240, 0), cache, tokens=20)  # 8 of the prompt's and 8 new ones leave the window
    statistics = block_statistics(cache)
    assert [block["layers"] for block in statistics] == [[0, 2], [3, 3]]
    assert sum(sum(block["bytes"].values()) for block in statistics) == cache.memory_bytes()[0]
    assert bytes_by_part(cache.blocks[0].rows[0]) == statistics[0]["bytes"]
    assert statistics[0]["folded_tokens"] == 8
    assert 0 < statistics[0]["fold_error_per_token"] < 1
    assert plot_modes(statistics, tmp_path / "modes.png").stat().st_size > 1000
    assert plot_spectrum(statistics, tmp_path / "spectrum.png").stat().st_size > 1000


def test_prefill_output_is_the_full_caches(model) -> None:
    """The prefill itself is exact: compression never touches it."""
    query, keys = torch.randn(1, 8, 40, 16), torch.randn(1, 2, 40, 16)
    cache = new_cache(model)
    cache.begin_forward(1, 40, None)
    output = cache.attend(0, query, keys, keys, 0.25, None)
    assert torch.equal(output, prefill_attention(query, keys, keys, 0.25, [0]))
