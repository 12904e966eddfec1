"""All coefficients of one side of a block: stored as planes, multiplied without being unpacked.

Legend: S streams, R coefficients, M tokens, c columns (see `planes`), P rows (queries times heads of a stream).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from freqdepth.codes import UNQUANTIZED, code_offsets, encode, padded
from freqdepth.planes import Plane, plane_layout, plane_runs
from kvcore.kernels import plane_logits, plane_mix
from kvcore.kernels.plane_operands import LINES, CoefficientPlanes, TokenLines
from kvcore.state import BatchedState

# Folded tokens join the prompt's when this many have gathered.
MERGE_TOKENS = 512


class CoefficientStore(BatchedState):
    """All coefficients of the keys (or values) of a block.

    Attributes:
        widths: (bits, coefficients) from the widest to the narrowest; coefficients are numbered through them.
        planes: the codes, one plane per width in use.
        dense: unquantised coefficients [S, 8, c, R'] in the model's dtype, or None.
        step: [S, R], fp32.
        offset: [R], fp32: what is added to a code before it is multiplied by its step.
        main_tokens, tail_tokens: tokens of the prompt and tokens folded in since.
    """

    def __init__(self, widths: list[tuple[int, int]], raw: list[Tensor], step: Tensor, dtype: torch.dtype) -> None:
        """`raw`: per width, codes (uint8) or coefficients [S, M, R_w]; `dtype` is that of unquantised ones."""
        self.widths, self.step, self.dtype = widths, step, dtype
        self.offset = code_offsets(widths).to(step.device)
        self.planes: list[Plane] = []
        self.dense: Tensor | None = None
        self._fill(raw)

    def _fill(self, raw: list[Tensor]) -> None:
        """Store all tokens anew, in this order."""
        self.main_tokens, self.tail_tokens, self.tile_tokens = raw[0].shape[1], 0, 0
        missing = padded(self.main_tokens) - self.main_tokens
        raw = [F.pad(part, (0, 0, 0, missing)) for part in raw]
        self.planes = [Plane(width, self._plane_codes(raw, width)) for width in plane_layout(self.widths)]
        self.dense = None
        if self.widths[0][0] == UNQUANTIZED:
            self.dense = raw[0].to(self.dtype).unflatten(1, (LINES, -1)).clone()

    def _plane_codes(self, raw: list[Tensor], width: int) -> Tensor:
        """The rows [S, M, K] of one plane; bits above the plane's are left in."""
        return torch.cat([raw[rows.index] >> rows.shift for rows in plane_layout(self.widths)[width]], dim=-1)

    @property
    def num_tokens(self) -> int:
        return self.main_tokens + self.tail_tokens

    @property
    def num_dense(self) -> int:
        """Unquantised coefficients, which come first."""
        return 0 if self.dense is None else self.dense.shape[-1]

    @property
    def lines(self) -> TokenLines:
        """Where the tokens stand: the prompt, then the folded ones."""
        return TokenLines(self.main_tokens, padded(self.main_tokens) // LINES, self.tail_tokens, self.tile_tokens)

    def _codes(self) -> CoefficientPlanes:
        """The quantised coefficients as products take them."""
        packed = [plane.packed.flatten(1, 2) for plane in self.planes]
        return CoefficientPlanes(packed, plane_runs(tuple(self.widths)), self.step.shape[1], self.lines)

    def logits(self, rows: Tensor) -> Tensor:
        """`rows · coefficients`: [S, P, R] -> [S, P, M], fp32.

        Nothing is rounded to fewer bits on the way: raw codes are far from centred, so their products are large.
        Unquantised fp32 coefficients are added up in double precision: a token's coefficients describe every layer and
        head of its stream, so that a sum of them passes through numbers much larger than one layer's logit.
        """
        scaled = rows.float() * self.step.unsqueeze(1)
        total = torch.matmul(scaled, self.offset).unsqueeze(-1)
        if self.planes:
            total = plane_logits(scaled, self._codes()).add_(total)
        if self.dense is not None:
            wide = torch.float64 if self.dense.dtype == torch.float32 else torch.float32
            mine = scaled[..., : self.num_dense].to(wide)
            total = self.lines.to_tokens(torch.matmul(mine, self.dense.flatten(1, 2).to(wide).mT).float()) + total
        return total

    def mix(self, weights: Tensor) -> Tensor:
        """`weights · coefficients`: [S, P, M] -> [S, P, R], fp32."""
        weights = weights.float()
        if self.planes:
            output = plane_mix(weights, self._codes())
        else:
            output = weights.new_zeros(*weights.shape[:2], self.step.shape[1])
        if self.dense is not None:
            output[..., : self.num_dense] = torch.matmul(self.lines.to_lines(weights), self.dense.flatten(1, 2).float())
        return output.addcmul_(weights.sum(-1, keepdim=True), self.offset).mul_(self.step.unsqueeze(1))

    def _raw(self) -> list[Tensor]:
        """Per width, codes or coefficients [S, M, R_w] in token order."""
        found: dict[int, Tensor] = {}
        for plane, parts in zip(self.planes, plane_layout(self.widths).values(), strict=True):
            codes = self.lines.to_tokens(plane.codes().movedim(-1, 1).flatten(-2)).mT
            pieces = codes.split([rows.columns.stop - rows.columns.start for rows in parts], dim=-1)
            for rows, piece in zip(parts, pieces, strict=True):
                shifted = piece << rows.shift
                found[rows.index] = found[rows.index] | shifted if rows.index in found else shifted
        if self.dense is not None:
            found[0] = self.lines.to_tokens(self.dense.movedim(-1, 1).flatten(-2)).mT
        return [found[index] for index in range(len(self.widths))]

    def coefficients(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Every coefficient [S, M, R]; for the probe, for tests and plots."""
        raw = torch.cat([part.to(dtype) for part in self._raw()], dim=-1)
        return raw.add_(self.offset).mul_(self.step.unsqueeze(1))

    def append(self, values: Tensor) -> Tensor:
        """Fold in a tile of coefficients [S, tile tokens, R] with the fixed steps; returns them as stored."""
        start, raw, stored = 0, [], []
        for bits, count in self.widths:
            mine, step = values[..., start : start + count], self.step[:, start : start + count]
            raw.append(mine if bits == UNQUANTIZED else encode(mine, step, bits))
            stored.append((raw[-1].float() + self.offset[start : start + count]) * step.unsqueeze(1))
            start += count
        for plane in self.planes:
            plane.append(self._plane_codes(raw, plane.width))
        if self.dense is not None:
            self.dense = torch.cat([self.dense, raw[0].to(self.dtype).unflatten(1, (LINES, -1))], dim=2)
        self.tile_tokens = values.shape[1]
        self.tail_tokens += self.tile_tokens
        if self.tail_tokens >= MERGE_TOKENS:
            self.merge()
        return torch.cat(stored, dim=-1)

    def reorder(self, order: Tensor) -> None:
        """Bring the tokens of each stream into the order [S, M] (before anything is folded in)."""
        self._fill([raw.gather(1, order.unsqueeze(-1).expand(-1, -1, raw.shape[-1])) for raw in self._raw()])

    def merge(self) -> None:
        """Make folded tokens part of the main ones: fewer tiles to bring into order at every step."""
        self._fill(self._raw())

    def drop_oldest_tile(self) -> None:
        """Forget the oldest folded tokens."""
        first, count = padded(self.main_tokens) // LINES, self.tile_tokens // LINES
        for plane in self.planes:
            plane.drop_columns(first, count)
        if self.dense is not None:
            self.dense = torch.cat([self.dense[:, :, :first], self.dense[:, :, first + count :]], dim=2)
        self.tail_tokens -= self.tile_tokens
