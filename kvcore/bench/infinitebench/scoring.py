"""InfiniteBench's scorers, 0..1. An empty prediction scores 0 everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvcore.bench.scoring import rouge_f, token_f1

_ANSWER_MARKS = "\n:\"'.,?!{}"
_NUMBER = re.compile(r"\d+\.\d+|\d+")


def score(task: str, prediction: str, label: Any, drop_first_number: bool = False) -> float:
    """Official score of one prediction.

    Args:
        task: task name.
        prediction: the model's text.
        label: as `label_of` gives it.
        drop_first_number: `math_calc` for models that repeat the expression's first number.
    """
    if task in ("passkey", "number_string"):
        return float(first_integer(prediction) == label)
    if task == "kv_retrieval":
        return float(label in _words(prediction, _ANSWER_MARKS))
    if task == "longdialogue_qa_eng":
        return float(label in [word.upper() for word in _words(prediction, _ANSWER_MARKS)])
    if task == "longbook_qa_eng":
        return max(token_f1(prediction, reference) for reference in label)
    if task == "longbook_sum_eng":
        return max(rouge_f(prediction, reference, "rougeLsum") for reference in label)
    if task == "math_find":
        return _math_find(prediction, label)
    if task == "math_calc":
        return _math_calc(prediction, label, drop_first_number)
    if task == "code_run":
        return _code_run(prediction, label)
    if task == "code_debug":
        return float(_code_debug(prediction, label))
    if task == "longbook_choice_eng":
        return float(_choice(prediction, label))
    raise ValueError(f"InfiniteBench has no scorer for task '{task}'")


def label_of(task: str, record: dict[str, Any]) -> Any:
    """The label of a record: multiple choice as [text, letter], one-element lists of the retrieval tasks opened."""
    answer = record["answer"]
    if task in ("code_debug", "longbook_choice_eng"):
        if isinstance(answer, list) and len(answer) == 2 and answer[1] in "ABCD":
            return answer
        text = answer[0] if isinstance(answer, list) else answer
        return [text, "ABCD"[record["options"].index(text)]]
    if task in ("longbook_qa_eng", "longbook_sum_eng"):
        return answer if isinstance(answer, list) else [answer]
    if task != "math_calc" and isinstance(answer, list):
        answer = answer[0]
    if task in ("passkey", "number_string", "kv_retrieval"):
        return str(answer)
    if task in ("math_find", "code_run") and isinstance(answer, str):
        return float(answer) if "." in answer else int(answer)
    return answer


def first_integer(text: str) -> str:
    """The first run of digits, as written."""
    found = re.search(r"[0-9]+", text)
    return found.group() if found else ""


def _words(text: str, marks: str) -> list[str]:
    return text.translate({ord(mark): " " for mark in marks}).split()


def _math_find(prediction: str, label: float) -> float:
    found = _NUMBER.search(prediction)
    # an integer label is never met by a decimal number (the official script raises there)
    if found is None or (isinstance(label, int) and "." in found.group()):
        return 0.0
    return float(float(found.group()) == label)


def _math_calc(prediction: str, label: Sequence[int], drop_first_number: bool) -> float:
    """Share of the intermediate values that are right before the first wrong one."""
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", prediction)][int(drop_first_number) :]
    right = 0
    for expected, value in zip(label, numbers, strict=False):
        if expected != value:
            break
        right += 1
    return right / len(label)


def _code_run(prediction: str, label: int) -> float:
    words = _words(prediction, "\n.`'\":")
    try:
        return float(bool(words) and int(words[-1]) == label)
    except ValueError:
        return 0.0


def _after(text: str, prefixes: Sequence[str]) -> str | None:
    """The text one character after the first prefix (in order of `prefixes`) that occurs; None when none does."""
    for prefix in prefixes:
        position = text.find(prefix)
        if position >= 0:
            return text[position + len(prefix) + 1 :]
    return None


def _code_debug(prediction: str, label: Sequence[str]) -> bool:
    name, letter = label
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return True
    text = prediction.strip()
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    answer = _after(re.sub(" +", " ", text), ("answer is:", "is:", "answer:"))
    return answer is not None and answer.startswith((letter, name))


def _choice(prediction: str, label: Sequence[str]) -> bool:
    if not prediction:
        return False
    if prediction[0] in "ABCD":
        return prediction[0] in label
    text = re.sub(" +", " ", prediction.translate({ord(mark): " " for mark in "\n\"'.,?!{}"}))
    answer = _after(text, ("answer is:", "answer:", "answer is", "option is"))
    if answer is not None:
        return answer.startswith(tuple(label))
    return next((word in label for word in text.split() if word in "ABCD"), False)
