"""Stored layer bases: what turns shared coefficients back into one layer's keys or values, absorbed into the query.

Legend: J layers of a block, S streams, Hs heads per stream, d head dimension, D = J * Hs * d, R coefficients,
P rows (queries per head), F low frequencies.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from freqdepth.codes import UNQUANTIZED, step_sizes
from freqdepth.metric import Metric
from freqdepth.transform import dct_basis
from kvcore.quant import pack, packed_bytes, unpack
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
        codes: per stored width, uint8 [J, S, R_g, bytes of Hs * d], or floats for 16.
        scale: [S, R], step of each column.
        metric: see its class.
    """

    def __init__(self, basis: Tensor, widths: list[tuple[int, int]], metric: Metric, dtype: torch.dtype) -> None:
        """`basis`: orthonormal [S, D, R]; `widths`: (bits, columns) in column order."""
        num_layers, _, num_heads, head_dim = metric.shape
        columns = basis.unflatten(1, (num_layers, num_heads * head_dim)).permute(1, 0, 3, 2)  # [J, S, R, Hs * d]
        self.metric = metric
        self.widths = widths
        self.codes, scales, start = [], [], 0
        for bits, count in widths:
            part = columns[:, :, start : start + count]
            if bits == UNQUANTIZED:
                scales.append(torch.ones(part.shape[1:3], device=part.device))
                self.codes.append(part.to(dtype).clone())
            else:
                lines = basis[..., start : start + count]
                scale = step_sizes(lines, bits, lines.square().mean(1).sqrt().clamp_min(1e-12), _STEPS.to(lines.device))
                half = 2 ** (bits - 1)
                codes = (part / scale[None, :, :, None]).floor_().clamp_(-half, half - 1).add_(half)
                self.codes.append(pack(codes.to(torch.uint8).contiguous(), bits))
                scales.append(scale)
            start += count
        self.scale = torch.cat(scales, dim=-1)

    def columns(self, layer: int, dtype: torch.dtype) -> Tensor:
        """The basis's rows of one layer, in the metric's domain: [S, R, Hs * d]."""
        size = self.metric.shape[2] * self.metric.shape[3]
        parts = []
        for (bits, _), codes in zip(self.widths, self.codes, strict=True):
            if bits == UNQUANTIZED:
                parts.append(codes[layer].to(dtype))
            else:
                parts.append(unpack(codes[layer], bits, size).to(dtype).sub_(2 ** (bits - 1) - 0.5))
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return raw * self.scale.unsqueeze(-1).to(dtype)

    def whole(self) -> Tensor:
        """The stored basis of all layers in the metric's domain: [S, R, D], fp32."""
        return torch.cat([self.columns(layer, torch.float32) for layer in range(self.metric.shape[0])], dim=-1)

    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        columns = self.columns(layer, dtype).unflatten(-1, self.metric.shape[2:])
        return self.metric.rebuilt_layer(columns.transpose(1, 2), layer).transpose(1, 2)

    def _raw(self, layer: int) -> Tensor:
        """What is stored of one layer, in fp32 and without steps and offsets: [S, R, Hs, d]."""
        size = self.metric.shape[2] * self.metric.shape[3]
        parts = [
            codes[layer] if bits == UNQUANTIZED else unpack(codes[layer], bits, size)
            for (bits, _), codes in zip(self.widths, self.codes, strict=True)
        ]
        return torch.cat(parts, dim=1).float().unflatten(-1, self.metric.shape[2:])

    def _offsets(self) -> Tensor:
        """What is added to each raw number before its step: [R]."""
        offsets = [(0.0 if bits == UNQUANTIZED else 0.5 - 2 ** (bits - 1), count) for bits, count in self.widths]
        return torch.tensor([offset for offset, count in offsets for _ in range(count)], device=self.scale.device)

    def absorb(self, query: Tensor, layer: int) -> Tensor:
        rows = self.metric.absorbed(query, layer)
        product = torch.matmul(rows, self._raw(layer).permute(0, 2, 3, 1))
        product = torch.addcmul(product, rows.sum(-1, keepdim=True), self._offsets())
        return product.mul_(self.scale[:, None, None]).flatten(1, 2)

    def expand(self, mixed: Tensor, layer: int, num_heads: int, dtype: torch.dtype) -> Tensor:
        scaled = (mixed.float() * self.scale.unsqueeze(1)).unflatten(1, (num_heads, -1))
        output = torch.matmul(scaled, self._raw(layer).transpose(1, 2))
        output = output.add_(torch.matmul(scaled, self._offsets()).unsqueeze(-1))
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
    """Bytes of one stored basis column, its scale included."""
    if bits == UNQUANTIZED:
        return num_layers * features_per_layer * dtype.itemsize + 4
    return num_layers * packed_bytes(features_per_layer, bits) + 4
