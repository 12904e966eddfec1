"""Scorers shared by the benchmarks: normalisation, token F1, ROUGE, edit similarity, containment.

All scores are in 0..1; a benchmark multiplies by 100 where its official scale does.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Literal

from rapidfuzz import fuzz
from rouge_score import rouge_scorer

EditBackend = Literal["difflib", "indel"]
EDIT_BACKENDS: tuple[EditBackend, ...] = ("difflib", "indel")
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no English articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the multisets of normalised words; 0 when they share none."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(reference).split()
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


@lru_cache(maxsize=4)
def _rouge(kind: str, stem: bool) -> rouge_scorer.RougeScorer:
    return rouge_scorer.RougeScorer([kind], use_stemmer=stem)


def rouge_f(prediction: str, reference: str, kind: str = "rougeL", stem: bool = False) -> float:
    """F-measure of google-research's rouge-score; an empty prediction scores 0.

    Args:
        prediction: the model's text.
        reference: the reference text.
        kind: `rougeL` (one sequence), `rougeLsum` (a line is a sentence), `rouge1`, `rouge2`.
        stem: Porter stemming.
    """
    return float(_rouge(kind, stem).score(reference, prediction)[kind].fmeasure)


def edit_similarity(prediction: str, reference: str, backend: EditBackend = "difflib") -> float:
    """fuzzywuzzy's `fuzz.ratio / 100`: rounded to whole percent, 0 when either side is empty.

    Args:
        prediction: the model's text.
        reference: the reference text.
        backend: `difflib` is fuzzywuzzy as LongBench's requirements install it (matching blocks of the standard
            library); `indel` is what it computes when python-Levenshtein is installed too (longest common
            subsequence, by rapidfuzz).
    """
    if not prediction or not reference:
        return 0.0
    if backend == "indel":
        return round(fuzz.ratio(prediction, reference)) / 100
    return round(100 * SequenceMatcher(None, prediction, reference).ratio()) / 100


def contained_share(prediction: str, references: Sequence[str]) -> float:
    """Share of references found in the prediction, ignoring case (RULER's `string_match_all`)."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def contains_any(prediction: str, references: Sequence[str]) -> float:
    """1 when any reference is found in the prediction, ignoring case (RULER's `string_match_part`)."""
    text = prediction.lower()
    return float(any(reference.lower() in text for reference in references))


def first_line(text: str) -> str:
    """The first line after leading line ends."""
    return text.lstrip("\n").split("\n")[0]


def truncate_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    cuts = [text.find(stop) for stop in stops]
    return text[: min((cut for cut in cuts if cut >= 0), default=len(text))]


def strip_thinking(text: str) -> str:
    """The text without `<think>...</think>` parts; an unclosed one runs to the end, an unopened one from the start."""
    return _THINKING.sub("", text).rpartition("</think>")[2]
