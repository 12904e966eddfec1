"""Corrections of residual tokens: what the shared form lacks in a few tokens, quantised apart.

Legend: J layers of the block, H' shared heads, P rows, M middle tokens, r residual tokens, C depth components,
N = C * Hres lines of components and heads, G groups of channels, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from freqdepth.basis import DepthBasis, KltBasis
from freqdepth.codes import UNQUANTIZED
from freqdepth.planes import LINES, Plane, Rows, add_codes, few_rows, plane_widths, runs_of
from kvcore.kernels.native.plane_floats import PlaneCodes, TokenScales, add_plane_dot, add_plane_sum
from kvcore.quant import decode_scales, encode_scales
from kvcore.state import BatchedState


class Corrections(BatchedState):
    """Vectors [N, r, d] with one scale and zero point per token and group of channels, in planes.

    Attributes:
        planes: codes of the tokens, lowest bits first; `parts` their places.
        scale, zero: fp16 [N, r, G].
        dense: the vectors in the model's dtype when they are not quantised; then there is nothing else.
    """

    def __init__(self, x: Tensor, bits: int, dtype: torch.dtype) -> None:
        """`x`: [N, r, d]; `bits`: 2, 3, 4, 6, 8 or 16, which keeps `dtype`."""
        self.num_tokens, self.group = x.shape[1], channel_group(x.shape[2])
        self.planes: list[Plane] = []
        self.parts: list[list[Rows]] = []
        self.dense = x.to(dtype).clone() if bits == UNQUANTIZED else None
        if self.dense is not None:
            return
        grouped = _grouped(x, self.group)
        low, high = grouped.aminmax(dim=-1)
        self.scale, self.zero = encode_scales(low, high, bits, "float16")
        step, base = decode_scales(self.scale, self.zero)
        codes = ((grouped - base.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
        lines = F.pad(codes.flatten(-2)[..., : x.shape[2]], (0, 0, 0, -x.shape[1] % LINES))
        for width, shift in plane_widths(bits):
            self.planes.append(Plane(width, lines >> shift))
            self.parts.append([Rows(0, slice(0, x.shape[2]), shift)])

    def decoded(self, some: slice = slice(None)) -> Tensor:
        """Some lines, fp32 [n, r, d]."""
        if self.dense is not None:
            return self.dense[some].float()
        packed = self.planes[0].packed[some]
        size = packed.shape[-1]
        codes = torch.zeros(packed.shape[0], self.num_tokens, size, dtype=torch.uint8, device=packed.device)
        add_codes(codes, self.planes, self.parts, some)
        numbers = codes.float()
        step, base = decode_scales(self.scale[some], self.zero[some])
        grouped = _grouped(numbers, self.group)
        return torch.addcmul(base.unsqueeze(-1), grouped, step.unsqueeze(-1)).flatten(-2)[..., :size]

    def add_logits(self, total: Tensor, rows: Tensor, some: slice) -> None:
        """Add products of rows [n, P, d] with some lines to fp32 [n, P, r] in place."""
        if self.dense is not None or not few_rows(rows):
            total += torch.matmul(rows, self.decoded(some).mT)
            return
        add_plane_dot(total.unsqueeze(1), rows.unsqueeze(1), self._in_c(some))

    def add_output(self, total: Tensor, weights: Tensor, some: slice) -> None:
        """Add some lines, weighted by [n, P, r], to fp32 [n, P, d] in place."""
        if self.dense is not None or not few_rows(weights):
            total += torch.matmul(weights, self.decoded(some))
            return
        add_plane_sum(total.unsqueeze(1), weights.unsqueeze(1), self._in_c(some))

    def _in_c(self, some: slice) -> PlaneCodes:
        """Lines from the first of `some` on as C takes them."""
        layout = tuple((p.width, runs_of(parts)) for p, parts in zip(self.planes, self.parts, strict=True))
        scales = TokenScales(self.scale, self.zero, self.group)
        return PlaneCodes([plane.packed for plane in self.planes], layout, some.start, scales)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[N, r, d] -> [N, r, G, group]; the last group is filled up with its last entry."""
    missing = -x.shape[-1] % group
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    return x.unflatten(-1, (-1, group))


def channel_group(head_dim: int) -> int:
    """Channels that share a scale in a correction."""
    return 64 if head_dim % 64 == 0 else 8 * max(1, head_dim // 8)


def correction_bytes(num_tokens: int, head_dim: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes that `Corrections` takes for one line."""
    if bits == UNQUANTIZED:
        return num_tokens * head_dim * dtype.itemsize
    groups = -(-head_dim // channel_group(head_dim))
    return -(-num_tokens // LINES) * head_dim * bits + num_tokens * groups * 4


class ResidualStore(BatchedState):
    """High-frequency corrections of the first r middle tokens, for the heads in residual mode.

    With a KLT they are stored in the metric's domain: rounding them where they are felt evenly keeps it out of the
    directions that the queries look at.

    Attributes:
        heads: the KV heads.
        members: their places among the shared heads.
        components: corrections of [C, Hres] lines: one component per layer with a KLT, per high frequency with a DCT.
        mixing: [J, C], fp32, or None when component j is layer j's correction.
        rotation: [J, Hres, d, d] of an aligned DCT, or None.
    """

    def __init__(
        self,
        heads: list[int],
        members: list[int],
        components: Corrections,
        mixing: Tensor | None,
        rotation: Tensor | None,
    ) -> None:
        self.heads, self.members, self.components = heads, members, components
        self.mixing, self.rotation = mixing, rotation

    @property
    def num_tokens(self) -> int:
        """r."""
        return self.components.num_tokens

    def add_logits(self, logits: Tensor, rows: Tensor, layer: int) -> None:
        """Add the corrections' part to the shared heads' logits [H', P, M] in place; `rows` as the basis takes them."""
        first = logits[..., : self.num_tokens]
        if len(self.members) == rows.shape[0]:
            self._add_logits(first, rows, layer)
        else:
            part = first[self.members]
            self._add_logits(part, rows[self.members], layer)
            first[self.members] = part

    def add_output(self, output: Tensor, weights: Tensor, layer: int) -> None:
        """Add the corrections' part to the shared heads' output [H', P, d], as the basis gives it, in place."""
        first = weights[..., : self.num_tokens]
        if len(self.members) == weights.shape[0]:
            self._add_output(output, first, layer)
        else:
            part = output[self.members]
            self._add_output(part, first[self.members], layer)
            output[self.members] = part

    def _add_logits(self, logits: Tensor, rows: Tensor, layer: int) -> None:
        if self.mixing is None:
            self.components.add_logits(logits, rows, self._lines(layer))
        else:
            logits += torch.matmul(rows, self.layer(layer).mT)

    def _add_output(self, output: Tensor, weights: Tensor, layer: int) -> None:
        if self.mixing is None:
            self.components.add_output(output, weights, self._lines(layer))
        else:
            output += torch.matmul(weights, self.layer(layer))

    def _lines(self, layer: int) -> slice:
        """One layer's lines when there is a component per layer."""
        return slice(layer * len(self.heads), (layer + 1) * len(self.heads))

    def rebuilt(self, layer: int, basis: DepthBasis) -> Tensor:
        """Corrections of one layer as the model reads them: fp32 [Hres, r, d]."""
        stored = self.layer(layer)
        return basis.metric.rebuilt_heads(stored, layer, self.members) if isinstance(basis, KltBasis) else stored

    def layer(self, layer: int) -> Tensor:
        """Corrections of one layer as stored: fp32 [Hres, r, d]."""
        if self.mixing is None:
            return self.components.decoded(self._lines(layer))
        stacked = self.components.decoded().unflatten(0, (-1, len(self.heads)))
        correction = torch.einsum("c,chrd->hrd", self.mixing[layer], stacked)
        return correction if self.rotation is None else correction @ self.rotation[layer].float().mT
