"""Stored layer bases: what turns shared coefficients back into one layer's keys or values, absorbed into the query.

Legend: J layers of a block, S streams, Hs heads per stream, d head dimension, D = J * Hs * d, R coefficients,
P rows (queries per head), F low frequencies.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from freqdepth.codes import UNQUANTIZED
from freqdepth.transform import dct_basis
from kvcore.quant import pack, packed_bytes, unpack
from kvcore.state import BatchedState


class DepthBasis(BatchedState):
    """Maps between one layer's [S, Hs, P, d] vectors and [S, Hs * P, R] coefficients."""

    @abstractmethod
    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Rows of the basis that belong to a layer of the block: [S, R, Hs, d]."""

    def absorb(self, query: Tensor, layer: int) -> Tensor:
        """`query · basis`: [S, Hs, P, d] -> [S, Hs * P, R], so that logits are products with coefficients."""
        return torch.matmul(query, self.matrix(layer, query.dtype).permute(0, 2, 3, 1)).flatten(1, 2)

    def expand(self, mixed: Tensor, layer: int, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Mixed coefficients [S, Hs * P, R] -> one layer's output [S, Hs, P, d]."""
        per_head = mixed.to(dtype).unflatten(1, (num_heads, -1))
        return torch.matmul(per_head, self.matrix(layer, dtype).transpose(1, 2))

    def project(self, x: Tensor) -> Tensor:
        """Coefficients [S, M, R] of centred vectors [J, S, Hs, M, d]."""
        parts = [self.absorb_weighted(x[layer], layer) for layer in range(x.shape[0])]
        return torch.stack(parts).sum(0)

    @abstractmethod
    def absorb_weighted(self, x: Tensor, layer: int) -> Tensor:
        """One layer's share of the coefficients [S, M, R] of [S, Hs, M, d]."""


class KltBasis(DepthBasis):
    """A data-driven basis, stored in few bits.

    The basis is orthonormal after every channel has been multiplied by its metric weight (how much the logits or the
    output feel it), so reading divides by the weight and projecting multiplies by it.

    Attributes:
        groups: per stored width (bits, columns, codes): uint8 [J, S, R_g, bytes of Hs * d], or floats for 16.
        scale: [S, R], step of each column.
        weight: [J, S, Hs, d], metric weights in the model's dtype.
    """

    def __init__(self, basis: Tensor, widths: list[tuple[int, int]], weight: Tensor, dtype: torch.dtype) -> None:
        """`basis`: orthonormal [S, D, R]; `widths`: (bits, columns) in column order; `weight`: [J, S, Hs, d]."""
        num_layers, _, num_heads, head_dim = weight.shape
        columns = basis.unflatten(1, (num_layers, num_heads * head_dim)).permute(1, 0, 3, 2)  # [J, S, R, Hs * d]
        self.weight = weight.to(dtype)
        self.widths = widths
        self.codes, scales, start = [], [], 0
        for bits, count in widths:
            part = columns[:, :, start : start + count]
            scale = part.abs().amax((0, 3)) / max(2 ** (bits - 1) - 0.5, 0.5)
            if bits == UNQUANTIZED:
                scale = torch.ones_like(scale)
                self.codes.append(part.to(dtype).clone())
            else:
                half = 2 ** (bits - 1)
                codes = (part / scale[None, :, :, None].clamp_min(1e-30)).floor_().clamp_(-half, half - 1).add_(half)
                self.codes.append(pack(codes.to(torch.uint8).contiguous(), bits))
            scales.append(scale)
            start += count
        self.scale = torch.cat(scales, dim=-1)

    def columns(self, layer: int, dtype: torch.dtype) -> Tensor:
        """The orthonormal basis's rows of one layer: [S, R, Hs * d]."""
        size = self.weight.shape[2] * self.weight.shape[3]
        parts = []
        for (bits, _), codes in zip(self.widths, self.codes, strict=True):
            if bits == UNQUANTIZED:
                parts.append(codes[layer].to(dtype))
            else:
                parts.append(unpack(codes[layer], bits, size).to(dtype).sub_(2 ** (bits - 1) - 0.5))
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return raw * self.scale.unsqueeze(-1).to(dtype)

    def matrix(self, layer: int, dtype: torch.dtype) -> Tensor:
        num_heads, head_dim = self.weight.shape[2:]
        columns = self.columns(layer, dtype).unflatten(-1, (num_heads, head_dim))
        return columns / self.weight[layer].unsqueeze(1).to(dtype)

    def absorb_weighted(self, x: Tensor, layer: int) -> Tensor:
        weighted = x * self.weight[layer].unsqueeze(2).to(x.dtype)
        return torch.matmul(weighted.transpose(1, 2).flatten(2), self.columns(layer, x.dtype).mT)


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

    def absorb_weighted(self, x: Tensor, layer: int) -> Tensor:
        return self.absorb(x, layer)


def column_bytes(bits: int, num_layers: int, features_per_layer: int, dtype: torch.dtype) -> int:
    """Bytes of one stored basis column, its scale included."""
    if bits == UNQUANTIZED:
        return num_layers * features_per_layer * dtype.itemsize + 4
    return num_layers * packed_bytes(features_per_layer, bits) + 4
