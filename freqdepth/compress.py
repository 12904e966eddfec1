"""Compressing one block of one row: transform, bit allocation, modes, residual tokens, all within the block's bytes.

Legend: J layers of the block, H KV heads, G query heads per KV head, S streams, Hs heads per stream, M middle tokens,
n tokens of the row, r residual tokens, d head dimension, D = J * Hs * d features, R coefficients, P probe queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freqdepth.allocation import Offer, choose_levels, joined, smallest_cost
from freqdepth.basis import DctBasis, DepthBasis, KltBasis, column_bytes
from freqdepth.codes import (
    UNQUANTIZED,
    CoefficientClass,
    CoefficientStore,
    class_bytes,
    encode,
    squared_error,
    step_sizes,
)
from freqdepth.layout import SharedSide
from freqdepth.probe import LayerProbe
from freqdepth.transform import align_layers, depth_klt, stack_features, unstack_features

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth

# Tokens on which the quantisation errors of the candidate widths are measured.
_SAMPLE_TOKENS = 384
# Candidate steps as multiples of a Gaussian's best one: heavier tails want wider steps.
_STEP_MULTIPLES = (1.0, 1.35, 1.8)


@dataclass
class BlockInput:
    """What a block of one row is compressed from.

    Attributes:
        keys, values: middle tokens [J, H, M, d], any dtype; keys as the shared form stores them (pre- or post-RoPE).
        exact_keys: the keys post-RoPE.
        probes: per layer.
        token_weight: [J, H, M] of the middle tokens (see `LayerProbe`).
        dtype: of the cache.
        index: the block's number.
        positions, frequencies: int32 [M] and inverse frequencies, when `keys` are pre-RoPE.
    """

    keys: Tensor
    values: Tensor
    exact_keys: Tensor
    probes: list[LayerProbe]
    token_weight: Tensor
    dtype: torch.dtype
    index: int
    positions: Tensor | None = None
    frequencies: Tensor | None = None


@dataclass
class Candidate:
    """One side before quantisation: coefficients of every candidate column."""

    features: Tensor  # [S, M, D], centred and weighted
    mean: Tensor  # [J, S, Hs, 1, d]
    weight: Tensor  # [J, S, Hs, d]
    columns: Tensor | None  # KLT basis [S, D, R]
    rotation: Tensor | None
    coefficients: Tensor  # [S, M, R]
    energy: Tensor  # cumulative energy shares of stream 0, [R]


@dataclass
class SharedFit:
    """The shared form of a set of heads.

    Attributes:
        keys, values: what is stored.
        num_bytes: of both.
        price: λ, loss per byte.
        key_error, value_error: [J, H', M, d] original minus reconstruction.
        key_energy, value_energy: cumulative energy shares.
    """

    keys: SharedSide
    values: SharedSide
    num_bytes: int
    price: float
    key_error: Tensor
    value_error: Tensor
    key_energy: Tensor
    value_energy: Tensor


class SharedFitter:
    """Fits the shared form to a set of heads under a byte allowance; transforms are computed once.

    Args:
        block: the input.
        options: of the method.
        heads: the KV heads that share.
        expected_bytes: bytes about to be spent, which bounds the candidate columns.
    """

    def __init__(self, block: BlockInput, options: FreqDepth, heads: list[int], expected_bytes: float) -> None:
        self.block, self.options, self.heads = block, options, heads
        self.joint = options.heads == "joint"
        every = heads == list(range(block.keys.shape[1]))
        key_weight = torch.stack([probe.key_weight for probe in block.probes]) * math.sqrt(options.key_emphasis)
        value_weight = torch.stack([probe.value_weight for probe in block.probes]).unsqueeze(-1)
        self.sides = []
        for x, weight, rank in (
            (block.keys, key_weight, options.key_rank),
            (block.values, value_weight.expand(-1, -1, block.values.shape[-1]), options.value_rank),
        ):
            mine, weight = (x, weight) if every else (x[:, heads], weight[:, heads])
            fixed = rank if rank is None or isinstance(rank, int) else rank[block.index]
            self.sides.append(self._candidate(mine, weight, fixed, expected_bytes))

    def _streams(self, x: Tensor) -> Tensor:
        """[J, H', ...] -> [J, S, Hs, ...]."""
        return x.unsqueeze(1) if self.joint else x.unsqueeze(2)

    def _candidate(self, x: Tensor, weight: Tensor, rank: int | None, expected_bytes: float) -> Candidate:
        mean = x.float().mean(2, keepdim=True).to(self.block.dtype)
        centred = x.float() - mean.float()
        if self.options.basis != "klt":
            return self._dct_candidate(centred, weight, mean)
        # the stored weights are rounded to the cache's dtype: transform with what will be read back
        weight = weight.to(self.block.dtype).float()
        features = stack_features(centred * weight.unsqueeze(2), self.joint)
        size = features.shape[-1]
        most = min(size, self._most_columns(expected_bytes, size) if rank is None else rank)
        columns, energy = depth_klt(features, most, self.options.gram_tokens, self.options.subspace_iterations)
        total = features[0].square().sum(-1).mean()
        return Candidate(
            features, self._streams(mean), self._streams(weight), columns, None, features @ columns,
            energy[0].cumsum(0) / total.clamp_min(1e-30),
        )  # fmt: skip

    def _most_columns(self, expected_bytes: float, size: int) -> int:
        """Candidate columns: a quarter more than are worth their bytes when coefficients take three bits on average."""
        plan = self.options.coefficient_plan
        if plan is not None:
            return sum(count for count, _ in plan)
        streams = 1 if self.joint else len(self.heads)
        tokens = self.block.keys.shape[2]
        narrow = min(self.options.coefficient_bits)
        bits = 8 * self.block.dtype.itemsize if narrow == UNQUANTIZED else max(narrow, 3)
        column = (bits * tokens + self._basis_bits(narrow) * size) / 8
        return max(1, math.ceil(1.25 * expected_bytes / (2 * streams * column)))

    def _dct_candidate(self, centred: Tensor, weight: Tensor, mean: Tensor) -> Candidate:
        num_layers, num_heads, _, head_dim = centred.shape
        rotation = None
        if self.options.basis == "aligned_dct":
            rotation = align_layers(centred).to(self.block.dtype)
        count = min(self.options.low_frequencies, num_layers) * head_dim
        basis = DctBasis(num_layers, num_heads, head_dim, rotation, torch.arange(count))
        coefficients = basis.project(centred.unsqueeze(2))
        energy = coefficients[0].square().sum(0).unflatten(0, (-1, head_dim)).sum(-1).cumsum(0)
        # a column mixes all layers: its weight is their mean
        return Candidate(
            centred, self._streams(mean), self._streams(weight), None, rotation, coefficients,
            energy / centred[:, 0].square().sum().clamp_min(1e-30),
        )  # fmt: skip

    # --- widths
    def _basis_bits(self, bits: int) -> int:
        """Width of the basis column of a coefficient of `bits`."""
        if self.options.basis_bits is not None:
            return self.options.basis_bits
        return UNQUANTIZED if bits == UNQUANTIZED else min(8, bits + 2)

    def _unit_bytes(self, side: Candidate, bits: int) -> int:
        """Bytes of one coefficient (of every stream) stored in `bits`."""
        num_layers, streams, num_heads, head_dim = side.weight.shape
        codes = class_bytes(bits, self.block.keys.shape[2], self.block.dtype)
        if side.columns is not None:
            codes += column_bytes(self._basis_bits(bits), num_layers, num_heads * head_dim, self.block.dtype)
        return streams * codes

    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the widths: means, metric weights, rotations, DCT orders."""
        total = 0
        for side in self.sides:
            total += side.mean.numel() * self.block.dtype.itemsize
            if side.columns is not None:
                total += side.weight.numel() * self.block.dtype.itemsize
            else:
                total += 2 * side.coefficients.shape[-1]
                total += 0 if side.rotation is None else side.rotation.nbytes
        return total

    def _offer(self, side: Candidate, widths: tuple[int, ...], rank: int | None) -> tuple[Offer, Tensor]:
        """Losses and costs per level (0 = not stored, then `widths`), and the steps [levels, S, R]."""
        values = side.coefficients
        sample = values[:, :: max(1, -(-values.shape[1] // _SAMPLE_TOKENS))]
        power = sample.square().mean(1)
        deviation = power.sqrt().clamp_min(1e-12)
        multiples = torch.tensor(_STEP_MULTIPLES, device=values.device)
        channel = self._column_weight(side)
        losses, costs, steps = [power], [0.0], [torch.ones_like(power)]
        for bits in widths:
            if bits == UNQUANTIZED:
                step, error = torch.ones_like(power), torch.zeros_like(power)
            else:
                step = step_sizes(sample, bits, deviation, multiples)
                error = squared_error(sample, step, bits)
            losses.append(error)
            steps.append(step)
            costs.append(float(self._unit_bytes(side, bits)))
        loss = (torch.stack(losses) * channel).sum(1) * values.shape[1]
        must_keep = slice(0, 1) if rank is None and side.columns is not None else slice(0, loss.shape[1])
        loss[0, must_keep] = float("inf")
        cost = torch.tensor(costs, device=loss.device)[:, None].expand_as(loss)
        return Offer(loss, cost), torch.stack(steps)

    def _column_weight(self, side: Candidate) -> Tensor | float:
        """What a squared coefficient error costs: 1 in the metric domain; the layers' mean for the DCT."""
        if side.columns is not None:
            return 1.0
        mean = side.weight.square().mean((0, 2))  # [S, d]
        return mean.repeat(1, side.coefficients.shape[-1] // mean.shape[-1])

    # --- the fit
    def fit(self, allowed: float) -> SharedFit:
        """The shared form of least loss within `allowed` bytes.

        Raises:
            ValueError: the smallest form is larger (see `smallest`).
        """
        widths, offers, steps = self._offers()
        if self.options.coefficient_plan is None:
            levels, price = choose_levels(joined(offers), allowed - self.fixed_bytes())
        else:
            levels, price = self._planned_levels(widths), 0.0
        split = levels.split([offer.loss.shape[1] for offer in offers])
        stored = [
            self._store(side, chosen, step, widths) for side, chosen, step in zip(self.sides, split, steps, strict=True)
        ]
        spent = sum(
            float(offer.cost.gather(0, chosen[None]).sum()) for offer, chosen in zip(offers, split, strict=True)
        )
        (keys, key_error), (values, value_error) = stored
        return SharedFit(
            keys, values, int(spent) + self.fixed_bytes(), price, key_error, value_error,
            self.sides[0].energy, self.sides[1].energy,
        )  # fmt: skip

    def smallest(self) -> float:
        """Bytes of the smallest shared form."""
        if self.options.coefficient_plan is not None:
            widths, offers, _ = self._offers()
            levels = self._planned_levels(widths)
            return float(joined(offers).cost.gather(0, levels[None]).sum()) + self.fixed_bytes()
        return smallest_cost(joined(self._offers()[1])) + self.fixed_bytes()

    def _offers(self) -> tuple[tuple[int, ...], list[Offer], list[Tensor]]:
        if not hasattr(self, "_cached_offers"):
            plan = self.options.coefficient_plan
            bits = self.options.coefficient_bits if plan is None else [width for _, width in plan]
            widths = tuple(sorted(set(bits)))
            ranks = (self.options.key_rank, self.options.value_rank)
            pairs = [
                self._offer(side, widths, None if rank is None else side.coefficients.shape[-1])
                for side, rank in zip(self.sides, ranks, strict=True)
            ]
            self._cached_offers = widths, [offer for offer, _ in pairs], [step for _, step in pairs]
        return self._cached_offers

    def _planned_levels(self, widths: tuple[int, ...]) -> Tensor:
        """Levels of a fixed `coefficient_plan`, for both sides."""
        assert self.options.coefficient_plan is not None
        per_side = []
        for side in self.sides:
            levels = torch.zeros(side.coefficients.shape[-1], dtype=torch.long)
            start = 0
            for count, bits in self.options.coefficient_plan:
                levels[start : start + count] = widths.index(bits) + 1
                start += count
            per_side.append(levels)
        return torch.cat(per_side)

    def _store(
        self, side: Candidate, levels: Tensor, steps: Tensor, widths: tuple[int, ...]
    ) -> tuple[SharedSide, Tensor]:
        """Quantise one side; returns it and the error [J, H', M, d] it leaves."""
        order = [(levels == level).nonzero().flatten() for level in range(len(widths), 0, -1)]
        picked = [(widths[len(widths) - 1 - i], index) for i, index in enumerate(order) if index.numel()]
        columns = torch.cat([index for _, index in picked])
        step = torch.cat([steps[widths.index(bits) + 1][:, index] for bits, index in picked], dim=-1)
        basis = self._basis(side, columns, [(bits, index.numel()) for bits, index in picked])
        values = side.coefficients[..., columns]
        classes, start = [], 0
        for bits, index in picked:
            part = slice(start, start + index.numel())
            raw = values[..., part] if bits == UNQUANTIZED else encode(values[..., part], step[:, part], bits)
            classes.append(CoefficientClass(bits, raw, self.block.dtype))
            start += index.numel()
        stored = SharedSide(CoefficientStore(classes, step), basis, side.mean)
        return stored, self._error(side, stored)

    def _basis(self, side: Candidate, columns: Tensor, picked: list[tuple[int, int]]) -> DepthBasis:
        num_layers, streams, _, head_dim = side.weight.shape
        if side.columns is None:
            return DctBasis(num_layers, streams, head_dim, side.rotation, columns)
        widths: list[tuple[int, int]] = []
        for bits, count in picked:
            width = self._basis_bits(bits)
            if widths and widths[-1][0] == width:
                count += widths.pop()[1]
            widths.append((width, count))
        return KltBasis(side.columns[..., columns], widths, side.weight, self.block.dtype)

    def _error(self, side: Candidate, stored: SharedSide) -> Tensor:
        """Original minus reconstruction, [J, H', M, d], in the unweighted domain."""
        coefficients = stored.coefficients.coefficients()
        num_layers = side.weight.shape[0]
        if side.columns is None:
            rebuilt = [
                torch.einsum("smr,srhd->shmd", coefficients, stored.basis.matrix(layer, torch.float32))
                for layer in range(num_layers)
            ]
            return side.features - torch.stack(rebuilt).flatten(1, 2)
        assert isinstance(stored.basis, KltBasis)
        matrix = torch.cat([stored.basis.columns(layer, torch.float32) for layer in range(num_layers)], dim=-1)
        error = torch.baddbmm(side.features, coefficients, matrix, alpha=-1)
        return unstack_features(error, num_layers, side.weight.shape[-1]) / side.weight.flatten(1, 2).unsqueeze(2)
