"""Digits in C equal those of the torch form, in the order of planes and of lines.

Legend: P rows, K coefficients of all planes, M tokens.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freqdepth.planes import plane_runs
from freqdepth.store import CoefficientStore
from kvcore.kernels import native
from kvcore.kernels.native.digits import line_digits, plane_digits
from kvcore.kernels.plane_operands import to_planes
from kvcore.kernels.torch_planes import Digits, largest_digit

pytestmark = pytest.mark.skipif(native.off_reason() is not None, reason=f"native products: {native.off_reason()}")


def check(found: tuple[torch.Tensor, torch.Tensor], expected: Digits) -> None:
    assert torch.equal(found[0], expected.digits)
    assert torch.equal(found[1], expected.scale)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([16, 8, 6, 4, 3, 2]), st.integers(1, 70)), min_size=1, max_size=4),
    st.integers(1, 20),
    st.floats(-30, 30),
)
def test_rows_in_the_order_of_planes(widths: list[tuple[int, int]], num_rows: int, size: float) -> None:
    if all(bits == 16 for bits, _ in widths):
        widths = [*widths, (2, 1)]
    rows = torch.randn(num_rows, sum(count for _, count in widths) + 3)[:, 1:-2] * 10**size
    layout = plane_runs(tuple(widths))
    numbers = to_planes(rows, layout)
    most = largest_digit(numbers.shape[1])
    check(plane_digits(rows, layout, most), Digits.of(numbers))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(0, 5), st.sampled_from([8, 16]), st.integers(1, 20))
def test_weights_in_the_order_of_lines(main: int, tiles: int, tile: int, num_rows: int) -> None:
    """As a store has them, folded tokens included; hidden tokens keep no weight."""
    raw = torch.randint(0, 4, (1, main, 2), dtype=torch.uint8)
    store = CoefficientStore([(2, 2)], [raw], torch.ones(1, 2), torch.float32)
    for _ in range(tiles):
        store.append(torch.randn(1, tile, 2))
    weights = torch.softmax(4 * torch.randn(num_rows, main + tiles * tile + 9), dim=-1)[:, :-9]
    weights[:, ::7] = 0
    lines = store.lines.to_lines(weights)
    most = largest_digit(lines.shape[1])
    found = line_digits(weights, main, store.lines.main_columns, store.tile_tokens, most)
    check(found, Digits.of(lines, dithered=True))
    assert (found[0].view(2, num_rows, -1)[:, lines == 0] == 0).all()


def test_rows_without_numbers_have_no_digits() -> None:
    rows = torch.randn(3, 40)
    rows[0] = 0
    rows[1, 7] = float("nan")
    digits, scale = line_digits(rows, 40, 5, 0, 127)
    assert (digits[0] == 0).all() and (digits[3] == 0).all() and scale[0].isfinite()
    assert scale[1].isnan() and scale[2].isfinite()


def test_what_does_not_fit_is_refused() -> None:
    rows = torch.randn(3, 40)
    with pytest.raises(ValueError, match="do not fit"):
        plane_digits(rows, ((2, ((1, 40, 0),)),), 127)
    for main, columns, tile in ((41, 6, 8), (40, 4, 8), (32, 4, 3), (32, 4, 0), (30, 4, 8)):
        with pytest.raises(ValueError, match="tiles of"):
            line_digits(rows, main, columns, tile, 127)
    for x, most in ((rows.double(), 127), (rows.T, 127), (rows, 128), (rows, 0)):
        with pytest.raises(ValueError, match="digits up to"):
            line_digits(x, x.shape[1], 10, 8, most)
