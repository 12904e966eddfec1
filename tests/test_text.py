"""Documents: embedded ones on any machine, local files in every layout, errors that name the path and the layout."""

import json
from pathlib import Path

import pytest

from kvcore.text import Document, embedded_documents, haystack_text, load_documents, token_windows
from kvcore.tiny import byte_tokenizer

LAYOUT = r"expected: \*\.jsonl or \*\.parquet"


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_embedded_documents_are_long_and_of_several_domains():
    documents = embedded_documents()
    assert {document.domain for document in documents} == {"book", "docs", "code"}
    assert len({document.id for document in documents}) == len(documents) > 20
    assert min(len(document.text) for document in documents) >= 25_000
    assert len({document.domain for document in documents[:3]}) == 3
    assert haystack_text().lstrip().startswith("In the beginning")


def test_jsonl_records_keep_their_domain(tmp_path):
    records = [{"text": "one", "meta": {"domain": "arxiv"}}, {"text": "two", "meta": {"source": "x"}}]
    path = write_jsonl(tmp_path / "part.jsonl", records)
    assert load_documents(str(path)) == [
        Document("part-0", "arxiv", "one"),
        Document("part-1", "part", "two"),
    ]


def test_parquet_and_text_files_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "from parquet"}]).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "b.txt").write_text("from text")
    assert [document.text for document in load_documents(str(tmp_path))] == ["from parquet", "from text"]


def test_a_file_a_folder_and_a_glob_name_the_same_records(tmp_path):
    (tmp_path / "deep").mkdir()
    path = write_jsonl(tmp_path / "deep" / "x_heldout.jsonl", [{"text": "t"}])
    found = [load_documents(str(where)) for where in (path, tmp_path, tmp_path / "deep" / "*_heldout.jsonl")]
    assert found[0] == found[1] == found[2] != []


@pytest.mark.parametrize("name", ["missing.jsonl", "missing_folder/", "*.jsonl", "empty"])
def test_l3_nothing_at_the_path_names_the_path_and_the_layout(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"no data at data_dir='{tmp_path}/.*{LAYOUT}"):
        load_documents(str(tmp_path / name))


@pytest.mark.parametrize(
    "content", ["not json at all\n", '{"text": "a"}\n{"text": \n', '{"body": "a"}\n', '{"text": 3}\n', "\x00\x01\x02"]
)
def test_l3_an_unreadable_file_names_the_path_and_the_layout(tmp_path, content):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.jsonl(?s:.*){LAYOUT}"):
        load_documents(str(tmp_path))


def test_a_parquet_file_that_is_none_names_the_path(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=rf"bad\.parquet cannot be read as parquet(?s:.*){LAYOUT}"):
        load_documents(str(tmp_path))


def test_windows_have_the_length_and_take_domains_in_turn():
    tokenizer = byte_tokenizer()
    documents = [Document(f"{domain}{i}", domain, f"{domain}{i} " * 60) for domain in "ab" for i in range(3)]
    windows = token_windows(documents, tokenizer, 50, 5, seed=0)
    assert [window.domain for window in windows] == ["a", "b", "a", "b", "a"]
    assert all(len(window.token_ids) == 50 for window in windows)
    texts = {document.id: document.text for document in documents}
    assert all(tokenizer.decode(window.token_ids) in texts[window.id.split("@")[0]] for window in windows)


def test_short_documents_are_passed_over_and_too_few_are_an_error():
    tokenizer = byte_tokenizer()
    documents = [Document("short", "a", "x" * 10), Document("long", "a", "y" * 100)]
    assert {window.id.split("@")[0] for window in token_windows(documents, tokenizer, 50, 3, 0)} == {"long"}
    with pytest.raises(ValueError, match="no document among 2 holds 500 tokens; shorten the context"):
        token_windows(documents, tokenizer, 500, 1, 0)


def test_windows_of_one_seed_are_the_same_and_unique_by_id():
    documents = [Document("long", "a", "some words " * 500)]
    windows = token_windows(documents, byte_tokenizer(), 64, 6, seed=5)
    assert windows == token_windows(documents, byte_tokenizer(), 64, 6, seed=5)
    assert len({window.id for window in windows}) == 6
