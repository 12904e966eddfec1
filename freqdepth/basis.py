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
from freqdepth.planes import LINES, Plane, add_codes, few_rows, plane_layout, plane_runs
from freqdepth.transform import dct_basis
from kvcore.kernels.native.plane_floats import PlaneCodes, add_plane_dot, add_plane_sum
from kvcore.quant import packed_bytes
from kvcore.state import BatchedState

# Candidate steps of a column as multiples of a Gaussian's best one: few entries carry most of a strong column.
_STEPS = torch.tensor([0.8, 1.0, 1.25, 1.6, 2.0, 2.6])

# Conjugate gradient steps of a fit to a nearly orthonormal basis: after three the error of folded tokens is within 1%
# of the best (2: 17%, 4: 0.1%), far below what rounding their coefficients adds.
_FIT_STEPS = 3


class DepthBasis(BatchedState):
    """Maps between one layer's [S, Hs, P, d] vectors and [S, Hs * P, R] coefficients."""

    @abstractmethod
    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Rows of the basis that belong to a layer of the block: [S, R, Hs, d]."""

    def enter(self, query: Tensor, layer: int) -> Tensor:
        """fp32 rows [S, Hs, P, d] whose products with vectors as the basis stores them are `query · vectors`."""
        return query.float()

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Vectors [S, Hs, P, d] as the basis stores them -> as the model reads them."""
        return x

    def absorb(self, rows: Tensor, layer: int) -> Tensor:
        """`rows · basis` for the rows of `enter`: [S, Hs, P, d] -> fp32 [S, Hs * P, R]."""
        matrix = self.matrix(layer, torch.float32)
        return torch.matmul(rows, matrix.permute(0, 2, 3, 1)).flatten(1, 2)

    def expand(self, mixed: Tensor, layer: int, num_heads: int) -> Tensor:
        """Mixed coefficients [S, Hs * P, R] -> one layer's vectors [S, Hs, P, d], fp32, before `leave`."""
        per_head = mixed.unflatten(1, (num_heads, -1))
        return torch.matmul(per_head, self.matrix(layer, mixed.dtype).transpose(1, 2))

    @abstractmethod
    def whole(self) -> Tensor:
        """What `project` and `rebuilt` work with, fp32: the basis of all layers."""

    @abstractmethod
    def project(self, x: Tensor, whole: Tensor) -> Tensor:
        """Coefficients [S, M, R] of centred vectors [J, S, Hs, M, d], given `whole`."""

    @abstractmethod
    def rebuilt(self, coefficients: Tensor, whole: Tensor) -> Tensor:
        """Centred vectors [J, S, Hs, M, d] of coefficients [S, M, R], given `whole`."""


class KltBasis(DepthBasis):
    """A data-driven basis, stored in few bits.

    The basis is orthonormal in the metric's domain (see `Metric`), so reading undoes the metric and projecting applies
    it. A column has one step, the best one for its entries: strong outliers are clipped, and `fitted` makes up for it.
    The codes of one layer are taken apart where they are multiplied and let go with the product: nothing of them lives
    from one layer to the next.

    Attributes:
        planes: the codes of all columns, features standing for tokens and the layers' streams for streams (see
            `planes`).
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
        self.planes: list[Plane] = []
        for width, parts in plane_layout(widths).items():
            codes = torch.cat([raw[rows.index] >> rows.shift for rows in parts], dim=-1)
            mine = codes.unflatten(1, (num_layers, -1)).transpose(0, 1).flatten(0, 1)  # [J * S, Hs * d, K]
            self.planes.append(Plane(width, F.pad(mine, (0, 0, 0, -mine.shape[1] % LINES))))

    def columns(self, layers: slice, dtype: torch.dtype) -> Tensor:
        """The basis's rows of some layers, in the metric's domain: [J', S, Hs * d, R]."""
        return self._numbers(layers).add_(self.offset).mul_(self.scale.unsqueeze(1)).to(dtype)

    def whole(self) -> Tensor:
        """The stored basis of all layers in the metric's domain: [S, R, D], fp32."""
        return self.columns(slice(None), torch.float32).transpose(0, 1).flatten(1, 2).mT

    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        columns = self.columns(slice(layer, layer + 1), dtype)[0].mT.unflatten(-1, self.metric.shape[2:])
        return self.metric.rebuilt_layer(columns.transpose(1, 2), layer).transpose(1, 2)

    def _codes(self, layers: slice) -> Tensor:
        """Codes of some layers' rows: uint8 [J', S, Hs * d, R], 0 in unquantised columns."""
        num_layers, streams, num_heads, head_dim = self.metric.shape
        first, last, _ = layers.indices(num_layers)
        shape = ((last - first) * streams, num_heads * head_dim, self.scale.shape[1])
        whole = torch.zeros(shape, dtype=torch.uint8, device=self.scale.device)
        add_codes(whole, self.planes, plane_layout(self.widths).values(), slice(first * streams, last * streams))
        return whole.unflatten(0, (last - first, streams))

    def _numbers(self, layers: slice) -> Tensor:
        """Codes (unquantised columns: numbers) of some layers' rows: fp32 [J', S, Hs * d, R]."""
        numbers = self._codes(layers).float()
        if self.dense is not None:
            numbers[..., : self.dense.shape[-1]] = self.dense[layers]
        return numbers

    def _layer_numbers(self, layer: int) -> Tensor:
        """Codes (unquantised columns: numbers) of one layer's rows: fp32 [S, Hs, d, R]."""
        return self._numbers(slice(layer, layer + 1))[0].unflatten(1, self.metric.shape[2:])

    def enter(self, query: Tensor, layer: int) -> Tensor:
        return self.metric.absorbed(query, layer)

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return self.metric.rebuilt_layer(x, layer)

    def absorb(self, rows: Tensor, layer: int) -> Tensor:
        if few_rows(rows):
            product = rows.new_zeros(*rows.shape[:-1], self.scale.shape[1])
            add_plane_sum(product, rows, self._layer_codes(layer))
            if self.dense is not None:
                product[..., : self.dense.shape[-1]] = torch.matmul(rows, self._layer_dense(self.dense, layer))
        else:
            product = torch.matmul(rows, self._layer_numbers(layer))
        product.addcmul_(rows.sum(-1, keepdim=True), self.offset)
        return product.flatten(1, 2).mul_(self.scale.unsqueeze(1))

    def expand(self, mixed: Tensor, layer: int, num_heads: int) -> Tensor:
        scaled = (mixed * self.scale.unsqueeze(1)).unflatten(1, (num_heads, -1))
        output = torch.matmul(scaled, self.offset).unsqueeze(-1)
        if not few_rows(scaled):
            return output + torch.matmul(scaled, self._layer_numbers(layer).mT)
        output = output.repeat(1, 1, 1, self.metric.shape[-1])
        add_plane_dot(output, scaled, self._layer_codes(layer))
        if self.dense is not None:
            output += torch.matmul(scaled[..., : self.dense.shape[-1]], self._layer_dense(self.dense, layer).mT)
        return output

    def _layer_codes(self, layer: int) -> PlaneCodes:
        """One layer's codes as C takes them: those of all S streams."""
        packed = [plane.packed for plane in self.planes]
        return PlaneCodes(packed, plane_runs(tuple(self.widths)), layer * self.scale.shape[0])

    def _layer_dense(self, dense: Tensor, layer: int) -> Tensor:
        """One layer's unquantised columns: fp32 [S, Hs, d, R']."""
        return dense[layer].float().unflatten(1, self.metric.shape[2:])

    def project(self, x: Tensor, whole: Tensor) -> Tensor:
        features = self.metric.felt(x).permute(1, 3, 0, 2, 4).flatten(2)  # [S, M, D]
        return fitted_few(features, whole)

    def rebuilt(self, coefficients: Tensor, whole: Tensor) -> Tensor:
        features = torch.matmul(coefficients, whole)
        num_layers, _, num_heads, head_dim = self.metric.shape
        vectors = features.unflatten(-1, (num_layers, num_heads, head_dim)).permute(2, 0, 3, 1, 4)
        return self.metric.rebuilt(vectors)


def fitted(features: Tensor, basis: Tensor, refine: bool = False) -> tuple[Tensor, Tensor]:
    """Least squares on a nearly orthonormal basis [S, R, D]: coefficients [S, M, R] of features [S, M, D], and the
    squared length [S, M] that they explain.

    `refine` solves in double precision, and once more for what the stabiliser of the first solution left.
    """
    dtype = features.dtype
    if refine:
        features, basis = features.double(), basis.double()
    inner = torch.matmul(basis, basis.mT)
    inner.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-6)
    projected = torch.matmul(features, basis.mT)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))
    found = torch.matmul(projected, inverse)
    if refine:
        left = torch.matmul(features - torch.matmul(found, basis), basis.mT)
        found = found + torch.matmul(left, inverse)
    return found.to(dtype), (found * projected).sum(-1).to(dtype)


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

    def whole(self) -> Tensor:
        return torch.stack([self.matrix(layer, torch.float32) for layer in range(self.num_layers)])  # [J, S, R, 1, d]

    def project(self, x: Tensor, whole: Tensor) -> Tensor:
        return torch.einsum("jshmd,jsrhd->smr", x, whole)

    def rebuilt(self, coefficients: Tensor, whole: Tensor) -> Tensor:
        return torch.einsum("smr,jsrhd->jshmd", coefficients, whole)


def column_bytes(bits: int, num_layers: int, features_per_layer: int, dtype: torch.dtype) -> int:
    """Bytes of one stored basis column, its scale and offset included."""
    if bits == UNQUANTIZED:
        return num_layers * features_per_layer * dtype.itemsize + 8
    return num_layers * packed_bytes(features_per_layer, bits) + 8
