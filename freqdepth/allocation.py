"""Rate-distortion: how many bits each coefficient gets, under a byte allowance.

Every unit (a coefficient of the keys or of the values) has a loss and a cost per level (not stored, 2 bits, ...). The
best levels at a price λ per byte minimise `loss + λ * bytes` unit by unit, which is eq. 2's trade-off; λ is solved by
bisection so that the bytes meet the allowance. On a Gaussian source this is reverse water-filling: weak coefficients
are dropped (which sets the rank), the others get bits by their variance.

Legend: K levels, N units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BISECTIONS = 60
# Prices this close together select the same levels.
_PRICE_MARGIN = 1 + 1e-9


@dataclass
class Offer:
    """What each level of each unit would lose and cost.

    Attributes:
        loss: [K, N], inf where a level is not on offer.
        cost: [K, N], bytes.
    """

    loss: Tensor
    cost: Tensor


def joined(offers: list[Offer]) -> Offer:
    """Units of several offers side by side."""
    return Offer(torch.cat([o.loss for o in offers], 1), torch.cat([o.cost for o in offers], 1))


def smallest_cost(offer: Offer) -> float:
    """Bytes of the cheapest level of every unit."""
    return float(offer.cost.masked_fill(offer.loss.isinf(), float("inf")).amin(0).sum())


def choose_levels(offer: Offer, allowed: float) -> tuple[Tensor, float]:
    """Levels [N] of least total loss within `allowed` bytes, and the price λ (loss per byte) that selects them.

    Raises:
        ValueError: even the cheapest levels cost more.
    """
    smallest = smallest_cost(offer)
    if smallest > allowed:
        raise ValueError(f"the cheapest levels need {smallest:.0f} bytes; allowed are {allowed:.0f}")
    loss, cost = offer.loss.double(), offer.cost.double()
    best = loss.argmin(0)
    if float(cost.gather(0, best[None]).sum()) <= allowed:
        return best, 0.0
    spread = float(loss[loss.isfinite()].amax()) / float(cost[cost > 0].amin())
    low, high = 0.0, max(spread, 1e-30) * 2
    for step in range(_BISECTIONS):
        # the price spans decades: halve its logarithm once a lower end is known
        price = (low * high) ** 0.5 if low > 0 else high * 10.0 ** -(step + 1)
        levels = (loss + price * cost).argmin(0)
        if float(cost.gather(0, levels[None]).sum()) > allowed:
            low = price
        else:
            high = price
        if high <= low * _PRICE_MARGIN:
            break
    return (loss + high * cost).argmin(0), high
