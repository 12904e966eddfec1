"""Results and training runs to Markdown tables, PNG and SVG plots, and one HTML page that needs nothing else.

    python scripts/report.py results/*.json --output outputs/report
    python scripts/report.py outputs/evaluate-1234abcd outputs/train-1234abcd --output outputs/report --title "Mine"

A folder stands for every `results.json` and training `metrics.jsonl` below it. Numbers of the papers stand in columns
of their own (`kvcore/report/published.yaml`; `--no-published` leaves them out).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvcore.report.content import published, read_sources
from kvcore.report.html import png_bytes, to_html
from kvcore.report.markdown import to_markdown
from kvcore.report.sections import build_sections


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="results.json, metrics.jsonl, or folders that hold them")
    parser.add_argument("--output", type=Path, default=Path("outputs/report"), help="folder, made when absent")
    parser.add_argument("--title", default="KV-cache compression: results")
    parser.add_argument("--no-published", action="store_true", help="leave the papers' numbers out")
    options = parser.parse_args(arguments)
    try:
        sources = read_sources(options.sources)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sections = build_sections(sources, [] if options.no_published else published())
    options.output.mkdir(parents=True, exist_ok=True)
    for picture in (picture for section in sections for picture in section.pictures):
        (options.output / f"{picture.name}.png").write_bytes(png_bytes(picture))
        picture.figure.savefig(options.output / f"{picture.name}.svg")
    (options.output / "report.md").write_text(to_markdown(options.title, sections), encoding="utf-8")
    (options.output / "index.html").write_text(to_html(options.title, sections), encoding="utf-8")
    plt.close("all")
    print(f"page:     {options.output / 'index.html'}")
    print(f"markdown: {options.output / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
