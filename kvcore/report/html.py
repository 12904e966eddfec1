"""A report as one HTML page that needs nothing else: pictures inlined, no script, no request; readable on a phone."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from kvcore.report.content import Picture, Section, Table

DPI = 130
WIDE_INCHES = 8  # on paper narrower pictures stand two in a row
REM_PER_INCH = 4  # of a picture that does not fit: 10-point letters are 9 pixels high then
CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; font-size: 1.3rem; }
nav ul { padding-left: 1.2rem; }
.scroll { overflow-x: auto; max-width: 100%; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.78rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.25rem 0.45rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { background: #f3f3f3; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
td:first-child { background: #fff; }
/* pinned, the names must leave room for a number on a phone */
@media (max-width: 40rem) { td:first-child { white-space: normal; min-width: 6rem; max-width: 8rem; } }
th.published, td.published { background: #fff4dd; }
.note { color: #555; font-size: 0.85rem; margin-top: 0; }
figure { margin: 1.2rem 0; } figcaption { color: #333; font-size: 0.9rem; }
img { max-width: 100%; height: auto; display: block; }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  nav { display: none; }
  /* paper does not scroll */
  .scroll { overflow: visible; } table { font-size: 9.5px; width: 100%; } .note { font-size: 9px; }
  th, td { padding: 1px 3px; white-space: normal; overflow-wrap: anywhere; position: static !important; }
  tr, figure { break-inside: avoid; } h2, caption { break-after: avoid; }
  figure { display: inline-block; width: 49%; margin: 0 0 4mm; vertical-align: top; } figure.wide { width: 100%; }
  img { min-width: 0 !important; max-height: 76mm; width: auto; } .wide img { max-height: 165mm; }
}
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
    body = "".join(_section(f"s{i}", section) for i, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # an empty icon: without it browsers ask the server for one
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{CSS}</style></head>\n'
        f"<body><h1>{escape(title)}</h1><nav><ul>{links}</ul></nav>{body}</body></html>\n"
    )


def _section(anchor: str, section: Section) -> str:
    parts = [f'<section id="{anchor}"><h2>{escape(section.title)}</h2>']
    parts += [f"<p>{escape(line)}</p>" for line in section.text]
    parts += [html_table(table) for table in section.tables]
    parts += [_figure(picture) for picture in section.pictures]
    return "\n".join([*parts, "</section>\n"])


def html_table(table: Table) -> str:
    """A table that scrolls inside its own box; columns of published numbers are shaded."""
    shades = [' class="published"' if name.startswith("published") else "" for name in table.columns]
    head = "".join(f"<th{shade}>{escape(name)}</th>" for name, shade in zip(table.columns, shades, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{s}>{escape(c)}</td>" for c, s in zip(row, shades, strict=True)) + "</tr>"
        for row in table.rows
    ]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    rows = "\n".join(lines)
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(png_bytes(picture)).decode("ascii")
    caption = escape(picture.caption)
    # wide pictures scroll in a box of their own on a phone: letters keep one size, whatever the width
    width = f"min-width:{picture.figure.get_figwidth() * REM_PER_INCH:.0f}rem"
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(picture.caption, quote=True)}" style="{width}">'
    wide = ' class="wide"' if picture.figure.get_figwidth() > WIDE_INCHES else ""
    return f'<figure{wide}><div class="scroll">{image}</div><figcaption>{caption}</figcaption></figure>'


def png_bytes(picture: Picture) -> bytes:
    """The picture as PNG."""
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
