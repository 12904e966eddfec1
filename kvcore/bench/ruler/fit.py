"""Find the largest prompt within a length: search the number of units that a builder is given.

The search always ends, and refuses a length that cannot hold even the smallest prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvcore.bench.ruler.data import Draft

Builder = Callable[[random.Random, int], Draft]
Counter = Callable[[Draft], int]


@dataclass(frozen=True)
class Growth:
    """A builder with the range of its units.

    Attributes:
        build: makes a prompt from randomness and a number of units.
        least: units of the smallest prompt that makes sense.
        most: units that exist, or None for no end.
    """

    build: Builder
    least: int
    most: int | None = None


class LengthError(ValueError):
    """A length that cannot hold the smallest prompt of a task."""


def fit(growth: Growth, seed: str, count: Counter, limit: int, guess: int | None = None) -> tuple[Draft, int]:
    """The prompt with the most units within `limit` tokens, and its units.

    Args:
        growth: what to build.
        seed: of the randomness; the same seed and units give the same prompt.
        count: tokens of a prompt.
        limit: tokens allowed.
        guess: units of a similar prompt; skips the search, only shrinks.

    Raises:
        LengthError: the smallest prompt is longer than `limit`.
    """

    def tokens(units: int) -> int:
        return count(growth.build(random.Random(seed), units))

    units = guess if guess is not None else largest_units(tokens, growth.least, growth.most, limit)
    while (length := tokens(units)) > limit:
        if units <= growth.least:
            raise LengthError(f"the smallest prompt takes {length} of {limit} tokens")
        units = max(growth.least, min(units - 1, units * limit // length))
    return growth.build(random.Random(seed), units), units


def largest_units(tokens: Callable[[int], int], least: int, most: int | None, limit: int) -> int:
    """Largest units within the limit, by doubling and bisection; `least` when even that is too long."""
    low = high = least
    while tokens(high) <= limit and high != most:
        low, high = high, 2 * high if most is None else min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= limit else (low, middle)
    return high if tokens(high) <= limit else low
