"""LongBench's scorers: the best score over the references, 0..1.

ROUGE-L is the summary-level F of the `rouge` package, which the official script uses (rouge-score differs by some
points). Where that package cannot score a text (empty, or nothing but full stops) the official value is 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rouge import Rouge

from kvcore.bench.scoring import EditBackend, edit_similarity, first_line, token_f1

_CODE_MARKS = ("`", "#", "//")


def score(
    metric: str,
    prediction: str,
    references: Sequence[str],
    all_classes: Sequence[str] | None,
    only_first_line: bool,
    edit_backend: EditBackend = "difflib",
) -> float:
    """Official score of one prediction.

    Args:
        metric: f1, rouge_l, classification, count, retrieval or edit_similarity.
        prediction: the model's text.
        references: accepted answers.
        all_classes: class names, for `classification`.
        only_first_line: cut the prediction after its first line (trec, triviaqa, samsum).
        edit_backend: see `kvcore.bench.scoring.edit_similarity`.
    """
    if only_first_line:
        prediction = first_line(prediction)
    if metric == "classification":
        return max(classification(prediction, reference, all_classes or ()) for reference in references)
    if metric == "edit_similarity":
        line = first_code_line(prediction)
        return max(edit_similarity(line, reference, edit_backend) for reference in references)
    scorer = {"f1": token_f1, "rouge_l": rouge_l, "count": count_score, "retrieval": retrieval_score}[metric]
    return max(scorer(prediction, reference) for reference in references)


@lru_cache(maxsize=1)
def _rouge() -> Rouge:
    return Rouge(metrics=["rouge-l"], stats=["f"])


def rouge_l(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F of the `rouge` package; 0 where it has no sentence to score."""
    if not prediction.replace(".", "").strip() or not reference.replace(".", "").strip():
        return 0.0
    # RecursionError: the package rebuilds the subsequence recursively; the official script scores it 0 as well
    try:
        return float(_rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except RecursionError:
        return 0.0


def number_share(prediction: str, wanted: str) -> float:
    """Share of the numbers in a text that equal `wanted`."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def count_score(prediction: str, reference: str) -> float:
    """passage_count: share of the numbers that are the right count."""
    return number_share(prediction, reference)


def retrieval_score(prediction: str, reference: str) -> float:
    """passage_retrieval_en: share of the numbers that are the right paragraph (`Paragraph 7`)."""
    found = re.search(r"Paragraph (\d+)", reference)
    return number_share(prediction, found.group(1)) if found else 0.0


def classification(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """trec: 1 / (class names found in the prediction) when the right one is among them.

    Names that are a part of the right name do not count. The official loop removes them from the list it walks, so
    the name after a removed one is not looked at; that is kept, since published scores have it.
    """
    found = [name for name in all_classes if name in prediction]
    position = 0
    while position < len(found):
        if found[position] in reference and found[position] != reference:
            found.remove(found[position])
        position += 1
    return 1.0 / len(found) if reference in found else 0.0


def first_code_line(prediction: str) -> str:
    """The first line without a comment or code fence; empty when there is none."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _CODE_MARKS)), "")


def length_bucket(words: int) -> str:
    """LongBench-E's length classes, by the record's `length`."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
