"""HumanEval's records and stops."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcore.bench.sources import HubSource, load_records, require_fields

LAYOUT = "HumanEval.jsonl.gz (or .jsonl, .parquet), fields task_id, prompt, entry_point, canonical_solution, test"
HUB_REPO, HUB_REVISION = "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"
FIELDS = ("task_id", "prompt", "entry_point", "test")


@lru_cache(maxsize=1)
def prompts() -> dict[str, Any]:
    """Stops and answer length."""
    loaded: dict[str, Any] = json.loads((files(__package__) / "prompts.json").read_text("utf-8"))
    return loaded


def records(data_dir: str | None) -> list[dict[str, Any]]:
    """The problems.

    Raises:
        FileNotFoundError: no file (names the path and the layout expected), and the hub out of reach.
        ValueError: a record that lacks a field.
    """
    hub = HubSource(
        repo=HUB_REPO, licence="MIT", file="openai_humaneval/test-00000-of-00001.parquet", revision=HUB_REVISION
    )
    found = load_records("humaneval", ["HumanEval", "openai_humaneval"], data_dir, hub, LAYOUT)
    require_fields(found, FIELDS, "bench 'humaneval'")
    return found
