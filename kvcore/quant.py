"""Group-wise asymmetric quantisation with truly packed integers, shared by every quantising method.

A group of `group_size` neighbours (along tokens or along channels) shares one scale and one zero point:
`x ~ zero + scale * code`, codes of 1 to 8 bits (the paper forms use 8/6/4/3/2). Codes are packed into bytes as
power-of-two bit planes (3 = 2 + 1, 6 = 4 + 2), so that packing and unpacking are a few vectorised shifts.

Legend: ... leading dimensions (batch first), N tokens, C channels, G groups, g entries of one group, P packed bytes
of one group.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.state import BatchedState

Along = Literal["tokens", "channels"]
ScaleFormat = Literal["float16", "bfloat16", "uint8"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("float16", "bfloat16", "uint8")

# 8-bit scales: 2 ** ((code - 128) / 8), a relative step of 9% over 2**-16 .. 2**15.9.
_STEPS_PER_OCTAVE, _SCALE_OFFSET = 8, 128
# 8-bit zero points: quarters of the scale, so that |zero| <= 31 scales can be written.
_ZERO_STEPS, _ZERO_REACH = 4, 31


class QuantizedTensor(BatchedState):
    """A quantised [..., N, C] tensor.

    Attributes:
        bits, group_size, along: as given to `quantize`.
        length: N with along="tokens", C with along="channels": entries before padding of the last group.
        codes: uint8 [..., C, G, P] (along="tokens") or [..., N, G, P] (along="channels").
        scale, zero: [..., C, G] or [..., N, G], in the scale format.
    """

    def __init__(
        self, bits: int, group_size: int, along: Along, length: int, codes: Tensor, scale: Tensor, zero: Tensor
    ) -> None:
        self.bits, self.group_size, self.along, self.length = bits, group_size, along, length
        self.codes, self.scale, self.zero = codes, scale, zero

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The approximate [..., N, C] tensor (with along="tokens" a transposed view)."""
        scale, zero = decode_scales(self.scale, self.zero, dtype)
        grouped = unpack(self.codes, self.bits, self.group_size).to(dtype)
        grouped = torch.addcmul(zero.unsqueeze(-1), grouped, scale.unsqueeze(-1))
        flat = grouped.flatten(-2)[..., : self.length]
        return flat.transpose(-1, -2) if self.along == "tokens" else flat

    def append(self, other: QuantizedTensor) -> None:
        """Add the tokens of `other` (same form) behind the own ones.

        Raises:
            ValueError: the forms differ, or (along="tokens") the last own group is not full.
        """
        mine, theirs = (self.bits, self.group_size, self.along), (other.bits, other.group_size, other.along)
        if mine != theirs:
            raise ValueError(
                f"only tensors of one form can be joined; received (bits, group_size, along) {mine}, {theirs}"
            )
        if self.along == "tokens":
            if self.length % self.group_size:
                raise ValueError(
                    f"tokens can be appended behind full groups only: {self.length} tokens in groups of "
                    f"{self.group_size}. Quantise multiples of group_size and keep the rest exact"
                )
            self.length += other.length
        # codes carry one dimension more than scales; groups (or tokens) are the last but one of the scales' layout
        dim = -1 if self.along == "tokens" else -2
        self.codes = torch.cat([self.codes, other.codes], dim=dim - 1)
        self.scale = torch.cat([self.scale, other.scale], dim=dim)
        self.zero = torch.cat([self.zero, other.zero], dim=dim)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.length if self.along == "tokens" else self.codes.shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


def quantize(
    x: Tensor, bits: int, group_size: int, along: Along, scale_format: ScaleFormat = "float16"
) -> QuantizedTensor:
    """Quantise [..., N, C] with one scale and zero point per group; the last group may be short.

    Args:
        x: [..., N, C], any float dtype; computed in fp32.
        bits: 1..8 bits per code.
        group_size: neighbours that share a scale, a multiple of 8.
        along: "tokens" (KIVI keys: per channel, neighbours in time) or "channels" (KIVI values: per token).
        scale_format: dtype of scales and zero points; "uint8" stores both in 8 bits.

    Raises:
        ValueError: bits, group size, direction or scale format outside the valid ones.
    """
    check_options(bits, group_size, scale_format)
    if along not in ("tokens", "channels"):
        raise ValueError(f"along must be 'tokens' or 'channels'; received {along!r}")
    lines = x.float().transpose(-1, -2) if along == "tokens" else x.float()
    length = lines.shape[-1]
    missing = -length % group_size
    if missing:
        # repeat the last entry, which leaves the last group's range as it is
        lines = torch.cat([lines, lines[..., -1:].expand(*lines.shape[:-1], missing)], dim=-1)
    grouped = lines.unflatten(-1, (-1, group_size))
    low, high = grouped.aminmax(dim=-1)
    scale, zero = encode_scales(low, high, bits, scale_format)
    step, base = decode_scales(scale, zero)
    codes = ((grouped - base.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return QuantizedTensor(bits, group_size, along, length, pack(codes, bits), scale, zero)


def check_options(bits: int, group_size: int, scale_format: str) -> None:
    """Refuse options that cannot be packed.

    Raises:
        ValueError: naming the rule and the value received.
    """
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 1 to 8; received {bits!r}")
    if not isinstance(group_size, int) or group_size < 8 or group_size % 8:
        raise ValueError(f"group_size must be a multiple of 8 (packed bytes); received {group_size!r}")
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {', '.join(SCALE_FORMATS)}; received {scale_format!r}")


def encode_scales(low: Tensor, high: Tensor, bits: int, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Scale and zero point, in storage form, of groups that span [low, high] (fp32)."""
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    if scale_format == "uint8":
        scale = torch.maximum(scale, low.abs() / _ZERO_REACH)
        # rounded up, so that the range stays covered
        exponent = (scale.log2() * _STEPS_PER_OCTAVE).ceil().clamp(-_SCALE_OFFSET, 127)
        zero = (low * torch.exp2(-exponent / _STEPS_PER_OCTAVE) * _ZERO_STEPS).round().clamp(-128, 127)
        return (exponent + _SCALE_OFFSET).to(torch.uint8), zero.to(torch.int8)
    dtype = getattr(torch, scale_format)
    tiny = torch.finfo(dtype).tiny
    return scale.clamp_min(tiny).to(dtype), low.to(dtype)


def decode_scales(scale: Tensor, zero: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Scale and zero point as numbers of `dtype`."""
    if scale.dtype == torch.uint8:
        step = torch.exp2((scale.float() - _SCALE_OFFSET) / _STEPS_PER_OCTAVE)
        return step.to(dtype), (zero.float() * step / _ZERO_STEPS).to(dtype)
    return scale.to(dtype), zero.to(dtype)


def bit_planes(bits: int) -> list[int]:
    """Widths of the power-of-two planes of a code, widest (lowest bits) first: 6 -> [4, 2]."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` packed codes."""
    return sum(-(-count * width // 8) for width in bit_planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., n] into bytes [..., packed_bytes(n, bits)].

    In the plane of width w one byte holds the entries i, i + n', i + 2n', ... (n' = bytes of the plane).
    """
    planes, shift = [], 0
    for width in bit_planes(bits):
        per_byte = 8 // width
        plane = (codes >> shift) & (2**width - 1)
        plane = F.pad(plane, (0, -plane.shape[-1] % per_byte)).unflatten(-1, (per_byte, -1))
        packed = plane[..., 0, :].clone()
        for index in range(1, per_byte):
            packed |= plane[..., index, :] << (index * width)
        planes.append(packed)
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` uint8 codes [..., count] of `pack`."""
    codes: Tensor | None = None
    start = shift = 0
    for width in bit_planes(bits):
        size = packed_bytes(count, width)
        plane = _unpack_plane(packed[..., start : start + size], width)[..., :count]
        codes = plane if codes is None else codes | (plane << shift)
        start += size
        shift += width
    assert codes is not None
    return codes


def _unpack_plane(plane: Tensor, width: int) -> Tensor:
    """Fields of one plane [..., p] as uint8 [..., p * 8 / width]."""
    if width == 8:
        return plane
    size = plane.shape[-1]
    fields = plane.new_empty(*plane.shape[:-1], size * 8 // width)
    mask, source, target = 2**width - 1, plane, fields
    if size % 8 == 0 and plane.numel() and all(s % 8 == 0 for s in (*plane.stride()[:-1], plane.storage_offset())):
        # eight bytes at a time; the mask takes off what the shift brings in from the byte above
        mask, source, target = mask * 0x0101010101010101, plane.view(torch.int64), fields.view(torch.int64)
        size //= 8
    for index in range(8 // width):
        out = target[..., index * size : (index + 1) * size]
        torch.bitwise_and(source >> (index * width) if index else source, mask, out=out)
    return fields


def quantized_bytes(
    num_tokens: int, num_channels: int, bits: int, group_size: int, along: Along, scale_format: ScaleFormat = "float16"
) -> int:
    """Bytes that `quantize` stores for [num_tokens, num_channels], for planning a budget."""
    lines, length = (num_channels, num_tokens) if along == "tokens" else (num_tokens, num_channels)
    groups = -(-length // group_size)
    side = 2 if scale_format == "uint8" else 4
    return lines * groups * (packed_bytes(group_size, bits) + side)
