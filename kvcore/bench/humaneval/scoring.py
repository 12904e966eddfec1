"""HumanEval: a completion passes when the record's own tests run to their end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvcore.bench.humaneval.sandbox import Limits, Outcome, run_program
from kvcore.bench.scoring import strip_thinking, truncate_at

_FENCE = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


def completion_of(prediction: str, prompt: str, entry_point: str, stops: Sequence[str]) -> str:
    """The code to append to the prompt.

    A plain continuation is cut at the official stops. An instruct model's answer may hold a code block: when it
    defines the function again, the whole block is used (a later definition replaces the prompt's).
    """
    text = strip_thinking(prediction)
    block = _FENCE.search(text)
    if block is None:
        return truncate_at(text, stops)
    code = block.group(1)
    return "\n" + code if re.search(rf"^\s*def {re.escape(entry_point)}\b", code, re.MULTILINE) else code


def check(record: dict[str, Any], completion: str, limits: Limits) -> Outcome:
    """Run prompt + completion + tests as the official script assembles them."""
    program = f"{record['prompt']}{completion}\n{record['test']}\ncheck({record['entry_point']})"
    return run_program(program, limits)
