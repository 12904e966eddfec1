"""Compare two methods sample by sample: difference with its bootstrap interval, per bench, task, context and metric.

    python scripts/compare.py outputs/DIR/results.json --methods sekv snapkv
    python scripts/compare.py a/results.json b/results.json --methods sekv@0.1 sekv@0.2

Small samples lie; on the same samples a difference is known far better than either mean. `METHOD@BUDGET` picks one
budget of a method that was run at several.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcore.bench.statistics import PairedDifference, paired_difference
from kvcore.options import did_you_mean

Cell = tuple[str, str, str, Any, str]  # backbone, bench, task, context, metric


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="results.json")
    parser.add_argument("--methods", nargs=2, required=True, metavar=("A", "B"), help="METHOD or METHOD@BUDGET")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    options = parser.parse_args(arguments)
    try:
        rows = [row for path in options.results for row in read_rows(path)]
        first, second = options.methods
        compared = compare(rows, first, second, seed=options.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(as_table(compared, first, second))
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Sample rows of a `results.json`, with the backbone's name.

    Raises:
        ValueError: a file that is missing or holds no results.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        backbone = results["config"]["backbone"]["name"]
        return [{**row, "backbone": backbone} for row in results["samples"]]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no results.json of evaluate.py ({error})") from error


def compare(rows: Sequence[dict[str, Any]], a: str, b: str, seed: int = 0) -> dict[Cell, PairedDifference]:
    """A minus B for every bench, task, context and metric that both were run on.

    Raises:
        ValueError: a method that was not run or at several budgets, or no sample in common.
    """
    scores_a, scores_b = _scores(rows, a), _scores(rows, b)
    shared = [cell for cell in scores_a if scores_a[cell].keys() & scores_b.get(cell, {}).keys()]
    if not shared:
        raise ValueError(f"{a} and {b} have no sample in common: run both with the same bench, seed and limit")
    return {cell: paired_difference(scores_a[cell], scores_b[cell], seed) for cell in shared}


def _scores(rows: Sequence[dict[str, Any]], name: str) -> dict[Cell, dict[Any, float]]:
    label, _, budget = name.partition("@")
    own = [row for row in rows if row["label"] == label and (not budget or str(row["budget"]) == budget)]
    if not own:
        raise ValueError(f"no samples of '{name}'. {did_you_mean(name, sorted({row['label'] for row in rows}))}")
    budgets = sorted({str(row["budget"]) for row in own})
    if len(budgets) > 1:
        raise ValueError(
            f"'{label}' was run at several budgets; say which: {', '.join(f'{label}@{x}' for x in budgets)}"
        )
    scores: dict[Cell, dict[Any, float]] = defaultdict(dict)
    for row in own:
        for metric, value in row["metrics"].items():
            cell = (row["backbone"], row["bench"], row["task"], row["context"], metric)
            scores[cell][row["sample_key"]] = value
    return scores


def as_table(compared: dict[Cell, PairedDifference], a: str, b: str) -> Table:
    """One line per cell."""
    table = Table(title=f"{a} minus {b}, same samples")
    for column in ("backbone", "bench", "task", "context", "metric", "difference [95%]", "p", "wins", "losses", "n"):
        table.add_column(column)
    for cell, result in compared.items():
        interval = result.difference
        ends = "too few or all equal" if interval.low is None else f"{interval.low:+.3f}, {interval.high:+.3f}"
        difference = f"{interval.value:+.3f} [{ends}]"
        counts = (f"{result.p_value:.3g}", str(result.wins), str(result.losses), str(interval.n))
        table.add_row(*map(str, cell), difference, *counts)
    return table


if __name__ == "__main__":
    sys.exit(main())
