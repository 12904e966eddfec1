"""Records load offline from files, folders and globs; what is missing is named with its layout (L3)."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from kvcore.bench.base import build_bench
from kvcore.bench.sources import HubSource, find_file, load_records, read_records, require_fields

RECORDS = [{"question": "1+1?", "answer": "#### 2"}, {"question": "é", "answer": "#### 3"}]
JSONL = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\n\n"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path_factory.mktemp("cache")))


def _write(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text(JSONL, encoding="utf-8")
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(JSONL.encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(RECORDS), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_every_format_from_folder_file_and_glob(tmp_path, suffix):
    path = _write(tmp_path, f"test{suffix}")
    for data_dir in (tmp_path, path, f"{tmp_path}/*{suffix}"):
        assert load_records("gsm8k", ["test"], str(data_dir), None, "layout") == RECORDS


@pytest.mark.parametrize(
    "place", ["vt.jsonl", "vt/validation.jsonl", "vt/test-00000-of-00001.parquet", "data/vt.jsonl"]
)
def test_layouts_of_official_archives(tmp_path, place):
    path = _write((tmp_path / place).parent, (tmp_path / place).name)
    assert find_file(str(tmp_path), ["vt"]) == path


def test_the_data_cache_is_read_without_data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path))
    _write(tmp_path / "data" / "gsm8k", "test.jsonl")
    assert load_records("gsm8k", ["test"], None, None, "layout") == RECORDS


@pytest.mark.parametrize(
    ("bench", "options", "wanted"),
    [
        ("gsm8k", {}, r"test\{.*train.jsonl"),
        ("longbench", {"tasks": ("qasper",)}, r"qasper\{.*TASK.jsonl"),
        ("longbench", {"tasks": ("qasper",), "extended": True}, r"qasper_e\{"),
        ("infinitebench", {"tasks": ("passkey",), "variant": "8192"}, r"passkey_8192\{.*TASK.jsonl"),
        ("humaneval", {"allow_code_execution": True}, r"HumanEval\{.*HumanEval.jsonl.gz"),
        ("samsum", {}, r"test\{.*dialogue"),
        ("ruler", {"tasks": ("qa_1",)}, r"squad.*squad.json"),
        ("ruler", {"tasks": ("vt",), "source": "files"}, r"4096/vt.*LENGTH/TASK.jsonl"),
    ],
)
def test_missing_data_is_named_before_a_model_is_loaded(tmp_path, bench, options, wanted):
    import kvcore.bench.all  # noqa: F401 - registers the benchmarks

    with pytest.raises(FileNotFoundError, match=rf"(?s){wanted}") as error:
        build_bench(bench, data_dir=str(tmp_path / "nowhere"), **options).check()
    assert "nowhere" in str(error.value)
    assert "fetch_data.py" in str(error.value)


def test_the_hub_out_of_reach_is_one_clear_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    hub = HubSource(repo="openai/gsm8k", licence="MIT", file="main/test.parquet")
    with pytest.raises(FileNotFoundError, match=r"openai/gsm8k.*couldn't connect.*data_dir="):
        load_records("gsm8k", ["test"], None, hub, "layout")


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"a": 1}\n{"a"', r"line 2 is not JSON"), ("[1]\n", r"line 1 holds a list")],
)
def test_broken_lines_are_named(tmp_path, content, message):
    path = tmp_path / "test.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_records(path)


def test_broken_files_and_schemas_are_named(tmp_path):
    (tmp_path / "test.parquet").write_bytes(b"PAR0")
    with pytest.raises(ValueError, match=r"test\.parquet cannot be read"):
        read_records(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"lacks 'answer'.*received question"):
        require_fields([{"question": "x"}], ("question", "answer"), "here")
    with pytest.raises(ValueError, match="no records"):
        require_fields([], ("question",), "here")
