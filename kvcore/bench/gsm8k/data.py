"""GSM8K's records and few-shot prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcore.bench.sources import HubSource, load_records, require_fields

LAYOUT = "train.jsonl (examples) and test.jsonl, or parquet, fields question and answer, as in openai/grade-school-math"
HUB_REPO, HUB_REVISION = "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866"


@lru_cache(maxsize=1)
def prompts() -> dict[str, Any]:
    """Formats of question and answer, separator, stops and answer length."""
    loaded: dict[str, Any] = json.loads((files(__package__) / "prompts.json").read_text("utf-8"))
    return loaded


def records(split: str, data_dir: str | None) -> list[dict[str, Any]]:
    """Records of `train` or `test`.

    Raises:
        FileNotFoundError: no file (names the path and the layout expected), and the hub out of reach.
        ValueError: a record that lacks a field.
    """
    hub = HubSource(repo=HUB_REPO, licence="MIT", file=f"main/{split}-00000-of-00001.parquet", revision=HUB_REVISION)
    found = load_records("gsm8k", [split, f"{split}-00000-of-00001"], data_dir, hub, LAYOUT)
    require_fields(found, ("question", "answer"), f"bench 'gsm8k', {split}")
    return found


def examples_text(examples: Sequence[dict[str, Any]]) -> str:
    """The solved examples of the prompt, each followed by the separator."""
    form = prompts()
    return "".join(
        form["question"].format(question=example["question"])
        + form["answer"].format(answer=example["answer"])
        + form["separator"]
        for example in examples
    )


def question_text(record: dict[str, Any]) -> str:
    """The question to be answered."""
    text: str = prompts()["question"].format(question=record["question"])
    return text
