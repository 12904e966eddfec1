"""Tables and plots: every method is there, nothing is empty, nothing is NaN."""

import io

import matplotlib.image
import pytest
from rich.console import Console

from kvcore.cli import groups
from kvcore.report.plots import plot_results, quality_figure
from kvcore.report.style import MARKERS, method_looks
from kvcore.report.tables import print_summary

METHODS = ("full", "streaming_llm", "oracle_topk")


def summary_row(bench, metric, method, value, budget, context, task="all", **changes):
    row = {
        "bench": bench,
        "task": task,
        "method": method,
        "backbone": "smollm2_135m",
        "budget": budget,
        "budget_scope": "bytes",
        "context": context,
        "n": 6,
        "metric": metric,
        "value": value,
        "ci_low": value * 0.9,
        "ci_high": value * 1.1,
        "device_share": budget,
        "device_bytes": 1000,
        "host_bytes": 0,
        "attended_share": budget,
        "h2d_bytes_per_token": 0.0,
        "prefill_seconds": 1.5,
        "ms_per_token": 40.0,
        "reference_only": method == "oracle_topk",
        "compress_question": False,
    }
    return {**row, **changes}


def results(budgets=(0.1,), contexts=(512, 1024)):
    """Results of fidelity and niah for three methods."""
    summary, samples = [], []
    for rank, method in enumerate(METHODS):
        for budget in [1.0] if method == "full" else budgets:
            for context in contexts:
                summary.append(summary_row("fidelity", "kl", method, 0.1 * rank / budget, budget, context))
                summary.append(summary_row("fidelity", "agreement", method, 1 - 0.1 * rank, budget, context))
                summary.append(summary_row("niah", "recall", method, 1 - 0.3 * rank, budget, context, task="essay"))
                for depth in (0.0, 0.5, 1.0):
                    sample = {"bench": "niah", "task": "essay", "label": method, "method": method, "budget": budget}
                    samples.append(
                        {**sample, "context": context, "depth": depth, "score": float(depth < 0.9 - rank / 3)}
                    )
    return {"schema": 1, "config": {}, "environment": {}, "summary": summary, "samples": samples}


def shown(content) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_summary(content, console)
    return console.export_text()


@pytest.mark.parametrize(
    ("budgets", "contexts"),
    [((0.1,), (512, 1024)), ((0.05, 0.1, 0.2), (512,))],
    ids=["one_budget", "three_budgets"],
)
def test_plots_are_written_and_not_empty(tmp_path, budgets, contexts):
    paths = plot_results(results(budgets, contexts), tmp_path)
    assert [path.name for path in paths] == [
        "fidelity_kl.png",
        "fidelity_agreement.png",
        "niah_heatmap.png",
        "niah_recall.png",
    ]
    for path in paths:
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 200 and picture.shape[1] > 300
        assert picture[..., :3].std() > 0.02, f"{path.name} is blank"


def test_plots_of_one_sample_without_intervals_are_written(tmp_path):
    content = results()
    for row in content["summary"]:
        row.update(n=1, ci_low=None, ci_high=None)
    assert len(plot_results(content, tmp_path)) == 4


def test_plots_of_perfect_scores_only_are_written(tmp_path):
    content = results()
    content["summary"] = [row for row in content["summary"] if row["method"] == "full"]
    content["samples"] = [row for row in content["samples"] if row["method"] == "full"]
    assert all(path.stat().st_size > 5000 for path in plot_results(content, tmp_path))


def test_tables_hold_every_method_context_and_budget():
    text = shown(results(budgets=(0.05, 0.1)))
    assert text.count("fidelity on smollm2_135m") == text.count("niah on smollm2_135m") == 1
    for method in METHODS:
        assert text.count(method) == 2 * 2 * (1 if method == "full" else 2)
    assert "oracle_topk (reference)" in text
    assert "KL (nats)" in text and "top-1 agreement" in text
    assert "0.05" in text and "1024" in text
    assert "nan" not in text.lower()


def test_tables_of_rows_without_measurements_show_dashes():
    content = results()
    for row in content["summary"]:
        for column in ("device_share", "host_bytes", "prefill_seconds", "ci_low", "ci_high"):
            row[column] = None
    text = shown(content)
    assert " - " in text and "None" not in text


def test_only_the_row_over_all_tasks_is_shown_where_there_is_one():
    rows = [summary_row("ruler", "score", "full", 50.0, 1.0, 4096, task=task) for task in ("vt", "cwe", "all")]
    text = shown({"summary": rows, "samples": []})
    assert "(vt, cwe, all)" in text
    assert len([line for line in text.splitlines() if "full" in line]) == 1


def test_no_two_methods_look_alike_and_one_looks_the_same_everywhere():
    known, ablations = groups()["method"], groups()["ablation"]
    looks = method_looks([*known, *(name for name in ablations if name.startswith("sekv_"))])
    assert len(set(looks.values())) == len(looks) > len(MARKERS)
    assert method_looks(["sekv", "snapkv"])["snapkv"] == looks["snapkv"] == method_looks(["snapkv"])["snapkv"]


def test_budgets_in_tokens_are_drawn_as_tokens():
    content = results()
    rows = [row for row in content["summary"] if (row["bench"], row["metric"]) == ("niah", "recall")]
    rows += [{**row, "budget": 256} for row in rows if row["method"] != "full"]
    figure = quality_figure("niah", "recall", [{**r, "budget": 128} if r["budget"] == 0.1 else r for r in rows])
    [axis] = figure.axes
    assert "tokens per layer" in axis.get_xlabel() and axis.get_xlim()[1] < 300


def test_rows_without_a_context_are_drawn():
    rows = [row for row in results()["summary"] if row["metric"] == "recall" and row["context"] == 512]
    [axis] = quality_figure("gsm8k", "recall", [{**row, "context": None} for row in rows]).axes
    assert len(axis.containers) == 1 and len(axis.containers[0].lines[0].get_xdata()) == len(METHODS)


def test_a_terminal_table_of_many_metrics_shows_the_telling_ones():
    row = summary_row("efficiency", "total_seconds", "full", 2.0, 1.0, 512)
    names = ["total_seconds", "ms_per_token_ratio", *(f"other_{index}" for index in range(20))]
    text = shown({"summary": [{**row, "metric": name} for name in names], "samples": []})
    assert "whole s" in text and "decode / full's" in text and "other" not in text
