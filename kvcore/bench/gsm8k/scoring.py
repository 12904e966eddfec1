"""GSM8K: exact match of the final number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from kvcore.bench.scoring import strip_thinking, truncate_at

# digits are required, so a lone comma or full stop is no number; sign and currency mark in either order; a minus
# behind a digit is a subtraction
_NUMBER = r"(?:(?<!\d)-\s?\$|\$\s?-|(?<!\d)-|\$)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def parse_number(text: str) -> Decimal:
    """A number as written in an answer: `$`, thousands separators and blanks are dropped."""
    return Decimal(re.sub(r"[$,\s]", "", text))


def marked_number(text: str) -> Decimal | None:
    """The number after the first `####`."""
    found = _MARKED.search(text)
    return parse_number(found.group(1)) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text."""
    found = _ANY.findall(text)
    return parse_number(found[-1]) if found else None


def answer_number(text: str) -> Decimal | None:
    """The number after `####` where there is one, else the last number."""
    marked = marked_number(text)
    return marked if marked is not None else last_number(text)


def score(prediction: str, reference: str, stops: Sequence[str]) -> dict[str, float]:
    """`exact_match` (number after `####`, else the last one) and `strict_match` (after `####` only), 0 or 1.

    Args:
        prediction: the model's text; what follows a generated stop (`Question:`) is dropped first.
        reference: the record's answer with its `#### number`.
        stops: where an answer ends.
    """
    text = truncate_at(strip_thinking(prediction), stops)
    expected = answer_number(reference)
    return {
        "exact_match": float(expected is not None and answer_number(text) == expected),
        "strict_match": float(expected is not None and marked_number(text) == expected),
    }
