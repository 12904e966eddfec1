"""Summary rows over the tasks of a benchmark: the plain mean of the tasks' means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.bench.statistics import stratified_interval

WORST = ("device_share", "device_bytes", "host_bytes")
MEAN = ("attended_share", "h2d_bytes_per_token", "h2d_stall_ms_per_token", "prefill_seconds", "ms_per_token")


def mean_of_tasks(rows: Sequence[dict[str, Any]], metric: str, seed: int) -> list[dict[str, Any]]:
    """The summary row `all` of one run and context, when there are several tasks.

    Args:
        rows: sample rows of one method, budget and context; every row counts with its first metric.
        metric: name of the mean.
        seed: of the bootstrap; tasks are resampled separately.
    """
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(next(iter(row["metrics"].values())))
    if len(by_task) < 2:
        return []
    interval = stratified_interval(by_task, seed)
    ledger: dict[str, Any] = {}
    for column in (*WORST, *MEAN):
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            ledger[column] = max(values) if column in WORST else sum(values) / len(values)
    return [
        {
            "task": "all",
            "metric": metric,
            "value": interval.value,
            "ci_low": interval.low,
            "ci_high": interval.high,
            "n": interval.n,
            "num_tasks": len(by_task),
            **ledger,
        }
    ]
