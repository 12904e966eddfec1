"""The mode of every head of a block: shared, residual or exact, by eq. 2 under the block's bytes.

Legend: J layers of the block, H KV heads, G query heads per KV head, M middle tokens, r residual tokens, P probe
queries, d head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freqdepth.allocation import Offer, choose_levels
from freqdepth.compress import SharedFitter
from freqdepth.drafts import BlockInput, Draft
from freqdepth.layout import RowBlock
from freqdepth.losses import token_losses
from freqdepth.plan import Plan, PlanWriter, correction_components
from freqdepth.residual import correction_bytes

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth

# Residual sizes on offer, as shares of the middle tokens.
_RESIDUAL_SHARES = (0.0, 0.0025, 0.01, 0.03, 0.1)
# Most of a block's bytes that residual tokens may take from the coefficients.
_RESIDUAL_LIMIT = 0.3
# Fewer residual tokens than this are not worth their bookkeeping.
_FEWEST_RESIDUALS = 4


class SmallestBytesError(ValueError):
    """A block cannot be stored within its bytes.

    Attributes:
        smallest: bytes it needs at least.
    """

    def __init__(self, smallest: float) -> None:
        self.smallest = smallest
        super().__init__(f"the block needs at least {smallest:.0f} bytes")


class ModeChooser:
    """Chooses modes, residual size and widths together, so that the bytes are met with the least probe loss.

    Args:
        block: the input.
        options: of the method.
        allowed: bytes for the middle of this block and row.
    """

    def __init__(self, block: BlockInput, options: FreqDepth, allowed: float) -> None:
        self.block, self.options, self.allowed = block, options, allowed
        self.num_layers, self.num_heads, self.num_tokens, self.head_dim = block.keys.shape
        self.exact_bytes = 2 * self.num_layers * self.num_tokens * self.head_dim * block.dtype.itemsize

    def fill(self, row: RowBlock) -> None:
        """Compress into `row`.

        Raises:
            SmallestBytesError: the allowance is too small.
        """
        writer = PlanWriter(self.block, self.options, row)
        every = list(range(self.num_heads))
        if list(self.options.modes) == ["exact"]:
            self._need(self.num_heads * self.exact_bytes)
            writer.exact(every, [])
        elif self.options.basis == "none":
            affordable = int(self.allowed // self.exact_bytes)
            energy = self.block.token_weight.sum((0, 2))
            writer.exact(*_split(every, energy.topk(min(affordable, self.num_heads)).indices.tolist()))
        else:
            writer.plan(self._best_plan(every))

    def _need(self, num_bytes: float) -> None:
        if num_bytes > self.allowed:
            raise SmallestBytesError(num_bytes)

    # --- planning
    def _best_plan(self, every: list[int]) -> Plan:
        """Plan with every head shared or residual; heads that eq. 2 wants exact are taken out and the rest refitted."""
        plan = self._plan(every, [])
        exact = self._wants_exact(plan)
        if not exact or len(exact) == self.num_heads:
            return plan
        rest = [head for head in every if head not in exact]
        try:
            again = self._plan(rest, exact)
        except SmallestBytesError:
            return plan
        return again if again.total < plan.total else plan

    def _wants_exact(self, plan: Plan) -> list[int]:
        """Heads whose loss is worth more than the bytes that keeping them exact would add."""
        if "exact" not in self.options.modes:
            return []
        shared_bytes = plan.draft.num_bytes / len(plan.heads)
        extra = max(self.exact_bytes - shared_bytes, 1.0)
        spare = self.allowed - plan.draft.num_bytes if plan.draft.price == 0 else 0.0
        ranked = sorted(zip(plan.losses, plan.heads, strict=True), reverse=True)
        free = int(spare // extra)
        return sorted(head for rank, (loss, head) in enumerate(ranked) if rank < free or loss > plan.price * extra > 0)

    def _plan(self, heads: list[int], exact: list[int]) -> Plan:
        """The best residual size and widths for a set of shared heads beside exact ones."""
        allowed = self.allowed - len(exact) * self.exact_bytes
        fitter = SharedFitter(self.block, self.options, heads, max(allowed, 1.0))
        if fitter.smallest() > allowed:
            raise SmallestBytesError(fitter.smallest() + len(exact) * self.exact_bytes)
        corrected = "residual" in self.options.modes
        draft = fitter.draft(allowed, fit=not corrected)
        if draft.price == 0:  # corrections take nothing from it: it is final
            draft = fitter.finished(draft)
        losses = token_losses(self.block, fitter, draft)
        best = self._with_residuals(fitter, draft, exact, losses, 0, allowed)
        if not corrected:
            return best
        for count in self._residual_counts(losses, draft.price, fitter.joint):
            reserve = len(heads) * self._residual_bytes(count) if draft.price > 0 else 0.0
            if fitter.smallest() > allowed - reserve:
                break
            if reserve:
                draft = fitter.draft(allowed - reserve)
                losses = token_losses(self.block, fitter, draft)
            candidate = self._with_residuals(fitter, draft, exact, losses, count, allowed)
            if candidate.total < best.total or self.options.residual_tokens is not None:
                best = candidate
        if not best.draft.fitted:
            draft = fitter.finished(best.draft)
            best = self._with_residuals(
                fitter, draft, exact, token_losses(self.block, fitter, draft), best.count, allowed
            )
        return best

    def _residual_counts(self, losses: Tensor, price: float, joint: bool) -> list[int]:
        """Residual sizes to try: with a price λ the tokens whose loss is worth their bytes, else a few sizes."""
        if self.options.residual_tokens is not None:
            return [min(self.options.residual_tokens, self.num_tokens)] if self.options.residual_tokens else []
        if price == 0:
            return sorted({round(share * self.num_tokens) for share in _RESIDUAL_SHARES} - {0})
        per_head = self._residual_bytes(8) / 8
        most = int(_RESIDUAL_LIMIT * self.allowed / (per_head * losses.shape[0]))
        worth = losses.sum(0) > price * per_head * losses.shape[0] if joint else losses > price * per_head
        count = min(int(worth.float().mean() * self.num_tokens), most, self.num_tokens)
        return [count] if count >= _FEWEST_RESIDUALS else []

    def _with_residuals(
        self, fitter: SharedFitter, draft: Draft, exact: list[int], losses: Tensor, count: int, allowed: float
    ) -> Plan:
        """Shared or residual for each head: least loss (eq. 2) within the bytes that the shared form leaves."""
        heads = fitter.heads
        order = (losses.sum(0, keepdim=True) if fitter.joint else losses).argsort(dim=-1, descending=True)
        corrected = losses.gather(1, order[:, :count].expand(len(heads), -1)).sum(-1)
        shared = losses.mean(-1) * self.num_tokens  # a first draft describes a part of the tokens
        if count == 0:
            return Plan(fitter, draft, heads, exact, [], shared.tolist(), order, 0, draft.price)
        left = 1.0 - _KEPT_ERROR.get(self.options.residual_bits, 0.0)
        table = torch.stack([shared, shared - left * corrected])
        cost = torch.tensor([0.0, self._residual_bytes(count)], device=table.device)[:, None].expand_as(table)
        levels, price = choose_levels(Offer(table, cost), max(allowed - draft.num_bytes, 0.0))
        residual = [head for head, level in zip(heads, levels.tolist(), strict=True) if level]
        chosen = table.gather(0, levels[None])[0].tolist()
        kept = count if residual else 0
        return Plan(fitter, draft, heads, exact, residual, chosen, order, kept, max(price, draft.price))

    def _residual_bytes(self, count: int) -> float:
        """Bytes of one head's corrections of `count` tokens."""
        one = correction_bytes(count, self.head_dim, self.options.residual_bits, self.block.dtype)
        return 2.0 * correction_components(self.options, self.num_layers) * one


# Share of a corrected token's squared error that a correction of so many bits leaves (asymmetric groups of channels).
_KEPT_ERROR = {2: 0.12, 3: 0.04, 4: 0.012, 6: 0.001, 8: 1e-4}


def _split(every: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    return sorted(chosen), [head for head in every if head not in chosen]
