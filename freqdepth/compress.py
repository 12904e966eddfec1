"""Fitting the shared form of a block's heads: which coefficients are stored in how many bits, and their codes.

Legend: J layers of the block, H' heads that share, S streams, Hs heads per stream, M middle tokens, d head dimension,
D = J * Hs * d features, R coefficients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freqdepth.allocation import Offer, choose_levels, joined, smallest_cost
from freqdepth.basis import DctBasis, DepthBasis, KltBasis, column_bytes, fitted
from freqdepth.candidates import CandidateMaker, column_width
from freqdepth.codes import UNQUANTIZED, class_bytes, encode, squared_error, step_sizes
from freqdepth.drafts import BlockInput, Candidate, Draft, DraftSide
from freqdepth.shared import SharedSide
from freqdepth.store import CoefficientStore
from freqdepth.transform import unstack_features

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth

# Tokens on which the quantisation errors of the candidate widths are measured. With half as many, the price of a byte
# and with it the number of corrected tokens is off by a tenth.
_SAMPLE_TOKENS = 768
# Candidate steps as multiples of a Gaussian's best one: heavier tails want wider steps.
_STEP_MULTIPLES = (1.0, 1.35, 1.8)


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
        maker = CandidateMaker(block, options, heads, expected_bytes)
        self.sides = [maker.side(which) for which in (0, 1)]

    # --- widths
    def _unit_bytes(self, side: Candidate, bits: int) -> int:
        """Bytes of one coefficient (of every stream) stored in `bits`."""
        num_layers, streams, num_heads, head_dim = side.metric.shape
        codes = class_bytes(bits, self.block.keys.shape[2], self.block.dtype)
        if side.columns is not None:
            codes += column_bytes(column_width(self.options, bits), num_layers, num_heads * head_dim, self.block.dtype)
        return streams * codes

    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the widths: means, metric weights, rotations, DCT orders."""
        total = 0
        for side in self.sides:
            total += side.mean.numel() * self.block.dtype.itemsize
            if side.columns is not None:
                total += side.metric.nbytes
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
        loss = (torch.stack(losses) * channel).sum(1) * self.block.keys.shape[2]
        must_keep = slice(0, 1) if rank is None and side.columns is not None else slice(0, loss.shape[1])
        loss[0, must_keep] = float("inf")
        cost = torch.tensor(costs, device=loss.device)[:, None].expand_as(loss)
        return Offer(loss, cost), torch.stack(steps)

    def _column_weight(self, side: Candidate) -> Tensor | float:
        """What a squared coefficient error costs: 1 in the metric domain; the layers' mean for the DCT."""
        if side.columns is not None:
            return 1.0
        mean = side.metric.weight.float().square().mean((0, 2))  # [S, d]
        return mean.repeat(1, side.coefficients.shape[-1] // mean.shape[-1])

    # --- the fit
    def draft(self, allowed: float, fit: bool = True) -> Draft:
        """The shared form of least loss within `allowed` bytes.

        Args:
            allowed: bytes.
            fit: make up for the rounding of the basis; without it a draft is cheap, and describes an even sample of
                the tokens only.

        Raises:
            ValueError: the smallest form is larger (see `smallest`).
        """
        widths, offers, _ = self._offers()
        if self.options.coefficient_plan is None:
            levels, price = choose_levels(joined(offers), allowed - self.fixed_bytes())
        else:
            levels, price = self._planned_levels(widths), 0.0
        return self._drafted(levels, price, fit)

    def finished(self, draft: Draft) -> Draft:
        """A draft with its coefficients fitted."""
        return draft if draft.fitted else self._drafted(draft.levels, draft.price, True)

    def _drafted(self, levels: Tensor, price: float, fit: bool) -> Draft:
        widths, offers, steps = self._offers()
        split = levels.split([offer.loss.shape[1] for offer in offers])
        keys, values = (
            self._quantised(side, chosen, step, widths, fit)
            for side, chosen, step in zip(self.sides, split, steps, strict=True)
        )
        spent = float(joined(offers).cost.gather(0, levels[None]).sum())
        return Draft(keys, values, int(spent) + self.fixed_bytes(), price, levels, fit)

    def store(self, draft: Draft) -> tuple[SharedSide, SharedSide]:
        """Pack a draft: keys and values."""
        keys, values = (
            self._stored(side, drafted) for side, drafted in zip(self.sides, (draft.keys, draft.values), strict=True)
        )
        return keys, values

    def errors(self, which: int, draft: DraftSide, tokens: Tensor) -> Tensor:
        """Original minus reconstruction of some tokens, in the unweighted domain.

        Args:
            which: 0 for keys, 1 for values.
            draft: that side.
            tokens: middle tokens [S, k] of each stream, among those that the draft describes.

        Returns:
            [J, H', k, d].
        """
        side = self.sides[which]
        num_layers, _, _, head_dim = side.metric.shape
        rows = tokens // draft.stride
        picked = [raw.gather(1, rows[..., None].expand(-1, -1, raw.shape[2])) for raw in draft.raw]
        kept = torch.cat(
            [
                part if bits == UNQUANTIZED else part.float() + (0.5 - 2 ** (bits - 1))
                for part, (bits, _) in zip(picked, draft.widths, strict=True)
            ],
            dim=-1,
        ) * draft.step.unsqueeze(1)
        basis = draft.basis
        if isinstance(basis, KltBasis):
            original = side.features.gather(1, tokens[..., None].expand(-1, -1, side.features.shape[2]))
            error = unstack_features(original - kept @ basis.whole(), num_layers, head_dim)
            return side.metric.rebuilt(error.unflatten(1, side.metric.shape[1:3])).flatten(1, 2)
        places = tokens[None, :, :, None].expand(num_layers, -1, -1, head_dim)
        return side.features.gather(2, places) - basis.rebuilt(kept, basis.whole()).flatten(1, 2)

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

    def _quantised(
        self, side: Candidate, levels: Tensor, steps: Tensor, widths: tuple[int, ...], fit: bool
    ) -> DraftSide:
        """Codes of one side at the chosen levels, and the error they leave in each token."""
        picked: list[tuple[int, Tensor]] = []
        for level in range(len(widths), 0, -1):
            index = (levels == level).nonzero().flatten()
            if index.numel():
                picked.append((widths[level - 1], index))
        columns = torch.cat([index for _, index in picked])
        stored = [(bits, index.numel()) for bits, index in picked]
        basis = self._basis(side, columns, stored)
        stride = side.stride
        if fit and isinstance(basis, KltBasis):
            stride = 1
            # what the rounded basis loses is made up for by the coefficients, as far as it can be
            values, explained = fitted(side.features, basis.whole(), refine=self.options.basis_bits == UNQUANTIZED)
            error = side.token_energy - explained
        else:
            values = side.coefficients[..., columns]
            error = side.token_energy[:, ::stride] - values.square().sum(-1)
        raws, chosen_steps, start = [], [], 0
        for bits, index in picked:
            mine = values[..., start : start + index.numel()]
            start += index.numel()
            step = steps[widths.index(bits) + 1][:, index]
            if bits == UNQUANTIZED:
                raws.append(mine)
            else:
                raws.append(encode(mine, step, bits))
                rebuilt = (raws[-1].float() + (0.5 - 2 ** (bits - 1))) * step.unsqueeze(1)
                error = error + (rebuilt - mine).square_().sum(-1)
            chosen_steps.append(step)
        return DraftSide(columns, stored, raws, torch.cat(chosen_steps, dim=-1), error.clamp_min(0), basis, stride)

    def _stored(self, side: Candidate, draft: DraftSide) -> SharedSide:
        store = CoefficientStore(draft.widths, draft.raw, draft.step, self.block.dtype)
        return SharedSide(store, draft.basis, side.mean)

    def _basis(self, side: Candidate, columns: Tensor, coefficient_widths: list[tuple[int, int]]) -> DepthBasis:
        """The stored basis of chosen columns."""
        num_layers, streams, _, head_dim = side.metric.shape
        if side.columns is None:
            return DctBasis(num_layers, streams, head_dim, side.rotation, columns)
        widths: list[tuple[int, int]] = []
        for bits, count in coefficient_widths:
            width = column_width(self.options, bits)
            if widths and widths[-1][0] == width:
                count += widths.pop()[1]
            widths.append((width, count))
        return KltBasis(side.columns[..., columns], widths, side.metric, self.block.dtype)
