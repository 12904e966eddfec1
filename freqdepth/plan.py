"""What has been decided for a block, and storing it in a row.

Legend: J layers of the block, H KV heads, M middle tokens, r residual tokens, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freqdepth.basis import DctBasis, KltBasis
from freqdepth.compress import SharedFitter
from freqdepth.drafts import BlockInput, Draft, DraftSide
from freqdepth.layout import BlockReport, RowBlock
from freqdepth.residual import Corrections, ResidualStore
from freqdepth.shared import SharedSide
from freqdepth.transform import dct_basis

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth


@dataclass
class Plan:
    """Modes of a block and the shared form they go with.

    Attributes:
        fitter, draft: the shared form of `heads`.
        heads: KV heads that are not exact.
        exact: KV heads that are.
        residual: those of `heads` with corrections.
        losses: eq. 2's data term of each of `heads` in its mode.
        order: middle tokens per stream, residual ones first: [S, M].
        count: r.
        price: λ, loss per byte.
    """

    fitter: SharedFitter
    draft: Draft
    heads: list[int]
    exact: list[int]
    residual: list[int]
    losses: list[float]
    order: Tensor
    count: int
    price: float

    @property
    def total(self) -> float:
        return sum(self.losses)


def correction_components(options: FreqDepth, num_layers: int) -> int:
    """Depth components of a correction: every layer, or the DCT's high frequencies."""
    return num_layers if options.basis == "klt" else num_layers - min(options.low_frequencies, num_layers)


class PlanWriter:
    """Stores decisions in a row.

    Args:
        block: what was compressed.
        options: of the method.
        row: the row, whose window is filled.
    """

    def __init__(self, block: BlockInput, options: FreqDepth, row: RowBlock) -> None:
        self.block, self.options, self.row = block, options, row
        self.num_layers, self.num_heads, self.num_tokens, _ = block.keys.shape
        row.joint = options.heads == "joint"

    def exact(self, exact: list[int], dropped: list[int]) -> None:
        """Keep heads exactly; the others lose the middle."""
        self.row.exact_heads, self.row.shared_heads = exact, dropped
        self._keep_exact(exact)
        self._hide()
        modes = ["exact" if head in exact else "shared" for head in range(self.num_heads)]
        self.row.report = BlockReport(modes, [0.0] * self.num_heads)

    def _keep_exact(self, heads: list[int]) -> None:
        self.row.exact_keys = [keys[heads].to(self.block.dtype) for keys in self.block.exact_keys]
        self.row.exact_values = [values[heads].to(self.block.dtype) for values in self.block.values]

    def plan(self, plan: Plan) -> None:
        """Store the shared form, exact heads and corrections of a plan."""
        keys, values = plan.fitter.store(plan.draft)
        self.row.shared_heads, self.row.exact_heads = plan.heads, plan.exact
        self.row.keys, self.row.values = keys, values
        if plan.exact:
            self._keep_exact(plan.exact)
        self._hide()
        if plan.count:
            self._reorder(plan)
            self.row.residual_keys = self._residual(0, keys, plan.draft.keys, plan)
            self.row.residual_values = self._residual(1, values, plan.draft.values, plan)
        losses = dict(zip(plan.heads, plan.losses, strict=True))
        named = {**dict.fromkeys(plan.exact, "exact"), **dict.fromkeys(plan.residual, "residual")}
        self.row.report = BlockReport(
            [named.get(head, "shared") for head in range(self.num_heads)],
            [losses.get(head, 0.0) for head in range(self.num_heads)],
            plan.price,
            plan.fitter.sides[0].energy.tolist(),
            plan.fitter.sides[1].energy.tolist(),
            plan.draft.keys.widths,
            plan.draft.values.widths,
        )

    def _hide(self) -> None:
        """Note where the tokens stand that are in the window as well."""
        if self.block.num_hidden:
            places = torch.arange(
                self.num_tokens - self.block.num_hidden, self.num_tokens, device=self.block.keys.device
            )
            self.row.hidden = places.repeat(self.num_heads, 1)

    def _reorder(self, plan: Plan) -> None:
        """Move the residual tokens to the front of every stream's token order."""
        for side in (self.row.keys, self.row.values):
            assert side is not None
            side.coefficients.reorder(plan.order)
        if self.row.positions is not None:
            self.row.positions = self.row.positions.expand(plan.order.shape[0], -1).gather(1, plan.order)
        if self.row.hidden is not None:
            self.row.hidden[plan.heads] = plan.order.argsort(-1)[:, -self.block.num_hidden :].expand(
                len(plan.heads), -1
            )

    def _residual(self, which: int, side: SharedSide, draft: DraftSide, plan: Plan) -> ResidualStore:
        """Corrections of the residual heads' first tokens, as stored components."""
        members = [plan.heads.index(head) for head in plan.residual]
        errors = plan.fitter.errors(which, draft, plan.order[:, : plan.count])
        mixing = rotation = None
        if isinstance(side.basis, KltBasis):
            errors = side.basis.metric.felt(errors.unflatten(1, side.basis.metric.shape[1:3])).flatten(1, 2)
        picked = errors[:, members]
        if isinstance(side.basis, DctBasis):
            if side.basis.rotation is not None:
                rotation = side.basis.rotation[:, members]
                picked = picked @ rotation.float()
            first = self.num_layers - correction_components(self.options, self.num_layers)
            mixing = dct_basis(self.num_layers, picked.device)[first:].T.contiguous()  # [J, components]
            picked = torch.einsum("jc,jhrd->chrd", mixing, picked)
        components = Corrections(picked.flatten(0, 1), self.options.residual_bits, self.block.dtype)
        return ResidualStore(plan.residual, members, components, mixing, rotation)
