"""The finest map: a few low-bit coordinates of every key, from which the logit of every token is estimated.

sekv.md, section 2 ("a finer map"). Few directions carry most of what a logit varies by: those get more bits, the many
others two (at equal bytes 8 x 4 + 24 x 2 bits estimate logits as well as 32 x 4, and 20 x 4 do far worse).

Legend: B batch rows, Hq query heads, Hkv KV heads, N tokens, d head dimension, m sketch dimensions, P packed bytes
per token. Keys are post-RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.kernels import coordinate_logits, group_queries
from kvcore.state import BatchedState
from sekv.routing import Summary
from sekv.summary import sketch_basis

SKETCH_BITS = (2, 4, 8)
COARSE_BITS = 2
BASIS_DTYPE = torch.float16
# coordinates this many deviations from their mean are clipped, so that steps stay fine (2 bits: near the best uniform
# quantiser of a Gaussian)
CLIP_DEVIATIONS = {2: 1.7, 4: 4.0, 8: 4.0}


@dataclass(frozen=True)
class SketchForm:
    """How many coordinates a key gets, and of how many bits.

    Attributes:
        dims: m, a multiple of 2.
        fine: leading coordinates with `bits` bits; the others have 2.
        bits: 2, 4 or 8.
    """

    dims: int
    fine: int
    bits: int

    @classmethod
    def fitting(cls, dims: int, fine: int, bits: int) -> SketchForm:
        """With the smallest number of fine coordinates >= `fine` that leaves whole bytes to the others."""
        fine = min(fine, dims)
        return cls(dims, fine + (dims - fine) % (8 // COARSE_BITS), bits)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(coordinates, bits) of the fine and of the coarse part, those that exist."""
        return [part for part in ((self.fine, self.bits), (self.dims - self.fine, COARSE_BITS)) if part[0]]

    @property
    def token_bytes(self) -> int:
        """P."""
        return sum(-(-dims * bits // 8) for dims, bits in self.parts)

    def device_bytes(self, tokens: int, head_dim: int) -> int:
        """Device bytes per KV head of a sketch of `tokens` tokens."""
        return tokens * self.token_bytes + self.dims * (head_dim * BASIS_DTYPE.itemsize + 8) + 4 * head_dim


class Sketch(BatchedState):
    """Codes of every token of one layer and what decodes them.

    Attributes:
        form: dimensions and bits.
        codes: uint8 [B, Hkv, P, N], the fine part before the coarse one. In a part of n bytes a token, the highest bits
            of byte j hold coordinate j, the next ones coordinate n + j, and so on.
        step, low: [B, Hkv, m] fp32; coordinate = low + step * code.
        synthesis: [B, Hkv, m, d] rows; key ≈ centre + Σ coordinate · row.
        centre: [B, Hkv, d].
    """

    def __init__(self, form: SketchForm, synthesis: Tensor, centre: Tensor, low: Tensor, step: Tensor) -> None:
        self.form = form
        self.synthesis, self.centre, self.low, self.step = synthesis, centre, low, step
        shape = (*synthesis.shape[:2], form.token_bytes, 0)
        self.codes = torch.empty(shape, dtype=torch.uint8, device=synthesis.device)

    @classmethod
    def fit(cls, keys: Tensor, visible: Tensor, query_moment: Tensor | None, form: SketchForm) -> tuple[Sketch, Tensor]:
        """A sketch of the prompt's keys, and the analysis rows [B, Hkv, m, d] that encode later ones.

        Args:
            keys: [B, Hkv, N, d].
            visible: [B, N] tokens that count.
            query_moment: [B, Hkv, d, d] or None (see `sketch_basis`).
            form: its dimensions are at most d.
        """
        centre, analysis, synthesis = sketch_basis(keys, visible, query_moment, form.dims)
        coordinates = (keys.float() - centre.unsqueeze(2)) @ analysis.mT
        pieces = coordinates.split([dims for dims, _ in form.parts], dim=-1)
        ranges = [_ranges(piece, visible, bits) for piece, (_, bits) in zip(pieces, form.parts, strict=True)]
        low, step = (torch.cat(values, dim=-1) for values in zip(*ranges, strict=True))
        sketch = cls(form, synthesis.to(BASIS_DTYPE), centre, low, step)
        sketch.append(keys, analysis)
        return sketch, analysis

    def append(self, keys: Tensor, analysis: Tensor) -> None:
        """Encode further tokens [B, Hkv, n, d] of every row."""
        every = torch.arange(keys.shape[0], device=keys.device)
        self.codes = torch.cat([self.codes, self.encoded(keys, analysis, every)], dim=-1)

    def encoded(self, keys: Tensor, analysis: Tensor, rows: Tensor) -> Tensor:
        """Codes [x, Hkv, P, n] of keys [x, Hkv, n, d] of some batch rows [x]; analysis rows [B, Hkv, m, d] of all."""
        analysis = analysis.to(keys.device)[rows].float()
        coordinates = (keys.float() - self.centre[rows].unsqueeze(2)) @ analysis.mT
        codes = ((coordinates - self.low[rows].unsqueeze(2)) / self.step[rows].unsqueeze(2)).round_().mT
        pieces = codes.split([dims for dims, _ in self.form.parts], dim=2)
        packed = [_pack(piece, bits) for piece, (_, bits) in zip(pieces, self.form.parts, strict=True)]
        return torch.cat(packed, dim=2)

    def misfit(self, keys: Tensor, visible: Tensor, query_moment: Tensor | None) -> Tensor:
        """Mean squared error [B, Hkv, N] of each token's estimated logit over the queries; -1 for hidden tokens.

        Args:
            keys, visible, query_moment: as in `fit`, of the tokens that the sketch holds.
        """
        error = keys.float() - self.centre.unsqueeze(2)
        error -= self.coordinates() @ self.synthesis.float()
        seen = error if query_moment is None else error @ query_moment.float()
        return (seen * error).sum(-1).masked_fill_(~visible[:, None], -1.0)

    def logits(self, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """Estimated logits [B, Hq, Q, N] (fp32) of routed, scaled queries [B, Hq, Q, d]: `routing.token_logits` on
        the packed codes. Steps are folded into the query, so that the codes are only converted, never rescaled. Into
        `out` where it is given (see `coordinate_logits`)."""
        grouped = group_queries(routed.float(), self.synthesis.shape[1])
        on_basis = grouped @ self.synthesis.float().mT  # [B, Hkv, G Q, m]
        offset = grouped @ self.centre.unsqueeze(-1) + on_basis @ self.low.unsqueeze(-1)
        weights = on_basis * self.step.unsqueeze(2)
        shape = routed.shape[:3]
        return coordinate_logits(weights.view(*shape, -1), self.codes, self.form.parts, offset.view(shape), out)

    def coordinates(self) -> Tensor:
        """Decoded coordinates [B, Hkv, N, m] (fp32), for training and checks."""
        pieces, byte = [], 0
        for dims, bits in self.form.parts:
            width = dims * bits // 8
            packed = self.codes[:, :, byte : byte + width]
            pieces += [(packed >> shift) & (2**bits - 1) for shift in range(8 - bits, -1, -bits)]
            byte += width
        return self.low.unsqueeze(2) + self.step.unsqueeze(2) * torch.cat(pieces, dim=2).float().mT

    def summary(self, span_of_token: Tensor, lengths: Tensor) -> Summary:
        """The decoded form that training differentiates through."""
        return Summary(
            lengths=lengths,
            coordinates=self.coordinates(),
            basis=self.synthesis.float(),
            centre=self.centre,
            span_of_token=span_of_token,
        )


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [x, Hkv, m, n], clipped to 0 .. 2^bits - 1 -> bytes [x, Hkv, m · bits / 8, n]."""
    packed, *rest = codes.clamp(0, 2**bits - 1).to(torch.uint8).chunk(8 // bits, dim=2)
    for piece in rest:
        packed = (packed << bits) | piece
    return packed


def _ranges(coordinates: Tensor, visible: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lowest level and step [B, Hkv, m] of every coordinate, over the visible tokens, without far outliers."""
    weight = visible[:, None, :, None]
    count = weight.sum(dim=2).clamp_min(1)
    mean = (coordinates * weight).sum(dim=2) / count
    deviation = (((coordinates - mean.unsqueeze(2)) * weight).square().sum(dim=2) / count).sqrt() * CLIP_DEVIATIONS[
        bits
    ]
    low = coordinates.masked_fill(~weight, float("inf")).amin(dim=2).maximum(mean - deviation)
    high = coordinates.masked_fill(~weight, float("-inf")).amax(dim=2).minimum(mean + deviation)
    empty = ~visible.any(dim=1)[:, None, None]
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    return low, ((high - low) / (2**bits - 1)).clamp_min(1e-8)
