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
PHONE = 390
# the page in a frame as wide as a phone; the outer page asks it, since only the frame has a phone's width
FRAME = """<!doctype html><body><iframe style="width:{width}px;height:844px;border:0" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{ const page = document.querySelector("iframe").contentDocument;
document.body.dataset.probe = JSON.stringify({{ inside: page.documentElement.clientWidth,
wide: page.documentElement.scrollWidth, images: [...page.images].map((i) => i.naturalWidth),
small: [...page.images].filter((i) => i.clientWidth < 300).length,
cut: [...page.querySelectorAll("td:first-child")].filter((c) => c.clientWidth > 150).length }}); }});</script></body>"""


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


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(path, folder) -> tuple[dict, list[str]]:
    """What the page says about itself at a phone's width, and the lines that it wrote to the console."""
    page = html.escape(path.read_text(encoding="utf-8"), quote=True)
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=PHONE, page=page), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    flags += [
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--virtual-time-budget=9000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [str(BROWSER), *flags, "--dump-dom", frame.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'data-probe="([^"]+)"', ran.stdout)
    assert found, ran.stderr[-2000:]
    return json.loads(html.unescape(found.group(1))), [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page was not opened in a browser")
def test_a_phone_shows_the_page(written, tmp_path):
    probe, console = opened(written / "index.html", tmp_path)
    assert probe["inside"] == PHONE
    assert probe["wide"] <= PHONE, "the page scrolls sideways on a phone"
    assert len(probe["images"]) == len(list(written.glob("*.png"))) and min(probe["images"]) > 0
    assert probe["small"] == 0, "pictures too small to read"
    assert probe["cut"] == 0, "pinned names that leave no room for numbers"
    assert not console


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page was not opened in a browser")
def test_a_page_that_is_broken_is_seen_to_be(written, tmp_path):
    text = (written / "index.html").read_text(encoding="utf-8")
    text = text.replace("base64,", "base64,AAAA", 1).replace("</body>", '<div style="width:999px">x</div></body>')
    broken = tmp_path / "index.html"
    broken.write_text(text.replace("</body>", "<script>console.error('seen')</script></body>"), encoding="utf-8")
    probe, console = opened(broken, tmp_path)
    assert probe["wide"] > PHONE and min(probe["images"]) == 0
    assert any("seen" in line for line in console)
