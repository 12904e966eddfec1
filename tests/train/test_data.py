"""The training stream: resume (I1), processes and workers, skipped documents, mixtures, bad files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kvcore.tiny import byte_tokenizer
from sekv.data import Sample, StreamState, TokenStream, sample_loader
from sekv.documents import DataError, LocalDocuments, MixedDocuments
from sekv.hub_documents import HubDocuments
from sekv.schedule import Curriculum
from sekv.train_config import DataConfig

LENGTH = 40


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "meta": {"n": i}}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [f"doc{i:02d} " + "abcdefghij" * (1 if i % 4 == 0 else 6 + i) for i in range(9)]
    write_jsonl(tmp_path / "a.jsonl", texts[:5])
    write_jsonl(tmp_path / "b.jsonl", texts[5:])
    return tmp_path


def stream_of(source: object, lengths: tuple[int, ...] = (LENGTH,), steps: int = 1000) -> TokenStream:
    return TokenStream(source, byte_tokenizer(), Curriculum(lengths, steps, 2), windows_per_document=3, seed=7)  # type: ignore[arg-type]


def take(samples: object, count: int) -> list[Sample]:
    return list(itertools.islice(samples, count))  # type: ignore[call-overload]


def names(samples: list[Sample]) -> list[tuple[int, str]]:
    return [(sample.index, sample.name) for sample in samples]


def sources(corpus: Path) -> dict[str, object]:
    hub = {"path": "json", "data_files": [str(corpus / "a.jsonl"), str(corpus / "b.jsonl")], "shuffle_buffer": 4}
    return {
        "local": LocalDocuments(str(corpus), seed=3),
        "hub": HubDocuments(name="hub", seed=3, **hub),  # type: ignore[arg-type]
        "mixed": MixedDocuments(
            [LocalDocuments(str(corpus / "a.jsonl")), LocalDocuments(str(corpus / "b.jsonl"))], [0.7, 0.3], seed=1
        ),
    }


@pytest.mark.parametrize("kind", ["local", "hub", "mixed"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_second_resume_continues_where_the_first_stopped(corpus: Path, kind: str, workers: int) -> None:
    if workers and kind == "mixed":
        pytest.skip("workers are covered with the local and the streamed source")
    stream = stream_of(sources(corpus)[kind])
    whole = take(stream.samples(StreamState()), 14)
    state, start, resumed = StreamState(), 0, []
    for stop in (5, 9, 14):
        part = take(sample_loader(stream, state, start, workers=workers), stop - start)
        resumed += part
        state, start = part[-1].state, stop
    assert names(resumed) == names(whole)
    assert all(bool((a.ids == b.ids).all()) for a, b in zip(resumed, whole, strict=True))


def test_resume_at_every_sample_across_curriculum_and_epochs(corpus: Path) -> None:
    stream = stream_of(LocalDocuments(str(corpus), seed=1), lengths=(30, 40, 55), steps=9)
    whole = take(stream.samples(StreamState()), 40)
    assert {len(sample.ids) for sample in whole} == {30, 40, 55}
    for sample in whole[:-3]:
        again = take(stream.samples(sample.state), 3)
        assert names(again) == names(whole[sample.index + 1 : sample.index + 4])


@pytest.mark.parametrize("world", [2, 3])
def test_processes_divide_the_samples(corpus: Path, world: int) -> None:
    stream = stream_of(LocalDocuments(str(corpus)))
    whole = take(stream.samples(StreamState()), 12)
    parts = [
        names(take(sample_loader(stream, StreamState(), 0, rank, world, workers=rank % 2), 12 // world))
        for rank in range(world)
    ]
    assert sorted(itertools.chain(*parts)) == names(whole)


def test_short_documents_are_skipped_and_counted(corpus: Path) -> None:
    stream = stream_of(LocalDocuments(str(corpus)), lengths=(60,))
    samples = take(stream.samples(StreamState()), 30)
    assert not any(name.startswith(f"a.jsonl:{0}#") for _, name in names(samples))
    assert samples[-1].state.skipped >= 3
    assert samples[-1].state.tokens == 30 * 60


def test_no_document_long_enough_is_an_error(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"none of 9 documents holds a sequence of 5000 tokens .the longest holds \d+"):
        take(stream_of(LocalDocuments(str(corpus)), lengths=(5000,)).samples(StreamState()), 1)


def test_training_and_heldout_documents_are_disjoint(corpus: Path) -> None:
    config = DataConfig(kind="local", path=str(corpus), heldout_every=3)
    train = {doc.name for doc in take(config.source(0, False).stream(0), 30)}  # type: ignore[attr-defined]
    heldout = {doc.name for doc in take(config.source(0, True).stream(0), 30)}  # type: ignore[attr-defined]
    assert len(train) == 6
    assert len(heldout) == 3
    assert not train & heldout


def test_hub_heldout_is_the_head(corpus: Path) -> None:
    def texts(part: str) -> set[str]:
        files = [str(corpus / "a.jsonl")]
        hub = HubDocuments(name="x", path="json", data_files=files, part=part, heldout_documents=2)
        return {doc.text for doc in take(hub.stream(0), 9)}  # type: ignore[attr-defined]

    assert len(texts("heldout")) == 2
    assert len(texts("train")) == 3
    assert not texts("heldout") & texts("train")


def test_parquet_and_txt_are_read_like_jsonl(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"text {i} " * 20 for i in range(5)]
    pq.write_table(pa.table({"text": texts, "meta": ["{}"] * 5}), tmp_path / "p.parquet", row_group_size=2)
    (tmp_path / "q.txt").write_text("plain " * 30)
    found = {doc.text for doc in take(LocalDocuments(str(tmp_path)).stream(0), 6)}
    assert found == {*texts, "plain " * 30}


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"body": "x"}\n', "no text in field 'text'.*body"), ("{broken\n", "is not JSON"), ("", "holds 0 documents")],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        take(LocalDocuments(str(tmp_path / "bad.jsonl")).stream(0), 1)


def test_missing_path_names_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"matches no file.*jsonl"):
        LocalDocuments(str(tmp_path / "nothing" / "*.jsonl"))


def test_unreachable_list_of_files_is_explained(tmp_path: Path) -> None:
    hub = HubDocuments(name="arxiv", path="json", url_list=str(tmp_path / "urls.txt"))
    with pytest.raises(DataError, match=r"'arxiv'.*urls.txt cannot be read.*data=local"):
        next(hub.stream(0))
