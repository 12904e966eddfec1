"""kvcore.quant: packing is exact, errors stay within half a step, bytes are what they are said to be."""

from __future__ import annotations

import pytest
import torch

from kvcore.quant import pack, packed_bytes, quantize, quantized_bytes, unpack

BITS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [8, 24, 63, 64])
def test_pack_round_trip(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == packed_bytes(count, bits)
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("along", ["tokens", "channels"])
@pytest.mark.parametrize("scale_format", ["float16", "bfloat16", "uint8"])
def test_error_within_the_step(bits: int, along: str, scale_format: str) -> None:
    x = torch.randn(2, 3, 100, 48) * 3 + 1
    stored = quantize(x, bits, 16, along, scale_format)
    error = (stored.dequantize() - x).abs().max()
    span = x.amax() - x.amin()
    # half a step, and what rounding the scale (9% in 8 bits) and the zero point (bf16: 2**-8) costs
    assert error <= span * (0.75 / (2**bits - 1) + 0.02)
    assert stored.nbytes == 6 * quantized_bytes(100, 48, bits, 16, along, scale_format)


def test_eight_bits_beat_two() -> None:
    x = torch.randn(1, 2, 64, 32)
    errors = [(quantize(x, bits, 32, "tokens").dequantize() - x).pow(2).mean() for bits in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("along", ["tokens", "channels"])
@pytest.mark.parametrize("scale_format", ["float16", "uint8"])
def test_append_equals_quantising_at_once(along: str, scale_format: str) -> None:
    x = torch.randn(2, 2, 96, 32)
    whole = quantize(x, 3, 32, along, scale_format)
    joined = quantize(x[:, :, :64], 3, 32, along, scale_format)
    joined.append(quantize(x[:, :, 64:], 3, 32, along, scale_format))
    assert joined.num_tokens == whole.num_tokens == 96
    assert torch.equal(joined.dequantize(), whole.dequantize())


def test_append_refuses_short_group_and_other_form() -> None:
    stored = quantize(torch.randn(1, 1, 20, 8), 4, 16, "tokens")
    with pytest.raises(ValueError, match="full groups only: 20 tokens"):
        stored.append(quantize(torch.randn(1, 1, 16, 8), 4, 16, "tokens"))
    with pytest.raises(ValueError, match="one form"):
        stored.append(quantize(torch.randn(1, 1, 16, 8), 2, 16, "tokens"))


@pytest.mark.parametrize("scale_format", ["float16", "bfloat16", "uint8"])
def test_constant_and_offset_groups(scale_format: str) -> None:
    """Constant groups come back (8-bit scales: to 1%), and a large offset does not overflow the zero point."""
    x = torch.cat([torch.zeros(1, 16, 8), torch.full((1, 16, 8), 5.0), 1000 + torch.rand(1, 16, 8)], dim=1)
    back = quantize(x, 4, 16, "tokens", scale_format).dequantize()
    assert torch.isfinite(back).all()
    assert (back - x).abs().max() <= 0.02 * 1001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 16, "tokens"), "bits must be"),
        ((9, 16, "tokens"), "bits must be"),
        ((4, 12, "tokens"), "multiple of 8"),
        ((4, 16, "heads"), "along must be"),
        ((4, 16, "tokens", "float8"), "scale_format must be"),
    ],
)
def test_wrong_options_are_named(options: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(1, 16, 16), *options)


def test_rows_are_independent() -> None:
    x = torch.randn(3, 2, 32, 16)
    before = quantize(x, 2, 16, "channels").dequantize()
    x[1] = 100.0
    after = quantize(x, 2, 16, "channels").dequantize()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])


def test_low_precision_input() -> None:
    x = torch.randn(1, 1, 32, 16, dtype=torch.bfloat16)
    assert quantize(x, 8, 32, "tokens").dequantize(torch.bfloat16).dtype == torch.bfloat16
