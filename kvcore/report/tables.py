"""Terminal tables of a results file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcore.report.style import shown_metrics

WIDTH = 150
METRIC_NAMES = {
    "kl": "KL (nats)",
    "agreement": "top-1 agreement",
    "coverage": "attention coverage",
    "string_match": "score (%)",
    "accuracy": "accuracy (%)",
    "exact_match": "exact match (%)",
    "strict_match": "strict match (%)",
    "total_seconds": "whole s",
    "total_seconds_ratio": "whole / full's",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_ratio": "tokens/s / full's",
    "ttft_seconds": "first token s",
    "ms_per_token_ratio": "decode / full's",
    "peak_growth_bytes_ratio": "peak growth / full's",
}


def print_summary(results: dict[str, Any], console: Console | None = None) -> None:
    """One table per benchmark: a row per method, budget and context, a column per metric and per cost."""
    # written to a file or a pipe a table keeps its full width
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    for bench in dict.fromkeys(row["bench"] for row in results["summary"]):
        console.print(summary_table(bench, [row for row in results["summary"] if row["bench"] == bench]))


def summary_table(bench: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Table of one benchmark; over several tasks only their common row is shown."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    shown = shown_metrics(rows)
    columns, lines = summary_cells([row for row in rows if row["metric"] in shown])
    table = Table(title=f"{bench} on {rows[0]['backbone']} ({', '.join(tasks)})", title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for cells in lines:
        table.add_row(*cells)
    return table


def summary_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of one benchmark's table; over several tasks only their common row is shown."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    overall = [task for task in tasks if task in ("all", "mean")]
    shown = [row for row in rows if row["task"] in (overall or tasks)]
    metrics = list(dict.fromkeys(row["metric"] for row in shown))
    columns = ["method", "task", "context", "budget", "n", *(METRIC_NAMES.get(m, m) for m in metrics)]
    columns += ["device share", "attended", "host MB", "h2d KB/token", "prefill s", "ms/token"]
    lines = []
    for key in dict.fromkeys(_row_key(row) for row in shown):
        group = {row["metric"]: row for row in shown if _row_key(row) == key}
        first = next(iter(group.values()))
        name = first["method"] + (" (reference)" if first.get("reference_only") else "")
        name += f" ({first['note']})" if first.get("note") else ""
        cells = [name, first["task"], str(first["context"]), f"{first['budget']:g}", str(first["n"])]
        cells += [with_interval(group[metric]) if metric in group else "-" for metric in metrics]
        cells += [
            _format(first.get("device_share"), ".3f"),
            _format(first.get("attended_share"), ".3f"),
            _format(first.get("host_bytes"), ".1f", 1e-6),
            _format(first.get("h2d_bytes_per_token"), ".1f", 1e-3),
            _format(first.get("prefill_seconds"), ".1f"),
            _format(first.get("ms_per_token"), ".0f") + _waited(first),
        ]
        lines.append(cells)
    return columns, lines


def _waited(row: dict[str, Any]) -> str:
    """How much of a token's time was a wait for rows of the host, where there was any."""
    stall = row.get("h2d_stall_ms_per_token") or 0.0
    return f" ({stall:.1f} waited)" if stall else ""


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["method"], row["task"], row["context"], row["budget"], row["budget_scope"]


def with_interval(row: dict[str, Any]) -> str:
    """A value with its 95% interval where there is one."""
    digits = 4 if row["metric"] == "kl" else 3
    value = f"{row['value']:z.{digits}f}"  # z: no minus before a zero
    if row.get("ci_low") is None:
        return value
    digits = 4 if row["metric"] == "kl" else 2
    return f"{value} [{row['ci_low']:z.{digits}f}, {row['ci_high']:z.{digits}f}]"


def _format(value: float | None, spec: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, spec)
