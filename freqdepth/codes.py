"""Quantised coefficients: packed codes that attention multiplies as integers.

A coefficient has one step for all tokens, fixed at the prefill, so that tokens folded in later join the same form:
`value = (code + 0.5 - 2 ** (bits - 1)) * step`. Steps are absorbed into the query and the output.

Legend: S streams, R coefficients, M tokens, P rows (queries times heads of a stream), K inner dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.quant import pack, packed_bytes, unpack
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
        self.scale = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / _DIGIT
        scaled = rows.float() / self.scale
        high = scaled.round()
        low = ((scaled - high) * (2 * _DIGIT)).round_()
        self.digits = torch.cat([high, low]).to(torch.int8)

    def product(self, codes: Tensor, start: int = 0) -> Tensor:
        """`rows[:, start : start + k] @ codes` for int8 codes [k, N], as fp32 [P, N]."""
        part = self.digits[:, start : start + codes.shape[0]]
        high, low = torch._int_mm(part, codes).chunk(2)
        return torch.add(high.float(), low, alpha=1 / (2 * _DIGIT)).mul_(self.scale)


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
        found = [self._raw(self.main, padded(self.main_tokens))]
        if self.tail is not None:
            found.append(self._raw(self.tail, self.tile_tokens).flatten(-2))
        return found

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
            for index, raw in enumerate(group.segments()):
                if digits is not None and raw.dtype == torch.int8:
                    product = digits.product(raw[0], start).unsqueeze(0)
                else:
                    product = torch.matmul(scaled[..., start:stop], raw.float())
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
        digits = [Digits(part[0]) for part in parts] if use_digits else []
        outputs = []
        for group in self.classes:
            mixed: Tensor | None = None
            for index, raw in enumerate(group.segments()):
                if use_digits and raw.dtype == torch.int8:
                    product = digits[index].product(raw[0].T).unsqueeze(0)
                else:
                    product = torch.matmul(parts[index].float(), raw.float().mT)
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
