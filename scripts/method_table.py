"""One Markdown table of methods x budgets: fidelity, needles, bytes, attended entries, traffic, and times.

    python scripts/method_table.py results/baselines_fidelity_bf16.json results/baselines_niah_bf16.json \
        --times results/decode_baselines_bf16.json

The results are of `evaluate.py` (`bench=fidelity` and `bench=niah`); bytes, entries and traffic are those of the
fidelity runs. Times are the last line that `scripts/bench_decode.py` prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from kvcore.report.content import Table
from kvcore.report.markdown import markdown_table

Key = tuple[str, float]  # method label, budget
COLUMNS = (
    *("method", "budget", "KL (nats)", "agreement", "needles", "device share", "device MB", "host MB", "attended"),
    "host to device, MB/token",
)
TIMES = ("prefill, of full", "decode, of full")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="results.json")
    parser.add_argument("--times", type=Path, help="the last line of scripts/bench_decode.py")
    options = parser.parse_args(arguments)
    try:
        rows = [row for path in options.results for row in _read(path, "samples")]
        times = [] if options.times is None else _read(options.times, "rows")
        print(markdown_table(method_table(rows, times)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: Path, field: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[field]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no '{field}' ({error})") from error
    return found


def method_table(rows: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]] = ()) -> Table:
    """One line per method and budget, in the order of the rows.

    Args:
        rows: sample rows of fidelity and needle runs.
        times: rows of `scripts/bench_decode.py`.

    Raises:
        ValueError: no fidelity run among the rows.
    """
    fidelity, needles = _grouped(rows, "fidelity"), _grouped(rows, "niah")
    if not fidelity:
        raise ValueError("no samples of bench=fidelity among the results")
    time_of = {(row["method"], float(row["budget"])): row for row in times}
    lines = []
    for key, own in fidelity.items():
        label, budget = key
        line = [
            label + (" (reference)" if own[0]["reference_only"] else ""),
            f"{budget:g}",
            f"{mean(row['metrics']['kl'] for row in own):.4f}",
            f"{mean(row['metrics']['agreement'] for row in own):.3f}",
            _needles(needles.get(key, [])),
            f"{mean(row['device_share'] for row in own):.3f}",
            f"{mean(row['device_bytes'] for row in own) / 1e6:.1f}",
            f"{mean(row['host_bytes'] for row in own) / 1e6:.1f}",
            f"{mean(row['attended_share'] for row in own):.2f}",
            f"{mean(row['h2d_bytes_per_token'] for row in own) / 1e6:.2f}",
        ]
        if times:
            line += _times(time_of.get(key))
        lines.append(line)
    windows = {len(own) for own in fidelity.values()}
    note = f"Fidelity over {_counts(windows)} windows; a dash: not measured."
    return Table("Methods at every budget", [*COLUMNS, *(TIMES if times else ())], lines, note)


def _grouped(rows: Iterable[dict[str, Any]], bench: str) -> dict[Key, list[dict[str, Any]]]:
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        if row["bench"] == bench:
            grouped.setdefault((row["label"], float(row["budget"])), []).append(row)
    return grouped


def _needles(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    return f"{sum(row['metrics']['recall'] for row in rows):g} of {len(rows)}"


def _times(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["-", "-"]
    return [f"{row['prefill_ratio']:.2f}x", f"{row['decode_ratio_median']:.2f}x"]


def _counts(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


if __name__ == "__main__":
    sys.exit(main())
