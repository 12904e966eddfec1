"""Results that survive: every finished sample is on disk at once, `results.json` is rewritten whole or not at all.

A row is keyed by everything that can change it: the resolved options of bench, backbone, method, budget, seed and
sample count. A half-written last line is dropped and that sample runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcore.bench.base import Benchmark
from kvcore.bench.statistics import bootstrap_interval, proportion_interval
from kvcore.log import get_logger

log = get_logger(__name__)
SCHEMA = 1
UNFINISHED = ".unfinished"
ABANDONED_SECONDS = 60  # a younger file may be one that another process is writing
LEDGER_COLUMNS = (
    "device_share",
    "device_bytes",
    "host_bytes",
    "attended_share",
    "h2d_bytes_per_token",
    "h2d_stall_ms_per_token",
    "prefill_seconds",
    "ms_per_token",
)


class SampleStore:
    """Finished sample rows of one output folder, one JSON line each.

    Args:
        folder: the output folder.
        rank: process index; every process appends to its own file and reads all of them.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = folder / f"samples.{rank}.jsonl"
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.reload()

    def reload(self) -> None:
        """Read every process's rows; lines that are not whole are reported and left out."""
        for path in sorted(self.folder.glob("samples.*.jsonl")):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                try:
                    row = json.loads(line)
                    self.rows[row["key"], row["sample_key"]] = row
                except (json.JSONDecodeError, KeyError, TypeError):
                    if line.strip():
                        log.warning("%s line %d is half-written; that sample runs again", path, number)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self.rows

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add finished rows and force them to disk."""
        needs_newline = self.path.exists() and self.path.stat().st_size and not _ends_with_newline(self.path)
        with self.path.open("a", encoding="utf-8") as file:
            if needs_newline:
                file.write("\n")
            for row in rows:
                self.rows[row["key"], row["sample_key"]] = row
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def select(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of the given run keys, in the order of keys and then of insertion."""
        order = {key: index for index, key in enumerate(keys)}
        chosen = [row for (key, _), row in self.rows.items() if key in order]
        return sorted(chosen, key=lambda row: (order[row["key"]], row["order"]))


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary file beside it, forced to disk, then renamed."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # a temporary file is private; the result gets the permissions that any new file gets
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Delete what killed runs were writing into a folder."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):  # its writer has just finished
            if time.time() - path.stat().st_mtime >= ABANDONED_SECONDS:
                path.unlink()


def summarise(benches: Sequence[Benchmark], rows: Sequence[dict[str, Any]], backbone: str) -> list[dict[str, Any]]:
    """Summary rows: one per bench x task x method x budget x context x metric, plus one over all tasks.

    Args:
        benches: the benchmarks that were run.
        rows: sample rows.
        backbone: name of the backbone.
    """
    summary: list[dict[str, Any]] = []
    by_bench = {bench.name: bench for bench in benches}
    for name in by_bench:
        of_bench = [row for row in rows if row["bench"] == name]
        for run_rows in _grouped(of_bench, ("label", "budget", "budget_scope", "context")):
            tasks = list(_grouped(run_rows, ("task",)))
            for task_rows in tasks:
                summary += _task_summary(task_rows[0]["task"], task_rows, backbone, by_bench[name])
            extra = by_bench[name].summarise(run_rows)
            if not extra and len(tasks) > 1:
                extra = _task_summary("all", run_rows, backbone, by_bench[name])
            summary += [{**_identity(run_rows[0], row.get("task", "all"), backbone), **row} for row in extra]
    return summary


def _identity(row: dict[str, Any], task: str, backbone: str) -> dict[str, Any]:
    return {
        "bench": row["bench"],
        "task": task,
        "method": row["label"],
        "backbone": backbone,
        "budget": row["budget"],
        "budget_scope": row["budget_scope"],
        "context": row["context"],
        "reference_only": row["reference_only"],
        "note": row.get("note", ""),
        "compress_question": row["compress_question"],
    }


def _task_summary(task: str, rows: Sequence[dict[str, Any]], backbone: str, bench: Benchmark) -> list[dict[str, Any]]:
    """One row per metric over the samples of one task and run."""
    identity = _identity(rows[0], task, backbone)
    # bytes and shares at their worst sample, times and traffic as means
    worst = ("device_share", "device_bytes", "host_bytes")
    ledger: dict[str, Any] = {}
    for column in LEDGER_COLUMNS:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            ledger[column] = max(values) if column in worst else sum(values) / len(values)
    result = []
    for metric in rows[0]["metrics"]:
        values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
        top = bench.proportions.get(metric)
        interval = bootstrap_interval(values, seed=bench.seed) if top is None else proportion_interval(values, top)
        result.append(
            {
                **identity,
                "n": len(values),
                "metric": metric,
                "value": sum(values) / len(values),
                "ci_low": interval.low,
                "ci_high": interval.high,
                **ledger,
            }
        )
    return result


def _grouped(rows: Sequence[dict[str, Any]], keys: tuple[str, ...]) -> Iterable[list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups.values()
