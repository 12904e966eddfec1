"""fp32 products of a few rows with planes in C equal those of the codes written out as numbers.

Legend: B batch rows, H heads, P rows per head, T tokens per head, K coefficients, R entries of a row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freqdepth.planes import LINES, Plane
from kvcore.kernels import native
from kvcore.kernels.native.plane_floats import PlaneCodes, TokenScales, add_plane_dot, add_plane_sum

pytestmark = pytest.mark.skipif(native.off_reason() is not None, reason=f"native products: {native.off_reason()}")


@st.composite
def shapes(draw) -> tuple[int, int, int, int, int]:
    """B, H, P, T, K."""
    return tuple(draw(st.integers(1, most)) for most in (3, 3, 20, 70, 150))


def planes(bits: list[int], batch: int, tokens: int, count: int) -> tuple[list[Tensor], Tensor]:
    """Bytes of planes of random codes, and per plane the codes [B, tokens, K]."""
    codes = torch.stack([torch.randint(0, 2**width, (batch, tokens, count)) for width in bits]).to(torch.uint8)
    filled = torch.nn.functional.pad(codes, (0, 0, 0, -tokens % LINES), value=1)
    return [Plane(width, mine).packed for width, mine in zip(bits, filled, strict=True)], codes.double()


def check(rows: Tensor, weights: Tensor, numbers: Tensor, codes: PlaneCodes) -> None:
    """Both products, added to what is there, with numbers [B, H, T, R] in double precision; nothing else is written."""
    for function, x, expected in (
        (add_plane_dot, rows, rows.double() @ numbers.mT),
        (add_plane_sum, weights, weights.double() @ numbers),
    ):
        whole = torch.full((*expected.shape[:3], expected.shape[3] + 9), float("nan"))
        total = whole[..., 4:-5]
        before = total.copy_(torch.randn(total.shape)).double()
        function(total, x, codes)
        size = float(numbers.abs().max()) * float(x.abs().max()) * max(numbers.shape[2:])
        torch.testing.assert_close(total.double(), before + expected, rtol=1e-5, atol=1e-6 * size + 1e-6)
        assert whole[..., :4].isnan().all() and whole[..., -5:].isnan().all()


@settings(deadline=None, max_examples=60)
@given(shapes(), st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3), st.integers(0, 2**31 - 1))
def test_products_with_codes(shape: tuple[int, int, int, int, int], bits: list[int], seed: int) -> None:
    """As a basis takes them: runs that land in different places of a row, heads side by side in one plane."""
    torch.manual_seed(seed)
    batch, heads, num_rows, tokens, count = shape
    packed, codes = planes(bits, batch + 1, heads * tokens, count)
    first, half = 1, count // 2
    runs = tuple(run for run in ((count - half + 3, half, 4), (1, count - half, 0)) if run[1])
    numbers = torch.zeros(batch, heads, tokens, count + 5, dtype=torch.float64)
    for mine in codes[:, first:].unflatten(2, (heads, tokens)):
        numbers[..., count - half + 3 : count + 3] += 16 * mine[..., :half]
        numbers[..., 1 : count - half + 1] += mine[..., half:]
    rows, weights = torch.randn(batch, heads, num_rows, count + 5), torch.rand(batch, heads, num_rows, tokens + 7)
    check(rows, weights[..., :tokens], numbers, PlaneCodes(packed, tuple((w, runs) for w in bits), first))


@settings(deadline=None, max_examples=60)
@given(shapes(), st.sampled_from([(1,), (2,), (2, 1), (4,), (4, 2), (4, 4)]), st.sampled_from([8, 24, 64, 80]))
def test_products_with_scaled_codes(shape: tuple[int, int, int, int, int], bits: tuple[int, ...], group: int) -> None:
    """As corrections take them: a scale and a zero point per token and group of channels."""
    batch, heads, num_rows, tokens, count = shape
    packed, codes = planes(list(bits), batch, heads * tokens, count)
    scale, zero = torch.randn(2, batch, heads * tokens, -(-count // group)).half()
    shifts = [sum(bits[:index]) for index in range(len(bits))]
    whole = sum(mine * 2**shift for mine, shift in zip(codes, shifts, strict=True))
    step, base = (x.double().repeat_interleave(group, dim=-1)[..., :count] for x in (scale, zero))
    numbers = (whole * step + base).unflatten(1, (heads, tokens))
    layout = tuple((width, ((0, count, shift),)) for width, shift in zip(bits, shifts, strict=True))
    rows, weights = torch.randn(batch, heads, num_rows, count), torch.rand(batch, heads, num_rows, tokens)
    check(rows, weights, numbers, PlaneCodes(packed, layout, 0, TokenScales(scale, zero, group)))


def test_what_does_not_fit_is_refused() -> None:
    packed, layout = [torch.zeros(2, 2, 3, 6, dtype=torch.uint8)], ((2, ((0, 6, 0),)),)
    total, rows = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 6)
    codes = PlaneCodes(packed, layout)
    add_plane_dot(total, rows, codes)
    for other in (
        codes._replace(first=1),
        codes._replace(layout=((2, ((1, 6, 0),)),)),
        codes._replace(layout=((2, ((0, 5, 0),)),)),
        codes._replace(layout=((4, ((0, 6, 0),)),)),
    ):
        with pytest.raises(ValueError, match="do not fit codes"):
            add_plane_dot(total, rows, other)
    for start, size, place in ((0, 6, 7), (-1, 6, 0)):
        with pytest.raises(ValueError, match="do not fit a code"):
            add_plane_dot(total, rows, codes._replace(layout=((2, ((start, size, place),)),)))
    with pytest.raises(ValueError, match="do not fit codes"):
        add_plane_sum(rows, torch.zeros(2, 3, 4, 9), codes)
    with pytest.raises(ValueError, match="do not fit sums"):
        add_plane_sum(rows, total[:1], codes)
    with pytest.raises(ValueError, match="side by side"):
        add_plane_dot(total, rows, codes._replace(packed=[packed[0].mT.contiguous().mT]))
    for x in (rows.double(), torch.zeros(2, 3, 6, 4).mT, torch.zeros(2, 4, 3, 6).transpose(1, 2)):
        with pytest.raises(ValueError, match="equal distances"):
            add_plane_dot(total, x, codes)
    scale = torch.ones(2, 24, 1, dtype=torch.float16)
    for wrong in (scale[:1], scale[:, :23], scale.float()):
        with pytest.raises(ValueError, match="no fp16"):
            add_plane_dot(total, rows, codes._replace(scales=TokenScales(wrong, scale, 8)))
