"""Genuine benchmark records for golden tests, where they lie beside the checkout; absent ones skip aloud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared(path: str) -> Path:
    """A file or folder of genuine records; skips the test when it is not there."""
    found = ROOT / path
    if not found.exists():
        pytest.skip(f"genuine records are not on this machine: ../shared/data/{path}")
    return found


def first_records(path: str, count: int = 3) -> list[dict[str, Any]]:
    """The first records of a genuine jsonl file."""
    with shared(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
