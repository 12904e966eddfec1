"""The report: every number of the results, published ones apart, one page that needs nothing else and fits a phone."""

import base64
import html
import json
import re
import shutil
import subprocess

import pytest
from script_cases import load_script
from test_report import results, summary_row

from kvcore.report.content import Section, Table, published, read_sources
from kvcore.report.curves import pareto_front
from kvcore.report.html import to_html
from kvcore.report.markdown import markdown_table
from kvcore.report.sections import build_sections

script = load_script("report")
# asked inside the page, at the width of a small phone
PROBE = """<script>addEventListener("load", () => { document.documentElement.style.width = "390px";
document.body.dataset.probe = JSON.stringify({ wide: document.body.scrollWidth,
images: [...document.images].map((i) => i.naturalWidth) }); });</script>"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two result files and a training run."""
    folder = tmp_path_factory.mktemp("sources")
    content = results(budgets=(0.05, 0.1), contexts=(512, 1024))
    for row in content["summary"]:
        row["host_bytes"], row["h2d_bytes_per_token"] = 5000, 1000.0 * (row["method"] == "streaming_llm")
    zoomed = {
        **content["samples"][0],
        "bench": "zoom",
        "label": "sekv",
        "zoom": {"frequency": [[0.0, 0.2], [0.5, 0.1]]},
    }
    content["summary"].append(summary_row("zoom", "recall", "sekv", 1.0, 0.1, 512))
    content["samples"].append(zoomed)
    (folder / "first").mkdir()
    (folder / "first" / "results.json").write_text(json.dumps(content))
    (folder / "second.json").write_text(json.dumps(results()))
    (folder / "train").mkdir()
    records = [{"step": s, "loss": 1 / s, "loss/distill": 0.5 / s, "loss/zoom": 0.5 / s} for s in range(1, 9)]
    records.append({"step": 8, "eval/criterion": 0.3})
    (folder / "train" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture(scope="module")
def written(sources, tmp_path_factory):
    """A report of all of them."""
    output = tmp_path_factory.mktemp("report")
    assert (
        script.main(
            [str(sources / "first"), str(sources / "second.json"), str(sources / "train"), "--output", str(output)]
        )
        == 0
    )
    return output


def test_every_picture_is_there_as_png_and_svg(written):
    kinds = ("niah_grids", "niah_recall", "niah_memory", "fidelity_kl_pareto", "zoom_zoom")
    assert {f"first_{kind}" for kind in kinds} | {"train_training"} <= {path.stem for path in written.glob("*.png")}
    assert {path.stem for path in written.glob("*.png")} == {path.stem for path in written.glob("*.svg")}


def test_the_page_asks_for_nothing_and_holds_every_picture(written):
    page = (written / "index.html").read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert "<script" not in page and "url(" not in page and "@import" not in page
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page)
    assert len(pictures) == page.count("<img") == len(list(written.glob("*.png")))
    assert all(base64.b64decode(data).startswith(b"\x89PNG") and text for data, text in pictures)
    assert page.count("<table") == page.count('<div class="scroll"><table')


def test_the_markdown_links_to_pictures_that_exist(written):
    text = (written / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert links and all((written / link).is_file() for link in links)
    assert "nan" not in text.lower().replace("finance", "")


def test_published_numbers_stand_in_columns_of_their_own(tmp_path):
    content = json.loads(json.dumps(results()).replace("streaming_llm", "snapkv"))
    (tmp_path / "results.json").write_text(json.dumps(content))
    section = build_sections(read_sources([tmp_path]), published())[-1]
    assert section.title.startswith("Published")
    ours = {f"{row['value']:.3f}" for row in results()["summary"]}
    for table in section.tables:
        assert table.columns[1].startswith("published: ")
        assert all(column.startswith("measured: ") for column in table.columns[2:])
        assert not {row[1] for row in table.rows} & ours
        assert any(row[0] != "full" and set(row[2:]) != {"-"} for row in table.rows), "a table without a measurement"


def test_published_numbers_name_their_source_and_known_methods():
    from kvcore.cli import groups

    known = {*groups()["method"], *groups()["ablation"], "without surprisal weighting"}
    for entry in published():
        assert entry["source"].startswith("https://arxiv.org/abs/")
        assert set(entry["values"]) <= known
        assert entry["bench"] in groups()["bench"]


def test_the_front_holds_the_runs_that_nothing_beats():
    rows = [{"cost": c, "value": v} for c, v in ((1, 5.0), (2, 3.0), (2, 4.0), (3, 3.5), (4, 1.0))]
    assert [(r["cost"], r["value"]) for r in pareto_front(rows, "cost", False)] == [(1, 5.0), (2, 3.0), (4, 1.0)]
    assert [(r["cost"], r["value"]) for r in pareto_front(rows, "cost", True)] == [(1, 5.0)]


def test_cells_cannot_break_a_table_or_a_page():
    table = Table("<b>", ["a|b", "n"], [["x|y", "<script>"]])
    assert markdown_table(table).splitlines()[2] == "| a\\|b | n |"
    page = to_html("<i>", [Section("s & t", tables=[table])])
    assert "<script>" not in page and "&lt;script&gt;" in page and "s &amp; t" in page


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert script.main([str(tmp_path / "other.json")]) == 2
    assert "other.json" in capsys.readouterr().err
    assert script.main([str(tmp_path)]) == 2


def test_a_phone_shows_the_page(written, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: the page was not opened in a browser")
    page = (written / "index.html").read_text(encoding="utf-8").replace("</body>", PROBE + "</body>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=9000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,844", "--dump-dom", path.as_uri()]
    ran = subprocess.run([browser, *flags], capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'data-probe="([^"]+)"', ran.stdout)
    assert found, ran.stderr[-2000:]
    probe = json.loads(html.unescape(found.group(1)))
    assert probe["wide"] <= 390, "the body scrolls sideways on a phone"
    assert probe["images"] and min(probe["images"]) > 0
    assert "CONSOLE" not in ran.stderr, ran.stderr[-2000:]
