"""Recall of the needle's facts, whatever words surround them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def needle_recall(prediction: str, facts: Sequence[str]) -> float:
    """Share of the facts found in the answer; case and punctuation are ignored, a verbose answer counts as well.

    Args:
        prediction: the model's answer.
        facts: what the needle said.
    """
    if not facts:
        raise ValueError("a needle needs at least one fact to look for; received none")
    answer = _plain(prediction)
    return sum(_plain(fact) in answer for fact in facts) / len(facts)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())
