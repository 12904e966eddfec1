"""Packed coefficients: integer products equal float ones, folding and reordering keep every token.

Legend: S streams, R coefficients, M tokens, P rows.
"""

from __future__ import annotations

import pytest
import torch

from freqdepth.allocation import Offer, choose_levels, smallest_cost
from freqdepth.codes import encode, squared_error, step_sizes
from freqdepth.store import CoefficientStore
from kvcore.kernels.torch_planes import Digits

WIDTHS = ((8, 3), (6, 4), (4, 5), (3, 4), (2, 6))


def make_store(num_streams: int, num_tokens: int, widths=WIDTHS) -> tuple[CoefficientStore, torch.Tensor]:
    values = torch.randn(num_streams, num_tokens, sum(count for _, count in widths))
    steps, raw, start = [], [], 0
    for bits, count in widths:
        part = values[..., start : start + count]
        if bits == 16:
            steps.append(torch.ones(num_streams, count))
            raw.append(part)
        else:
            steps.append(step_sizes(part, bits, part.square().mean(1).sqrt(), torch.tensor([1.0, 1.5])))
            raw.append(encode(part, steps[-1], bits))
        start += count
    return CoefficientStore(list(widths), raw, torch.cat(steps, -1), torch.float32), values


def test_digits_multiply_like_floats() -> None:
    rows, codes = torch.randn(9, 40), torch.randint(-128, 128, (40, 70), dtype=torch.int8)
    digits = Digits.of(rows)
    for first, last in ((0, 40), (3, 4), (8, 20)):  # one row of codes takes a way of its own
        found = digits.joined(digits.sums(codes[first:last], first)) * digits.scale
        exact = rows[:, first:last] @ codes[first:last].float()
        assert (found - exact).abs().max() <= 2e-3 * exact.abs().max()


@pytest.mark.parametrize("num_tokens", [512, 8192, 32768])
def test_dithered_weights_keep_the_mass_of_many_small_ones(num_tokens: int) -> None:
    """One token with nine tenths of the attention, the rest spread thin: the nearest digits of those are all 0."""
    weights = torch.full((2, num_tokens), 0.1 / (num_tokens - 1))
    weights[:, 3] = 0.9
    weights[1, num_tokens // 2 :] = 0  # hidden entries get nothing
    weights[1, 3] = 0.95
    ones = torch.ones(num_tokens, 1, dtype=torch.int8)
    digits = Digits.of(weights, dithered=True)
    found = digits.joined(digits.sums(ones)) * digits.scale
    assert (found - weights.sum(-1, keepdim=True)).abs().max() < 1e-3
    hidden = digits.joined(digits.sums(ones[num_tokens // 2 :], num_tokens // 2)) * digits.scale
    assert hidden[1].item() == 0


def test_digits_of_very_many_equal_entries_do_not_overflow() -> None:
    count = 2**17
    digits = Digits.of(torch.ones(1, count), dithered=True)
    codes = torch.full((count, 8), 127, dtype=torch.int8)  # the C form has codes up to 255
    found = digits.joined(digits.sums(codes)) * digits.scale
    assert (found / (127 * count) - 1).abs().max() < 1e-3
    assert int(digits.digits.int().abs().sum()) * 255 < 2**31


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("num_rows", [4, 60], ids=["integers", "floats"])
@pytest.mark.parametrize("num_tokens", [64, 83])
def test_products_equal_those_of_the_coefficients(num_streams: int, num_rows: int, num_tokens: int) -> None:
    store, _ = make_store(num_streams, num_tokens)
    for fold in range(3):
        coefficients = store.coefficients()
        assert coefficients.shape[1] == num_tokens + 16 * fold == store.num_tokens
        rows = torch.randn(num_streams, num_rows, coefficients.shape[2])
        weights = torch.rand(num_streams, num_rows, store.num_tokens)
        for found, exact in (
            (store.logits(rows), rows @ coefficients.mT),
            (store.mix(weights), weights @ coefficients),
        ):
            assert (found - exact).abs().max() <= 2e-3 * exact.abs().max()
        store.append(torch.randn(num_streams, 16, coefficients.shape[2]))


def test_folding_keeps_old_tokens_and_merging_changes_nothing() -> None:
    store, _ = make_store(2, 70, ((16, 2), *WIDTHS))
    new = torch.randn(2, 32, store.step.shape[1])
    before = store.coefficients()
    store.append(new[:, :16])
    store.append(new[:, 16:])
    after = store.coefficients()
    assert torch.equal(after[:, :70], before)
    assert torch.equal(after[:, 70:, :2], new[..., :2])
    store.merge()
    assert store.tail_tokens == 0
    assert torch.equal(store.coefficients(), after)


def test_dropping_the_oldest_fold() -> None:
    store, _ = make_store(1, 64)
    for _ in range(2):
        store.append(torch.randn(1, 16, store.step.shape[1]))
    before = store.coefficients()
    store.drop_oldest_tile()
    assert torch.equal(store.coefficients(), torch.cat([before[:, :64], before[:, 80:]], dim=1))


def test_reordering_moves_tokens() -> None:
    store, _ = make_store(2, 70)
    before = store.coefficients()
    order = torch.stack([torch.randperm(70) for _ in range(2)])
    store.reorder(order)
    assert torch.equal(store.coefficients(), before.gather(1, order[..., None].expand_as(before)))


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.13), (3, 0.04), (4, 0.0125), (6, 0.0012), (8, 0.0002)])
def test_steps_reach_the_best_uniform_quantiser(bits: int, bound: float) -> None:
    values = torch.randn(1, 20000, 2) * torch.tensor([1.0, 0.01])
    deviation = values.square().mean(1).sqrt()
    step = step_sizes(values, bits, deviation, torch.tensor([1.0, 1.35]))
    assert (squared_error(values, step, bits) / deviation.square()).max() < bound


def test_allocation_is_reverse_water_filling() -> None:
    """Stronger coefficients get more bits, bytes stay within the allowance and the price is the marginal gain."""
    power = torch.logspace(0, -4, 40)
    widths = torch.tensor([0, 2, 3, 4, 6, 8])
    offer = Offer(power * torch.exp2(-2.0 * widths[:, None]), widths[:, None].expand(-1, 40) * 8.0)
    last = None
    for allowed in (200.0, 600.0, 1200.0):
        levels, price = choose_levels(offer, allowed)
        assert bool((levels[:-1] >= levels[1:]).all())
        spent = float(offer.cost.gather(0, levels[None]).sum())
        assert allowed - 8 * 8 <= spent <= allowed
        assert last is None or price < last
        last = price
    assert choose_levels(offer, 1e9)[1] == 0.0
    offer.loss[0] = float("inf")
    assert smallest_cost(offer) == 40 * 16
    with pytest.raises(ValueError, match="need 640 bytes; allowed are 600"):
        choose_levels(offer, 600.0)
