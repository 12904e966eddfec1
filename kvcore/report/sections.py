"""Results and training runs -> the sections of a report: what was measured, what the papers report, how it was run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from kvcore.report.content import Picture, Section, Source, Table
from kvcore.report.curves import memory_curve, quality_against_cost, training_curves, zoom_heatmaps
from kvcore.report.plots import needle_grids, over_tasks, quality_figure
from kvcore.report.style import MANY_METRICS, SHOWN_METRICS, STYLE, shown_metrics
from kvcore.report.tables import summary_cells, with_interval

LOWER_IS_BETTER = ("kl", "seconds", "ms_per", "bytes")
UNITS = (
    "Shares are of the full cache's bytes in the model's dtype, everything counted. Brackets are 95% intervals "
    "(bootstrap; Wilson's for shares of answers found), left out where one sample or equal samples cannot tell; "
    "'-' was not measured."
)


def build_sections(sources: Sequence[Source], papers: Sequence[dict[str, Any]]) -> list[Section]:
    """The whole report.

    Args:
        sources: results and training runs.
        papers: entries of `published.yaml`.
    """
    sections = []
    # a report holds all of its figures until they are written
    with plt.style.context(STYLE), plt.rc_context({"figure.max_open_warning": 0}):
        for source in sources:
            if source.results is not None:
                sections.append(_measured(source))
            if source.training is not None:
                sections.append(_training(source))
    measured = [row for source in sources if source.results is not None for row in source.results["summary"]]
    beside = _published(papers, measured)
    if beside.tables:
        sections.append(beside)
    return sections


def _measured(source: Source) -> Section:
    results = source.results
    assert results is not None
    section = Section(f"Measured: {source.name}", text=_how(source))
    for bench in dict.fromkeys(row["bench"] for row in results["summary"]):
        rows = [row for row in results["summary"] if row["bench"] == bench]
        samples = [row for row in results["samples"] if row["bench"] == bench]
        section.tables.append(_summary_table(bench, rows))
        section.pictures += _pictures(f"{source.name}_{bench}", bench, rows, samples)
    return section


def _how(source: Source) -> list[str]:
    """How the run was made, in sentences."""
    results = source.results
    assert results is not None
    environment = results.get("environment", {})
    known = {
        key: environment[key] for key in ("git", "device", "threads", "torch", "transformers") if key in environment
    }
    lines = [f"File: {source.path.name}."]
    if known:
        lines.append("Run with " + ", ".join(f"{key} {value}" for key, value in known.items()) + ".")
    backbone = results.get("config", {}).get("backbone", {})
    if backbone:
        lines.append(f"Backbone {backbone.get('name')} ({backbone.get('path')}), dtype {backbone.get('dtype')}.")
    if results.get("note"):
        lines.append(str(results["note"]))
    return lines


def _summary_table(bench: str, rows: list[dict[str, Any]]) -> Table:
    shown = shown_metrics(rows)
    rows = [row for row in rows if row["metric"] in shown]
    columns, cells = summary_cells(rows)
    return Table(f"{bench} on {rows[0]['backbone']}", columns, cells, UNITS)


def _pictures(name: str, bench: str, rows: list[dict[str, Any]], samples: list[dict[str, Any]]) -> list[Picture]:
    pictures = []
    if any("depth" in row for row in samples):
        caption = f"{bench}: recall of the needle by context and depth, one grid per method and budget."
        pictures.append(Picture(f"{name}_grids", caption, needle_grids(samples)))
    zoomed = [row for row in samples if row.get("zoom")]
    if zoomed:
        caption = f"{bench}: how often each layer and query head zooms in."
        pictures.append(Picture(f"{name}_zoom", caption, zoom_heatmaps(zoomed)))
    for metric in shown_metrics(rows):
        own = over_tasks([row for row in rows if row["metric"] == metric])
        caption = f"{bench}: {metric} by method, budget and context."
        pictures.append(Picture(f"{name}_{metric}", caption, quality_figure(bench, metric, own)))
        longest = max((row["context"] for row in own if row["context"] is not None), default=None)
        points = [r for r in own if r["context"] == longest and _has_costs(r)]
        # at one budget all would stand above one another
        budgets = {r["budget"] for r in points if r["method"] != "full"}
        if metric not in ("coverage", *SHOWN_METRICS) and len(budgets) > 1:
            caption = f"{bench}: {metric} against device bytes and against traffic, longest context."
            better_high = not any(part in metric for part in LOWER_IS_BETTER)
            figure = quality_against_cost(points, metric, better_high)
            pictures.append(Picture(f"{name}_{metric}_pareto", caption, figure))
    sized = [row for row in rows if row["context"] is not None and row.get("device_bytes") is not None]
    sized = [row for row in sized if row.get("host_bytes") is not None and row["metric"] == rows[0]["metric"]]
    if len({row["context"] for row in sized}) > 1:
        caption = f"{bench}: bytes of the cache on device and host against the context."
        pictures.append(Picture(f"{name}_memory", caption, memory_curve(sized)))
    return pictures


def _has_costs(row: dict[str, Any]) -> bool:
    return row.get("device_share") is not None and row.get("h2d_bytes_per_token") is not None


def _training(source: Source) -> Section:
    records = source.training
    assert records is not None
    last: dict[str, Any] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if isinstance(value, int | float)}
    rows = [[key, f"{value:.6g}"] for key, value in last.items()]
    caption = "Training: losses, and measures on held-out documents, against the step."
    section = Section(f"Training: {source.name}", [f"File: {source.path.name}."])
    section.tables.append(Table("latest values", ["record", "value"], rows))
    section.pictures.append(Picture(f"{source.name}_training", caption, training_curves(records)))
    return section


def _published(papers: Sequence[dict[str, Any]], measured: list[dict[str, Any]]) -> Section:
    """One table per published table that concerns a measured benchmark; measurements in columns of their own."""
    section = Section(
        "Published numbers beside measured ones",
        [
            "Columns headed 'published' quote the papers (other models, other hardware, budgets not counted in bytes); "
            "columns headed 'measured' come from the files above. They are not comparable digit by digit: compare the "
            "order of the methods and their distance to the full cache."
        ],
    )
    for entry in papers:
        own = over_tasks([row for row in measured if row["bench"] == entry["bench"]])
        if not own:
            continue
        metric = own[0]["metric"] if len({row["metric"] for row in own}) < MANY_METRICS else "total_seconds"
        own = [row for row in own if row["metric"] == metric and row["method"] in {"full", *entry["values"]}]
        own = [row for row in own if _same_budget(row, entry)]
        if all(row["method"] == "full" for row in own):
            continue
        contexts = sorted({(row["backbone"], row["context"]) for row in own}, key=str)
        columns = ["method", f"published: {entry['backbone']}, {entry['metric']}"]
        columns += [f"measured: {backbone}, {metric}, context {context}" for backbone, context in contexts]
        rows = []
        for method in dict.fromkeys([*entry["values"], *(row["method"] for row in own)]):
            cells = [method, str(entry["values"].get(method, "-"))]
            for backbone, context in contexts:
                place = [r for r in own if (r["method"], r["backbone"], r["context"]) == (method, backbone, context)]
                cells.append("; ".join(f"{with_interval(r)}, n={r['n']}" for r in place) or "-")
            rows.append(cells)
        title = f"{entry['table']}: {entry['bench']}, budget {entry['budget']:g}"
        section.tables.append(Table(title, columns, rows, f"Published: {entry['source']}"))
    return section


def _same_budget(row: dict[str, Any], entry: dict[str, Any]) -> bool:
    """The full cache belongs to every table; other runs to those of their own budget (3.9-fold is 0.26 here)."""
    if row["method"] == "full":
        return True
    share, published = row["budget"], entry["budget"]
    return share == published if published > 1 else abs(share - published) < 0.01
