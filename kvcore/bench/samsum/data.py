"""SAMSum's records and few-shot prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcore.bench.sources import HubSource, load_records, require_fields

LAYOUT = "train.jsonl (examples) and test.jsonl, or .json, .parquet, fields id, dialogue, summary"
HUB_REPO = "knkarthick/samsum"


@lru_cache(maxsize=1)
def prompts() -> dict[str, Any]:
    """Header, formats of dialogue and summary, separator, stops and answer length."""
    loaded: dict[str, Any] = json.loads((files(__package__) / "prompts.json").read_text("utf-8"))
    return loaded


def records(split: str, data_dir: str | None) -> list[dict[str, Any]]:
    """Records of `train` or `test`.

    Raises:
        FileNotFoundError: no file (names the path and the layout expected), and the hub out of reach.
        ValueError: a record that lacks a field.
    """
    hub = HubSource(repo=HUB_REPO, licence="CC BY-NC-ND 4.0", split=split)
    found = load_records("samsum", [split], data_dir, hub, LAYOUT)
    require_fields(found, ("dialogue", "summary"), f"bench 'samsum', {split}")
    return found


def dialogue_text(record: dict[str, Any]) -> str:
    """The dialogue to be summarised, line ends unified."""
    text: str = prompts()["dialogue"].format(dialogue=record["dialogue"].replace("\r\n", "\n"))
    return text


def example_text(record: dict[str, Any]) -> str:
    """One solved example, followed by the separator."""
    form = prompts()
    summary: str = form["summary"].format(summary=" ".join(record["summary"].split()))
    return dialogue_text(record) + summary + form["separator"]


def examples_text(examples: Sequence[dict[str, Any]]) -> str:
    """The header and the solved examples."""
    header: str = prompts()["header"]
    return header + "".join(map(example_text, examples))
