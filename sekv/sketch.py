"""The finest map: a few low-bit coordinates of every key, from which the logit of every token is estimated.

sekv.md, section 2 ("a finer map"). Legend: B batch rows, Hq query heads, Hkv KV heads, N tokens, d head dimension,
m sketch dimensions, P packed bytes per token (m / 2 with 4 bits, m with 8). Keys are post-RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.state import BatchedState
from sekv.routing import Summary
from sekv.summary import sketch_basis

SKETCH_BITS = (4, 8)
BASIS_DTYPE = torch.float16
CLIP_DEVIATIONS = 4.0  # coordinates further than this from their mean are clipped, so that steps stay fine


class Sketch(BatchedState):
    """Codes of every token of one layer and what decodes them.

    Attributes:
        codes: uint8 [B, Hkv, P, N]; with 4 bits the high nibbles hold dimensions 0..P-1, the low ones P..2P-1.
        step, low: [B, Hkv, m] fp32; coordinate = low + step * code.
        synthesis: [B, Hkv, m, d] rows; key ≈ centre + Σ coordinate · row.
        centre: [B, Hkv, d].
    """

    def __init__(self, bits: int, synthesis: Tensor, centre: Tensor, low: Tensor, step: Tensor) -> None:
        self.bits = bits
        self.synthesis, self.centre, self.low, self.step = synthesis, centre, low, step
        packed = synthesis.shape[2] * bits // 8
        self.codes = torch.empty(*synthesis.shape[:2], packed, 0, dtype=torch.uint8, device=synthesis.device)

    @classmethod
    def fit(
        cls, keys: Tensor, visible: Tensor, query_moment: Tensor | None, dims: int, bits: int
    ) -> tuple[Sketch, Tensor]:
        """A sketch of the prompt's keys, and the analysis rows [B, Hkv, m, d] that encode later ones.

        Args:
            keys: [B, Hkv, N, d].
            visible: [B, N] tokens that count.
            query_moment: [B, Hkv, d, d] or None (see `sketch_basis`).
            dims: m.
            bits: 4 or 8 per coordinate.
        """
        centre, analysis, synthesis = sketch_basis(keys, visible, query_moment, min(dims, keys.shape[3]))
        coordinates = (keys.float() - centre.unsqueeze(2)) @ analysis.mT
        low, step = _ranges(coordinates, visible, bits)
        sketch = cls(bits, synthesis.to(BASIS_DTYPE), centre, low, step)
        sketch.append(keys, analysis)
        return sketch, analysis

    def append(self, keys: Tensor, analysis: Tensor) -> None:
        """Encode further tokens [B, Hkv, n, d] of every row."""
        every = torch.arange(keys.shape[0], device=keys.device)
        self.codes = torch.cat([self.codes, self.encoded(keys, analysis, every)], dim=-1)

    def encoded(self, keys: Tensor, analysis: Tensor, rows: Tensor) -> Tensor:
        """Codes [m, Hkv, P, n] of keys [m, Hkv, n, d] of some batch rows [m]; analysis rows [B, Hkv, m, d] of all."""
        analysis = analysis.to(keys.device)[rows].float()
        coordinates = (keys.float() - self.centre[rows].unsqueeze(2)) @ analysis.mT
        levels = 2**self.bits - 1
        codes = (coordinates - self.low[rows].unsqueeze(2)) / self.step[rows].unsqueeze(2)
        codes = codes.round_().clamp_(0, levels).to(torch.uint8).mT
        if self.bits == 4:
            half = codes.shape[2] // 2
            codes = (codes[:, :, :half] << 4) | codes[:, :, half:]
        return codes

    def logits(self, routed: Tensor) -> Tensor:
        """Estimated logits [B, Hq, Q, N] (fp32) of routed, scaled queries [B, Hq, Q, d]: `routing.token_logits` on
        the packed codes. Steps are folded into the query, so that the codes are only converted, never rescaled."""
        batch, num_heads, num_queries, dim = routed.shape
        codes, synthesis = self.codes.flatten(0, 1), self.synthesis.flatten(0, 1).float()
        grouped = routed.float().reshape(codes.shape[0], -1, dim)  # [B Hkv, G Q, d]
        on_basis = grouped @ synthesis.mT
        offset = torch.baddbmm(
            grouped @ self.centre.flatten(0, 1).unsqueeze(-1), on_basis, self.low.flatten(0, 1).unsqueeze(-1)
        )
        weights = on_basis * self.step.flatten(0, 1).unsqueeze(1)
        if self.bits == 8:
            result = torch.baddbmm(offset, weights, codes.float())
        else:
            # code byte = 16 · high + low, so high · w_h + low · w_l = byte · w_h / 16 + low · (w_l - w_h / 16)
            high, low = weights.chunk(2, dim=-1)
            high = high / 16
            result = torch.baddbmm(offset, high, codes.float())
            result.baddbmm_(low - high, codes.bitwise_and(15).float())
        return result.view(batch, num_heads, num_queries, -1)

    def coordinates(self) -> Tensor:
        """Decoded coordinates [B, Hkv, N, m] (fp32), for training and checks."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat([codes >> 4, codes & 15], dim=2)
        return self.low.unsqueeze(2) + self.step.unsqueeze(2) * codes.float().mT

    def summary(self, span_of_token: Tensor, lengths: Tensor) -> Summary:
        """The decoded form that training differentiates through."""
        return Summary(
            lengths=lengths,
            coordinates=self.coordinates(),
            basis=self.synthesis.float(),
            centre=self.centre,
            span_of_token=span_of_token,
        )


def _ranges(coordinates: Tensor, visible: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lowest level and step [B, Hkv, m] of every coordinate, over the visible tokens, without far outliers."""
    weight = visible[:, None, :, None]
    count = weight.sum(dim=2).clamp_min(1)
    mean = (coordinates * weight).sum(dim=2) / count
    deviation = (((coordinates - mean.unsqueeze(2)) * weight).square().sum(dim=2) / count).sqrt() * CLIP_DEVIATIONS
    low = coordinates.masked_fill(~weight, float("inf")).amin(dim=2).maximum(mean - deviation)
    high = coordinates.masked_fill(~weight, float("-inf")).amax(dim=2).minimum(mean + deviation)
    empty = ~visible.any(dim=1)[:, None, None]
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    return low, ((high - low) / (2**bits - 1)).clamp_min(1e-8)


def sketch_bytes(dims: int, bits: int, tokens: int, head_dim: int) -> int:
    """Device bytes per KV head of a sketch."""
    return tokens * dims * bits // 8 + dims * (head_dim * BASIS_DTYPE.itemsize + 8) + 4 * head_dim
