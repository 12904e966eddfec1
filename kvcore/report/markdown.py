"""A report as Markdown, pictures as links to the files beside it."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.report.content import Section, Table


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole page; pictures are expected as `NAME.png` in the same folder."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.text
        parts += [markdown_table(table) for table in section.tables]
        parts += [f"![{picture.caption}]({picture.name}.png)" for picture in section.pictures]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A GitHub table with its title above and its note below."""
    lines = [f"**{table.title}**", ""]
    lines.append(_row(table.columns))
    lines.append("|---|" + "---:|" * (len(table.columns) - 1))
    lines += [_row(row) for row in table.rows]
    if table.note:
        lines += ["", f"*{table.note}*"]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
