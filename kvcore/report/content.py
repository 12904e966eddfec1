"""What a report is made of, apart from how it is written: sections of text, tables, figures; and its sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        title: one line.
        columns: headings; the first column holds names, the others numbers.
        rows: as many cells as columns each.
        note: what a reader must know, or nothing.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        name: file name without suffix, unique in a report.
        caption: what it shows; also the text for readers who cannot see it.
        figure: drawn and closed, ready to be written.
    """

    name: str
    caption: str
    figure: Figure


@dataclass
class Section:
    """One heading of a report."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """A `results.json` or a training run's `metrics.jsonl`.

    Attributes:
        name: short and unique in a report.
        path: where it came from.
        results: content of a results file, or None.
        training: records of a training run, or None.
    """

    name: str
    path: Path
    results: dict[str, Any] | None = None
    training: list[dict[str, Any]] | None = None


def read_sources(paths: list[Path]) -> list[Source]:
    """Results and training runs; a folder stands for every `results.json` and `metrics.jsonl` with steps below it.

    Raises:
        ValueError: nothing to read, or a file that is neither.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted([*path.rglob("results.json"), *path.rglob("metrics.jsonl")])
        else:
            files.append(path)
    found = [source for path in files if (source := _read(path)) is not None]
    if not found:
        raise ValueError(f"no results.json or training metrics.jsonl in {', '.join(map(str, paths))}")
    return _named(found)


def _read(path: Path) -> Source | None:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
            # evaluate.py logs its summary into a file of the same name: rows without steps
            records = [record for record in records if "step" in record]
            return Source(path.stem, path, training=records) if records else None
        content = json.loads(text)
        content["summary"], content["samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is neither a results.json nor a training metrics.jsonl ({error!r})") from error
    return Source(path.stem, path, results=content)


def _named(sources: list[Source]) -> list[Source]:
    """Sources with unique names: the file's, with the folder's where that says more."""
    named: list[Source] = []
    for source in sources:
        stem = source.path.stem
        name = source.path.resolve().parent.name if stem in ("results", "metrics") else stem
        taken = {other.name for other in named}
        unique, count = name, 2
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        named.append(Source(unique, source.path, source.results, source.training))
    return named


def published() -> list[dict[str, Any]]:
    """The papers' numbers (`published.yaml`)."""
    entries = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    assert isinstance(entries, list)
    return entries
