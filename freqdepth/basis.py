"""Stored layer bases: what turns shared coefficients back into one layer's keys or values, absorbed into the query.

Legend: J layers of a block, S streams, Hs heads per stream, d head dimension, D = J * Hs * d, R coefficients,
P rows (queries per head), F low frequencies.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from freqdepth.codes import UNQUANTIZED, code_offsets, encode, step_sizes
from freqdepth.metric import Metric
from freqdepth.planes import LINES, Plane, Rows, add_planes, plane_layout, to_planes
from freqdepth.transform import dct_basis
from kvcore.quant import packed_bytes
from kvcore.state import BatchedState

# Candidate steps of a column as multiples of a Gaussian's best one: few entries carry most of a strong column.
_STEPS = torch.tensor([0.8, 1.0, 1.25, 1.6, 2.0, 2.6])

# Conjugate gradient steps of a fit to a nearly orthonormal basis: each leaves a small share of the error before it.
_FIT_STEPS = 6


class DepthBasis(BatchedState):
    """Maps between one layer's [S, Hs, P, d] vectors and [S, Hs * P, R] coefficients."""

    @abstractmethod
    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Rows of the basis that belong to a layer of the block: [S, R, Hs, d]."""

    def absorb(self, query: Tensor, layer: int) -> Tensor:
        """`query · basis`: [S, Hs, P, d] -> fp32 [S, Hs * P, R], so that logits are products with coefficients."""
        matrix = self.matrix(layer, torch.float32)
        return torch.matmul(query.float(), matrix.permute(0, 2, 3, 1)).flatten(1, 2)

    def expand(self, mixed: Tensor, layer: int, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Mixed coefficients [S, Hs * P, R] -> one layer's output [S, Hs, P, d]."""
        per_head = mixed.to(dtype).unflatten(1, (num_heads, -1))
        return torch.matmul(per_head, self.matrix(layer, dtype).transpose(1, 2))

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Coefficients [S, M, R] of centred vectors [J, S, Hs, M, d]."""


class KltBasis(DepthBasis):
    """A data-driven basis, stored in few bits.

    The basis is orthonormal in the metric's domain (see `Metric`), so reading undoes the metric and projecting applies
    it. A column has one step, the best one for its entries: strong outliers are clipped, and `fitted` makes up for it.

    Attributes:
        planes: per layer, the codes of all columns, features standing for tokens (see `planes`).
        dense: columns that are not quantised [J, S, Hs * d, R'], or None.
        scale: [S, R], step of each column.
        offset: [R], added to each code before its step.
        metric: see its class.
    """

    def __init__(self, basis: Tensor, widths: list[tuple[int, int]], metric: Metric, dtype: torch.dtype) -> None:
        """`basis`: orthonormal [S, D, R]; `widths`: (bits, columns) in column order."""
        num_layers, streams = metric.shape[:2]
        self.metric, self.widths = metric, widths
        self.offset = code_offsets(widths).to(basis.device)
        self.dense: Tensor | None = None
        raw, scales, start = [], [], 0
        for bits, count in widths:
            lines = basis[..., start : start + count]
            if bits == UNQUANTIZED:
                scales.append(torch.ones(streams, count, device=basis.device))
                self.dense = lines.unflatten(1, (num_layers, -1)).transpose(0, 1).to(dtype).contiguous()
                raw.append(lines)
            else:
                scale = step_sizes(lines, bits, lines.square().mean(1).sqrt().clamp_min(1e-12), _STEPS.to(lines.device))
                raw.append(encode(lines, scale, bits))
                scales.append(scale)
            start += count
        self.scale = torch.cat(scales, dim=-1)
        self.planes: list[list[Plane]] = [[] for _ in range(num_layers)]
        for width, parts in plane_layout(widths).items():
            codes = torch.cat([raw[rows.index] >> rows.shift for rows in parts], dim=-1)
            for planes, mine in zip(self.planes, codes.chunk(num_layers, dim=1), strict=True):
                planes.append(Plane(width, F.pad(mine, (0, 0, 0, -mine.shape[1] % LINES))))

    def columns(self, layer: int, dtype: torch.dtype) -> Tensor:
        """The basis's rows of one layer, in the metric's domain: [S, R, Hs * d]."""
        raw = self._raw(layer)
        total = raw.new_zeros(*raw.shape[:2], self.scale.shape[1])
        self._add(total, raw)
        return total.add_(self.offset).mul_(self.scale.unsqueeze(1)).mT.to(dtype)

    def whole(self) -> Tensor:
        """The stored basis of all layers in the metric's domain: [S, R, D], fp32."""
        return torch.cat([self.columns(layer, torch.float32) for layer in range(self.metric.shape[0])], dim=-1)

    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        columns = self.columns(layer, dtype).unflatten(-1, self.metric.shape[2:])
        return self.metric.rebuilt_layer(columns.transpose(1, 2), layer).transpose(1, 2)

    def _raw(self, layer: int) -> Tensor:
        """What is stored of one layer, dense columns and planes side by side: fp32 [S, Hs * d, K]."""
        size = self.metric.shape[2] * self.metric.shape[3]
        parts = [plane.codes().flatten(1, 2)[:, :size] for plane in self.planes[layer]]
        if self.dense is not None:
            return torch.cat([self.dense[layer].float(), *(part.float() for part in parts)], dim=-1)
        return torch.cat(parts, dim=-1).float()

    def _rows(self) -> list[Rows]:
        """Coefficients of the columns of `_raw`."""
        dense = [] if self.dense is None else [Rows(0, slice(0, self.dense.shape[-1]), 0)]
        return dense + [rows for parts in plane_layout(self.widths).values() for rows in parts]

    def _add(self, total: Tensor, x: Tensor) -> None:
        add_planes(total, x, self._rows())

    def absorb(self, query: Tensor, layer: int) -> Tensor:
        rows = self.metric.absorbed(query, layer)
        # a few rows and heads: the planes are summed after the product, where they are small
        product = torch.matmul(rows, self._raw(layer).unflatten(1, self.metric.shape[2:]))
        total = rows.sum(-1, keepdim=True) * self.offset
        self._add(total, product)
        return total.mul_(self.scale[:, None, None]).flatten(1, 2)

    def expand(self, mixed: Tensor, layer: int, num_heads: int, dtype: torch.dtype) -> Tensor:
        scaled = mixed.float() * self.scale.unsqueeze(1)
        placed = to_planes(scaled, self._rows()).unflatten(1, (num_heads, -1))
        output = torch.matmul(placed, self._raw(layer).unflatten(1, self.metric.shape[2:]).mT)
        output = output.add_(torch.matmul(scaled, self.offset).unflatten(1, (num_heads, -1)).unsqueeze(-1))
        return self.metric.rebuilt_layer(output, layer).to(dtype)

    def project(self, x: Tensor) -> Tensor:
        features = self.metric.felt(x).permute(1, 3, 0, 2, 4).flatten(2)  # [S, M, D]
        return fitted_few(features, self.whole())


def fitted(features: Tensor, basis: Tensor, refine: bool = False) -> tuple[Tensor, Tensor]:
    """Least squares on a nearly orthonormal basis [S, R, D]: coefficients [S, M, R] of features [S, M, D], and the
    squared length [S, M] that they explain.

    `refine` solves once more for what fp32 and the stabiliser of the first solution left.
    """
    inner = torch.matmul(basis, basis.mT)
    inner.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-6)
    projected = torch.matmul(features, basis.mT)
    factor = torch.linalg.cholesky(inner)
    found = torch.cholesky_solve(projected.mT, factor).mT
    if refine:
        left = torch.matmul(features - torch.matmul(found, basis), basis.mT)
        found = found + torch.cholesky_solve(left.mT, factor).mT
    return found, (found * projected).sum(-1)


def fitted_few(features: Tensor, basis: Tensor) -> Tensor:
    """The coefficients of `fitted` for a few tokens, by conjugate gradients: no R x R system is formed or solved."""
    rest = torch.matmul(features, basis.mT)
    found = torch.zeros_like(rest)
    direction, size = rest, rest.square().sum(-1, keepdim=True)
    for _ in range(_FIT_STEPS):
        applied = torch.matmul(torch.matmul(direction, basis), basis.mT)
        length = size / (direction * applied).sum(-1, keepdim=True).clamp_min(1e-30)
        found = found + length * direction
        rest = rest - length * applied
        before, size = size, rest.square().sum(-1, keepdim=True)
        direction = rest + size / before.clamp_min(1e-30) * direction
    return found


class DctBasis(DepthBasis):
    """The lowest F depth frequencies of every channel, with an optional rotation per layer; data-free without it.

    Attributes:
        rotation: [J, S, d, d] onto the block's first layer, or None.
        order: int16 [R]: the coefficient (frequency * d + channel) in each column.
    """

    def __init__(
        self, num_layers: int, num_streams: int, head_dim: int, rotation: Tensor | None, order: Tensor
    ) -> None:
        self.num_layers, self.num_streams, self.head_dim = num_layers, num_streams, head_dim
        self.rotation = rotation
        self.order = order.to(torch.int16)

    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        frequencies = dct_basis(self.num_layers, self.order.device)[:, layer]
        if self.rotation is None:
            turned = torch.eye(self.head_dim, device=self.order.device).expand(self.num_streams, -1, -1)
        else:
            turned = self.rotation[layer].float().mT
        whole = frequencies[None, :, None, None] * turned[:, None]  # [S, J, channel of the coefficient, d]
        return whole.flatten(1, 2)[:, self.order.long()].unsqueeze(2).to(dtype)

    def project(self, x: Tensor) -> Tensor:
        return torch.stack([self.absorb(x[layer], layer) for layer in range(x.shape[0])]).sum(0)


def column_bytes(bits: int, num_layers: int, features_per_layer: int, dtype: torch.dtype) -> int:
    """Bytes of one stored basis column, its scale and offset included."""
    if bits == UNQUANTIZED:
        return num_layers * features_per_layer * dtype.itemsize + 8
    return num_layers * packed_bytes(features_per_layer, bits) + 8
