"""How tokens are grouped in units, and which units one step fetches.

Legend: B batch rows, Hkv KV heads, m tokens between sinks and window, U units, K fetched tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Units:
    """How the middle of one row's prompt is grouped.

    Attributes:
        order: [Hkv, m] token indices in host order: unit after unit.
        sizes: [Hkv, U] tokens of each unit.
        summaries: name -> [Hkv, U, ...].
    """

    order: Tensor
    sizes: Tensor
    summaries: dict[str, Tensor]


@dataclass
class Choice:
    """What one step fetches.

    Attributes:
        index: [B, Hkv, K] host slots.
        live: [B, Hkv, K] False where a slot is padding.
        order: [B, Hkv, U] units, best first.
        taken: [B, Hkv, U] in that order: the unit is fetched wholly.
    """

    index: Tensor
    live: Tensor
    order: Tensor
    taken: Tensor


def choose(scores: Tensor, sizes: Tensor, quotas: list[int], whole_units: bool) -> Choice:
    """Take units by falling score until a row's quota of tokens is full.

    Args:
        scores: [B, Hkv, U].
        sizes: [B, Hkv, U], tokens of each unit, 0 for none; units lie one after another on the host.
        quotas: tokens to take of each row, at least one above 0.
        whole_units: take no part of a unit; otherwise the last one is cut to fit.
    """
    sizes = sizes.long()
    order = scores.masked_fill(sizes == 0, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    ranked = sizes.gather(-1, order)
    stop = ranked.cumsum(-1)
    quota = torch.tensor(quotas, device=scores.device)[:, None, None]
    taken = (stop <= quota) & (ranked > 0)
    slot = torch.arange(max(quotas), device=scores.device).expand(*scores.shape[:2], -1).contiguous()
    rank = torch.searchsorted(stop, slot, right=True).clamp_max(stop.shape[-1] - 1)
    unit = order.gather(-1, rank)
    starts = sizes.cumsum(-1) - sizes
    index = starts.gather(-1, unit) + slot - (stop - ranked).gather(-1, rank)
    limit = (stop * taken).amax(-1, keepdim=True) if whole_units else quota.minimum(stop[..., -1:])
    live = slot < limit
    return Choice(index.masked_fill(~live, 0), live, order, taken)
