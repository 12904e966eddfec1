"""Quantised coefficients: packed codes that attention multiplies as integers.

A coefficient has one step for all tokens, fixed at the prefill, so that tokens folded in later join the same form:
`value = (code + 0.5 - 2 ** (bits - 1)) * step`. Steps are absorbed into the query and the output.

Legend: S streams, R coefficients, M tokens, P rows (queries times heads of a stream), K inner dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.quant import bit_planes, pack, packed_bytes, unpack
from kvcore.state import BatchedState

# A coefficient class of this width is not quantised: it is stored in the model's dtype.
UNQUANTIZED = 16
# Tokens of a packed segment are padded to this many: planes of 2 and 4 bits unpack eight bytes at a time.
ALIGNMENT = 32
# Folded tokens are repacked into the main segment when this many have gathered.
MERGE_TOKENS = 512
# Up to this many rows the product with integer codes is cheaper than converting the codes.
_INTEGER_ROWS = 48
_DIGIT = 127


def padded(count: int) -> int:
    """Tokens of a packed segment that holds `count`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def step_sizes(values: Tensor, bits: int, deviation: Tensor, multiples: Tensor) -> Tensor:
    """The step [S, R] of least squared error among `multiples` of a Gaussian's best one.

    Args:
        values: sample [S, M, R].
        bits: width of the codes.
        deviation: root mean square [S, R] of each coefficient.
        multiples: candidate factors.
    """
    candidates = deviation * GAUSSIAN_STEP[bits] * multiples[:, None, None]
    errors = torch.stack([squared_error(values, step, bits) for step in candidates])
    return candidates.gather(0, errors.argmin(0, keepdim=True))[0]


def squared_error(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Mean squared error [S, R] of quantising [S, M, R] with steps [S, R]."""
    half = 2 ** (bits - 1)
    step = step.unsqueeze(1)
    rounded = torch.div(values, step).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step)
    return rounded.sub_(values).square_().mean(1)


# Best uniform step of a unit Gaussian with 2 ** bits mid-rise levels (Max 1960, table II).
GAUSSIAN_STEP = {1: 1.596, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}


def encode(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Codes (uint8, same shape) of [S, M, R] with steps [S, R]."""
    half = 2 ** (bits - 1)
    return (values / step.unsqueeze(1)).floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8)


class Digits:
    """Rows [P, K] as two signed 8-bit digits and a scale: integer products are exact to 2 ** -15 of the largest entry.

    Args:
        rows: [P, K], any float dtype.
    """

    def __init__(self, rows: Tensor) -> None:
        rows = rows.float()
        self.scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / _DIGIT
        scaled = rows / self.scale
        high = scaled.round()
        self.digits = torch.cat([high, scaled.sub_(high).mul_(2 * _DIGIT).round_()]).to(torch.int8)

    def integers(self, codes: Tensor, start: int = 0) -> Tensor:
        """int32 [2 P, N]: the digits' own products with int8 codes [k, N], which belong to entries from `start`."""
        return torch._int_mm(self.digits[:, start : start + codes.shape[0]], codes)

    def joined(self, products: Tensor) -> Tensor:
        """fp32 [P, N] of the digits' products [2 P, N]."""
        high, low = products.chunk(2)
        return torch.add(high.float(), low, alpha=1 / (2 * _DIGIT)).mul_(self.scale)

    def product(self, codes: Tensor, start: int = 0) -> Tensor:
        """`rows[:, start : start + k] @ codes` for int8 codes [k, N], as fp32 [P, N]."""
        return self.joined(self.integers(codes, start))


def plane_logits(digits: Digits, packed: Tensor, bits: int, start: int) -> Tensor:
    """`Digits.product` with the raw codes of packed lines [k, bytes], without unpacking them: fp32 [P, tokens].

    A byte holds a code of one token in each field. The product with its lowest fields, less the product with one field
    fewer, is a field's own product times a power of two, exactly: one mask a field and no shift.
    """
    total: Tensor | None = None
    for plane, width, shift in _planes(packed, bits):
        fields: list[Tensor] = []
        below: Tensor | None = None
        for index in range(8 // width):
            product = digits.integers(_low_bits(plane, (index + 1) * width), start)
            if index == 8 // width - 1 and bits != 8:  # the signed byte is 128 less
                mine = digits.digits[:, start : start + plane.shape[0]]
                product = product + 128 * mine.sum(-1, keepdim=True, dtype=torch.int32)
            own = product if below is None else product - below
            fields.append(own * 2.0 ** (shift - width * index))
            below = product
        whole = torch.cat(fields, dim=-1)
        total = whole if total is None else total.add_(whole)
    assert total is not None
    return digits.joined(total)


class FieldDigits:
    """Rows [P, tokens] prepared for products with packed lines along the tokens, which are not unpacked.

    With fields `f_i` that begin at bit `s_i` of a byte and their rows `w_i`, `Σ f_i w_i` is the sum over i of
    (lowest i + 1 fields) times `w_i / 2^s_i - w_i+1 / 2^s_i+1`: one mask a field, no shift.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.float()
        self._prepared: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _fields(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Digits [2, fields, P, bytes], scales [fields, P, 1] and what the last field's signed bytes lack [P, 1]."""
        if width not in self._prepared:
            count = 8 // width
            powers = 0.5 ** (width * torch.arange(count, device=self.rows.device))
            scaled = self.rows.unflatten(-1, (count, -1)).transpose(0, 1) * powers[:, None, None]
            weights = torch.cat([scaled[:-1] - scaled[1:], scaled[-1:]])
            digits = Digits(weights.flatten(0, 1))
            self._prepared[width] = (
                digits.digits.unflatten(0, (2, count, -1)),
                digits.scale.unflatten(0, (count, -1)),
                128 * scaled[-1].sum(-1, keepdim=True),
            )
        return self._prepared[width]

    def product(self, packed: Tensor, bits: int) -> Tensor:
        """`rows @ raw codesᵀ` for packed lines [k, bytes]: fp32 [P, k]."""
        total: Tensor | None = None
        for plane, width, shift in _planes(packed, bits):
            digits, scale, lacking = self._fields(width)
            for index in range(8 // width):
                products = torch._int_mm(digits[:, index].flatten(0, 1), _low_bits(plane, (index + 1) * width).T)
                high, low = products.chunk(2)
                own = torch.add(high.float(), low, alpha=1 / (2 * _DIGIT)).mul_(scale[index] * 2.0**shift)
                total = own if total is None else total.add_(own)
            if bits != 8:
                assert total is not None
                total = total + lacking * 2.0**shift
        assert total is not None
        return total


def _planes(packed: Tensor, bits: int) -> Iterator[tuple[Tensor, int, int]]:
    """(bytes [k, n], width, shift) of each bit plane of packed lines."""
    first = shift = 0
    for width in bit_planes(bits):
        size = packed.shape[-1] * width // bits
        yield packed[:, first : first + size], width, shift
        first, shift = first + size, shift + width


def _low_bits(plane: Tensor, count: int) -> Tensor:
    """The lowest bits of bytes as int8; of all eight, less 128, which a signed byte can hold."""
    return (plane ^ 128 if count == 8 else plane & ((1 << count) - 1)).view(torch.int8)


def integer_path(rows: Tensor) -> bool:
    """Whether the product of rows [S, P, K] with codes goes through 8-bit integers (single-token steps on a CPU)."""
    return rows.device.type == "cpu" and rows.shape[0] == 1 and rows.shape[1] <= _INTEGER_ROWS


class CoefficientClass(BatchedState):
    """Coefficients of one width: a main segment packed over all its tokens, and tiles of tokens folded in later.

    Attributes:
        bits: width, or 16 for unquantised.
        main: uint8 [S, R, bytes] over `padded(main_tokens)` tokens, or floats [S, R, padded(main_tokens)].
        tail: uint8 [S, R, tiles, bytes per tile], or floats [S, R, tiles, tokens per tile]; None before the first fold.
    """

    def __init__(self, bits: int, values: Tensor, dtype: torch.dtype) -> None:
        """`values`: codes (uint8) or coefficients [S, M, R]."""
        self.bits, self.dtype = bits, dtype
        self.tail: Tensor | None = None
        self.tile_tokens = 0
        self.main_tokens = values.shape[1]
        self.main = self._packed(values.transpose(1, 2))

    def _packed(self, lines: Tensor) -> Tensor:
        lines = F.pad(lines, (0, padded(lines.shape[-1]) - lines.shape[-1]))
        return lines.to(self.dtype) if self.bits == UNQUANTIZED else pack(lines.contiguous(), self.bits)

    @property
    def num_coefficients(self) -> int:
        return self.main.shape[1]

    @property
    def offset(self) -> float:
        """What is added to a raw number of `segments` before it is multiplied by the step."""
        if self.bits == UNQUANTIZED:
            return 0.0
        return 0.5 if self.bits == 8 else 0.5 - 2 ** (self.bits - 1)

    def segments(self) -> list[Tensor]:
        """Raw numbers [S, R, tokens] of main (padding included) and tail: int8 codes, or floats."""
        return [self.segment(index) for index in range(1 if self.tail is None else 2)]

    def segment(self, index: int) -> Tensor:
        """Raw numbers of main (0) or tail (1)."""
        if index == 0:
            return self._raw(self.main, padded(self.main_tokens))
        assert self.tail is not None
        return self._raw(self.tail, self.tile_tokens).flatten(-2)

    def _raw(self, stored: Tensor, tokens: int) -> Tensor:
        if self.bits == UNQUANTIZED:
            return stored
        codes = unpack(stored, self.bits, tokens)
        # 8-bit codes do not fit a signed byte: flipping the top bit subtracts 128
        return (codes ^ 128 if self.bits == 8 else codes).view(torch.int8)

    def append(self, values: Tensor) -> None:
        """Fold in a tile of codes or coefficients [S, tile tokens, R]."""
        lines = values.transpose(1, 2)
        self.tile_tokens = lines.shape[-1]
        tile = lines.to(self.dtype) if self.bits == UNQUANTIZED else pack(lines.contiguous(), self.bits)
        tile = tile.unsqueeze(2)
        self.tail = tile if self.tail is None else torch.cat([self.tail, tile], dim=2)

    def drop_oldest_tile(self) -> None:
        """Forget the oldest folded tile."""
        assert self.tail is not None
        self.tail = self.tail[:, :, 1:].clone() if self.tail.shape[2] > 1 else None

    def merge(self) -> None:
        """Repack the folded tiles into the main segment."""
        assert self.tail is not None
        main, tail = self.segments()
        raw = torch.cat([main[..., : self.main_tokens], tail], dim=-1)
        if self.bits != UNQUANTIZED:
            raw = raw.view(torch.uint8)
            raw = raw ^ 128 if self.bits == 8 else raw
        self.main_tokens, self.tail = raw.shape[-1], None
        self.main = self._packed(raw)

    def reorder(self, order: Tensor) -> None:
        """Bring the main tokens of each stream into the order [S, M]."""
        raw = self.segments()[0]
        if self.bits != UNQUANTIZED:
            raw = raw.view(torch.uint8) ^ (128 if self.bits == 8 else 0)
        self.main = self._packed(raw.gather(2, order.unsqueeze(1).expand(-1, raw.shape[1], -1)))

    @property
    def tail_tokens(self) -> int:
        return 0 if self.tail is None else self.tail.shape[2] * self.tile_tokens


class CoefficientStore(BatchedState):
    """All coefficients of the keys (or values) of a block.

    Attributes:
        classes: from the widest to the narrowest; coefficients are numbered through them.
        step: [S, R], fp32.
        offset: [R], fp32: what is added to a raw number before it is multiplied by its step.
    """

    def __init__(self, classes: list[CoefficientClass], step: Tensor) -> None:
        self.classes, self.step = classes, step
        offsets = [offset for group in classes for offset in [group.offset] * group.num_coefficients]
        self.offset = torch.tensor(offsets, device=step.device)

    @property
    def num_tokens(self) -> int:
        first = self.classes[0]
        return first.main_tokens + first.tail_tokens

    def logits(self, rows: Tensor) -> Tensor:
        """`rows · coefficients`: [S, P, R] -> [S, P, M], fp32.

        Nothing is rounded to fewer bits on the way: raw codes are far from centred, so their products are large.
        """
        scaled = rows.float() * self.step.unsqueeze(1)
        digits = Digits(scaled[0]) if integer_path(rows) else None
        parts: list[Tensor] = []
        start = 0
        for group in self.classes:
            stop = start + group.num_coefficients
            for index in range(1 if group.tail is None else 2):
                if digits is None or group.bits == UNQUANTIZED:
                    product = torch.matmul(scaled[..., start:stop], group.segment(index).float())
                elif index == 0:
                    product = plane_logits(digits, group.main[0], group.bits, start).unsqueeze(0)
                else:
                    product = digits.product(group.segment(index)[0], start).unsqueeze(0)
                if index == len(parts):
                    parts.append(product)
                else:
                    parts[index] += product
            start = stop
        parts[0] = parts[0][..., : self.classes[0].main_tokens]
        whole = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return whole.add_(torch.matmul(scaled, self.offset).unsqueeze(-1))

    def mix(self, weights: Tensor) -> Tensor:
        """`weights · coefficients`: [S, P, M] -> [S, P, R], fp32."""
        first = self.classes[0]
        main = F.pad(weights[..., : first.main_tokens], (0, padded(first.main_tokens) - first.main_tokens))
        parts = [main] if first.tail is None else [main, weights[..., first.main_tokens :]]
        use_digits = integer_path(weights)
        fields = FieldDigits(main[0]) if use_digits else None
        tail_digits = Digits(parts[1][0]) if use_digits and len(parts) > 1 else None
        outputs = []
        for group in self.classes:
            mixed: Tensor | None = None
            for index, part in enumerate(parts):
                if fields is None or group.bits == UNQUANTIZED:
                    product = torch.matmul(part.float(), group.segment(index).float().mT)
                elif tail_digits is not None and index == 1:
                    product = tail_digits.product(group.segment(1)[0].T).unsqueeze(0)
                else:
                    product = fields.product(group.main[0], group.bits).unsqueeze(0)
                mixed = product if mixed is None else mixed.add_(product)
            assert mixed is not None
            outputs.append(mixed)
        total = weights.float().sum(-1, keepdim=True)
        return torch.cat(outputs, dim=-1).addcmul_(total, self.offset).mul_(self.step.unsqueeze(1))

    def coefficients(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Every coefficient [S, M, R]; for the probe, for tests and plots."""
        first, columns = self.classes[0], []
        for group in self.classes:
            segments = group.segments()
            segments[0] = segments[0][..., : first.main_tokens]
            columns.append(torch.cat(segments, dim=-1).to(dtype) + group.offset)
        return torch.cat(columns, dim=1).mT * self.step.unsqueeze(1).to(dtype)

    def append(self, values: Tensor) -> Tensor:
        """Fold in a tile of coefficients [S, tile tokens, R] with the fixed steps; returns them as stored."""
        start, stored = 0, []
        for group in self.classes:
            columns = slice(start, start + group.num_coefficients)
            mine, step = values[..., columns], self.step[:, columns]
            if group.bits == UNQUANTIZED:
                group.append(mine)
                stored.append(mine)
            else:
                codes = encode(mine, step, group.bits)
                group.append(codes)
                stored.append((codes.float() + (0.5 - 2 ** (group.bits - 1))) * step.unsqueeze(1))
            start += group.num_coefficients
        if self.classes[0].tail_tokens >= MERGE_TOKENS:
            self.merge()
        return torch.cat(stored, dim=-1)

    def reorder(self, order: Tensor) -> None:
        """Bring the tokens of each stream into the order [S, M] (before anything is folded in)."""
        for group in self.classes:
            group.reorder(order)

    def merge(self) -> None:
        """Repack folded tiles into the main segment."""
        for group in self.classes:
            group.merge()

    def drop_oldest_tile(self) -> None:
        """Forget the oldest folded tokens."""
        for group in self.classes:
            group.drop_oldest_tile()


def class_bytes(bits: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one coefficient's codes in the main segment, its step and offset included."""
    return (padded(tokens) * dtype.itemsize if bits == UNQUANTIZED else packed_bytes(padded(tokens), bits)) + 8
