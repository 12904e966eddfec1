"""Unpacking of bit planes into reused buffers, the inner step of the torch path.

A packed line of n codes is cut in eighths: plane of width w is w pieces of n / 8 bytes, and byte j of piece s holds, in
its field f, the code of token (s + f * w) * n / 8 + j. A run of j therefore unpacks on its own, for every width, which
lets the codes of a tile be unpacked, converted and multiplied while they are in the processor's cache.

Legend: ... leading dimensions, J bytes of one eighth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.kernels.operands import field_tables

# Codes of one tile: its 8-bit and 16-bit forms fit a 2 MB second-level cache.
TILE_CODES = 1 << 19


def tile_length(codes_per_step: int, total: int) -> int:
    """Steps of a tile when one step unpacks `codes_per_step` codes; at most `total`, in multiples of 64 if longer."""
    steps = max(1, TILE_CODES // max(codes_per_step, 1))
    return min(total, max(64, steps // 64 * 64) if steps >= 64 else steps)


def tiles(num_lines: int, codes_per_byte: int, eighth: int) -> list[tuple[slice, slice]]:
    """Tiles (lines, bytes of each eighth) that cover `num_lines` lines of `eighth` bytes.

    A tile is long before it is wide: runs of neighbouring bytes are what vector instructions read.

    Args:
        num_lines: streams of all batch rows.
        codes_per_byte: codes of one stream at one byte of every eighth.
        eighth: bytes of an eighth.
    """
    length = tile_length(codes_per_byte, eighth)
    width = min(num_lines, max(1, TILE_CODES // max(1, codes_per_byte * length)))
    return [
        (slice(line, line + width), slice(first, first + length))
        for line in range(0, num_lines, width)
        for first in range(0, eighth, length)
    ]


class Unpacker:
    """Turns packed codes into numbers of one dtype, through buffers that are allocated once.

    Args:
        dtype: of the numbers; codes of up to 8 bits are exact in bf16, fp16 and fp32.
        device: where the codes are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._bytes: Tensor | None = None
        self._field: Tensor | None = None
        self._numbers: Tensor | None = None

    def __call__(self, pieces: Tensor, bits: int) -> Tensor:
        """Codes [..., 8, J] as numbers, from packed pieces uint8 [..., bits, J]; valid until the next call."""
        shape = (*pieces.shape[:-2], 8, pieces.shape[-1])
        codes = self._view("_bytes", shape, torch.uint8)
        start = 0
        for width, shift in field_tables(bits):
            plane = pieces[..., start : start + width, :]
            for index in range(8 // width):
                target = codes[..., index * width : (index + 1) * width, :]
                self._extract(plane, index * width, width, shift, target)
            start += width
        return self._view("_numbers", shape, self.dtype).copy_(codes)

    def _extract(self, plane: Tensor, low: int, width: int, shift: int, target: Tensor) -> None:
        """Bits [low, low + width) of the plane's bytes, moved to bit `shift`, into `target`."""
        mask = (1 << width) - 1
        field = target if shift == 0 else self._view("_field", tuple(plane.shape), torch.uint8)
        if low == 0:
            torch.bitwise_and(plane, mask, out=field)
        else:
            torch.bitwise_right_shift(plane, low, out=field)
            if low + width < 8:
                field.bitwise_and_(mask)
        if shift:
            target.bitwise_or_(field.bitwise_left_shift_(shift))

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        buffer = getattr(self, name)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=dtype, device=self.device)
            setattr(self, name, buffer)
        return buffer[:count].view(shape)
