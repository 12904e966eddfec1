"""The finest map: tokens are zoomed into one by one, by what their sketch says of their attention.

Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q queries of the step, S spans, N tokens of the map,
C slots, W window, M fetched tokens, d head dimension. Index N means "no token".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.kernels import segment_sums
from sekv.attention import softmax_and_unit
from sekv.maps import HIDDEN, Decision, Map, Shares, StepView, in_turn
from sekv.sketch import Sketch
from sekv.window import Block, write_columns

STRONG = 32.0  # multiples of the threshold from which on a token's neighbours are zoomed into as well


class TokenMap(Map):
    """Sketch of every token + one mean value per span; see `Map`.

    Args:
        sketch: logit estimates of every token.
    """

    def __init__(self, sketch: Sketch, coarse_values: Tensor, tokens: Tensor, spans: Tensor) -> None:
        super().__init__(coarse_values, tokens, spans, sketch.codes.shape[-1])
        self.sketch = sketch

    def decide(self, view: StepView) -> TokenDecision:
        """Zoom into the tokens whose expected share of the attention mass reaches the threshold."""
        width, num_slots = self.sketch.codes.shape[-1], view.slots.shape[-1]
        tail = width + 1  # behind the estimates and "no token"
        logits = view.slots.new_empty(*view.slots.shape[:3], tail + num_slots + view.recent.shape[-1])
        estimate = self.sketch.logits(view.router.routed_query(view.layer, view.query), logits[..., :width])
        if view.ragged:
            place = torch.arange(width, device=estimate.device)
            estimate.masked_fill_(place >= self.tokens[:, None, None, None], HIDDEN)
        logits[..., width] = HIDDEN
        logits[..., tail : tail + num_slots] = view.slots
        logits[..., tail + num_slots :] = view.recent
        fill_(logits[..., :tail], view.slot_token, HIDDEN)
        return TokenDecision(self, view, *softmax_and_unit(logits))

    def append(self, block: Block, analysis: Tensor, coarse_values: Tensor) -> None:
        """Add the tokens of a block and the mean values [m, Hkv, 1, d] of their spans."""
        codes = self.sketch.encoded(block.keys, analysis, block.rows)[block.member, :, :, block.column]
        place = self.tokens[block.row] + block.column
        self.sketch.codes = write_columns(self.sketch.codes, 3, block.row, place, codes)
        self._append_spans(block, coarse_values)


class TokenDecision(Decision):
    """See `TokenMap`. A fetched token serves the whole query group.

    Args:
        masses: [B, Hq, Q, N + 1 + C + W] shares of everything: tokens of the map by estimate, nothing, slots, window.
        unit: [B, Hq, Q, 1].
    """

    def __init__(self, owner: TokenMap, view: StepView, masses: Tensor, unit: Tensor) -> None:
        self.owner, self.view, self.masses, self.unit = owner, view, masses, unit
        self.tail = masses.shape[-1] - view.slots.shape[-1] - view.recent.shape[-1]  # N + 1
        not_recent = masses[..., : masses.shape[-1] - view.recent.shape[-1]]
        multiples = view.router.multiples(view.layer, not_recent, view.tokens)
        best = multiples.unflatten(1, (view.slot_token.shape[1], -1)).amax(2)  # [B, Hkv, Q, N + 1 + C]
        estimated = self._with_neighbours(best) if view.neighbours else best[..., : self.tail - 1]
        self.want, self.first = in_turn(estimated, 1.0)
        self.slot_used = (best[..., self.tail :] >= 1).any(2)
        if view.ragged:  # rows without a map keep what came last, as they do alone
            self.slot_used &= (owner.tokens > 0)[:, None, None]
        if view.count:
            self.zoomed = (multiples >= 1).sum(-1).float().mean(2)

    def _with_neighbours(self, best: Tensor) -> Tensor:
        """Multiples [B, Hkv, Q, N] of what is in no slot, raised near tokens `STRONG` times above the threshold.

        What is copied (a number, a name) is read on from where it was found, and a coarse estimate tells digits of one
        number apart last of all.

        Args:
            best: [B, Hkv, Q, N + 1 + C] multiples of the tokens of the map (0 for those in slots), nothing, the slots.
        """
        reach, slot = self.view.neighbours, self.view.slot_token.unsqueeze(2).expand(*best.shape[:3], -1)
        every = best[..., : self.tail].scatter(-1, slot, best[..., self.tail :])
        near = F.max_pool1d(every.flatten(0, 1), 2 * reach + 1, stride=1, padding=reach).view_as(every)
        torch.maximum(best[..., : self.tail], near.mul_(1 / STRONG), out=every)
        every = every.scatter_(-1, slot, 0.0)[..., :-1]
        if self.view.ragged:
            place = torch.arange(every.shape[-1], device=every.device)
            every = every.masked_fill_(place >= self.owner.tokens[:, None, None, None], 0.0)
        return every

    def fetched_visible(self, token: Tensor) -> Tensor | None:
        if self.first is None:
            return None
        return self._seen(token).repeat_interleave(self.masses.shape[1] // token.shape[1], dim=1)

    def _seen(self, token: Tensor) -> Tensor:
        """[B, Hkv, Q, M] bool: the tokens [B, Hkv, M] that the query or an earlier one wants (padding: all)."""
        assert self.first is not None
        turn = F.pad(self.first, (0, 1)).gather(-1, token)
        return turn.unsqueeze(2) <= torch.arange(self.masses.shape[2], device=token.device)[:, None]

    def shares(self, token: Tensor | None) -> Shares:
        if token is not None:
            self._take_out(token)
        coarse = self.view.use_coarse and self.owner.coarse_values.shape[2] > 0
        counted = self.masses if coarse else self.masses[..., self.tail :]
        slots = self.tail + self.view.slots.shape[-1]
        return Shares(
            recent=self.masses[..., slots:],
            slots=self.masses[..., self.tail : slots],
            spans=self._span_masses() if coarse else None,
            mass=counted.sum(dim=-1, keepdim=True),
            unit=self.unit,
        )

    def _take_out(self, token: Tensor) -> None:
        """Fetched tokens [B, Hkv, M] count no more by estimate, where they are seen."""
        estimates = self.masses[..., : self.tail]
        if self.first is None:
            fill_(estimates, token, 0.0)
            return
        grouped = estimates.unflatten(1, (token.shape[1], -1))  # [B, Hkv, G, Q, N + 1]
        index = token[:, :, None, None].expand(*grouped.shape[:4], -1)
        kept = grouped.gather(-1, index).masked_fill(self._seen(token).unsqueeze(2), 0.0)
        grouped.scatter_(-1, index, kept)

    def _span_masses(self) -> Tensor:
        """Masses [B, Hq, Q, S]; tokens between two spans are in slots for good and add nothing."""
        return segment_sums(self.masses, self.view.spans.starts)


def fill_(entries: Tensor, token: Tensor, value: float) -> None:
    """Set, in place, the tokens [B, Hkv, n] (N: nowhere) among entries [B, Hq, Q, N + 1] of their query groups."""
    grouped = entries.view(entries.shape[0], token.shape[1], -1, entries.shape[-1])
    grouped.scatter_(-1, token.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1), value)
