"""LongBench's tasks, prompts and records."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcore.bench.sources import HubSource, load_records, require_fields

LAYOUT = (
    "TASK.jsonl (TASK_e.jsonl for LongBench-E), one record a line with fields input, context, answers, length, "
    "all_classes, _id, as in the official data.zip"
)
FIELDS = ("input", "context", "answers", "length", "all_classes")
HUB_REPO, HUB_FILE = "THUDM/LongBench", "data.zip"


@lru_cache(maxsize=1)
def task_configs() -> dict[str, dict[str, Any]]:
    """Prompt, answer length, metric and protocol switches of the 16 English tasks, in the official order."""
    tasks: dict[str, dict[str, Any]] = json.loads((files(__package__) / "prompts.json").read_text("utf-8"))["tasks"]
    return tasks


def records(task: str, extended: bool, data_dir: str | None) -> list[dict[str, Any]]:
    """Records of a task (of LongBench-E with `extended`).

    Raises:
        FileNotFoundError: no file (names the path and the layout expected), and the hub out of reach.
        ValueError: a record that lacks a field.
    """
    name = f"{task}_e" if extended else task
    hub = HubSource(
        repo=HUB_REPO, licence="MIT; texts: see their data sets", file=HUB_FILE, member=f"data/{name}.jsonl"
    )
    found = load_records("longbench", [name], data_dir, hub, LAYOUT)
    require_fields(found, FIELDS, f"bench 'longbench', task {name}")
    return found


def split_prompt(task: str, record: dict[str, Any]) -> tuple[str, str]:
    """The official prompt, cut where the record's context ends."""
    head, _, tail = task_configs()[task]["prompt"].partition("{context}")
    return head + record["context"], tail.format(input=record["input"])
