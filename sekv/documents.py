"""Where training documents come from: local files, texts in memory, a weighted mixture of sources.

Every source is an endless sequence of documents that is a pure function of its configuration and seed, so the state of
a stream is one number: how many documents were taken. That makes a resume exact however often it happens, without
relying on the state of the libraries underneath.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.text import LAYOUT, data_files

SUFFIXES = (".jsonl", ".parquet", ".txt")
PARTS = ("all", "train", "heldout")


class DataError(ValueError):
    """Training data that cannot be read, with the file and the layout expected."""


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        text: the document.
        name: where it came from, unique within its source (for sample ids and messages).
    """

    text: str
    name: str


class DocumentSource:
    """An endless, reproducible sequence of documents."""

    @abstractmethod
    def stream(self, start: int) -> Iterator[Document]:
        """Documents from position `start` (0-based, counted over all epochs) on, without end."""

    def epoch_length(self) -> int | None:
        """Documents per epoch, where it is known."""
        return None


@dataclass
class LocalDocuments(DocumentSource):
    """Files on disk, read record by record; a fresh order every epoch.

    Attributes:
        path: a file, a folder (searched recursively) or a glob.
        seed: orders the documents, together with the epoch.
        text_field: name of the text column.
        part: `all`, `train` or `heldout`: which documents.
        heldout_every: one in so many documents is held out.
    """

    path: str
    seed: int = 0
    text_field: str = "text"
    part: str = "all"
    heldout_every: int = 16
    _index: list[tuple[Path, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        records = [(file, key) for file in find_files(self.path) for key in _record_keys(file)]
        self._index = _part_of(records, self.part, self.heldout_every)
        if not self._index:
            raise DataError(f"data.path={self.path!r} holds {len(records)} documents, none for '{self.part}'; {LAYOUT}")

    def epoch_length(self) -> int:
        return len(self._index)

    def stream(self, start: int) -> Iterator[Document]:
        for epoch in itertools.count(start // len(self._index)):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self._index))
            first = start % len(self._index) if epoch == start // len(self._index) else 0
            for position in order[first:]:
                yield self._read(*self._index[position])

    def _read(self, file: Path, key: int) -> Document:
        name = f"{file.name}:{key}"
        if file.suffix == ".txt":
            return Document(file.read_text(encoding="utf-8", errors="replace"), name)
        record = _parquet_record(file, key, self.text_field) if file.suffix == ".parquet" else _json_record(file, key)
        text = record.get(self.text_field)
        if not isinstance(text, str):
            raise DataError(
                f"{name}: no text in field '{self.text_field}' (fields: {', '.join(map(str, record))}); {LAYOUT}"
            )
        return Document(text, name)


@dataclass
class TextDocuments(DocumentSource):
    """Documents held in memory, or made by a function when they are first needed.

    Attributes:
        load: gives the list of (name, text).
        seed: orders the documents, together with the epoch.
        part: `all`, `train` or `heldout`: which documents.
        heldout_every: one in so many documents is held out.
    """

    load: Callable[[], list[tuple[str, str]]]
    seed: int = 0
    part: str = "all"
    heldout_every: int = 16
    _documents: list[tuple[str, str]] | None = field(default=None, init=False, repr=False)

    @property
    def documents(self) -> list[tuple[str, str]]:
        if self._documents is None:
            documents = self.load()
            self._documents = _part_of(documents, self.part, self.heldout_every)
            if not self._documents:
                raise DataError(f"{len(documents)} documents leave none for '{self.part}'; lower data.heldout_every")
        return self._documents

    def epoch_length(self) -> int:
        return len(self.documents)

    def stream(self, start: int) -> Iterator[Document]:
        length = len(self.documents)
        for epoch in itertools.count(start // length):
            order = np.random.default_rng([self.seed, epoch]).permutation(length)
            for position in order[start % length if epoch == start // length else 0 :]:
                name, text = self.documents[position]
                yield Document(text, name)


@dataclass
class MixedDocuments(DocumentSource):
    """Several sources, drawn document by document with fixed weights.

    Attributes:
        sources: the sources.
        weights: share of each, in any unit.
        seed: of the draws.
    """

    sources: list[DocumentSource]
    weights: list[float]
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.sources) or min(self.weights, default=0.0) < 0 or sum(self.weights) <= 0:
            raise DataError(
                f"a mixture needs one weight >= 0 per source and a positive sum; received {len(self.sources)} sources "
                f"and weights {self.weights}"
            )

    def stream(self, start: int) -> Iterator[Document]:
        shares = np.asarray(self.weights, dtype=np.float64) / sum(self.weights)
        draws = np.random.default_rng([self.seed, len(shares)])
        taken = np.bincount(_draw(draws, shares, start), minlength=len(shares))
        streams: dict[int, Iterator[Document]] = {}
        while True:
            (choice,) = _draw(draws, shares, 1)
            if choice not in streams:
                streams[choice] = self.sources[choice].stream(int(taken[choice]))
            yield next(streams[choice])


def _draw(generator: np.random.Generator, shares: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` draws; one uniform number each, so n draws at once equal n single draws."""
    return np.searchsorted(np.cumsum(shares)[:-1], generator.random(count), side="right")


def find_files(path: str) -> list[Path]:
    """The data files behind a file, folder or glob, sorted.

    Raises:
        DataError: nothing there, or a file of another kind.
    """
    try:
        files = data_files(path)
    except FileNotFoundError as error:
        raise DataError(f"data.path={path!r} matches no file; {LAYOUT}") from error
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(f"{file}: unknown kind of file '{file.suffix}'; {LAYOUT}")
    return files


def _part_of(items: list[Any], part: str, heldout_every: int) -> list[Any]:
    """All items, or those (not) held out: every `heldout_every`-th, beginning with the last of the first group."""
    if part == "all":
        return items
    last = heldout_every - 1
    return [item for index, item in enumerate(items) if (index % heldout_every == last) is (part == "heldout")]


def _record_keys(file: Path) -> list[int]:
    """How to find each record again: byte offsets (jsonl), row numbers (parquet), 0 (txt)."""
    if file.suffix == ".txt":
        return [0]
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return list(range(pq.ParquetFile(file).metadata.num_rows))
        with file.open("rb") as handle:
            lengths = [(len(line), bool(line.strip())) for line in handle]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}; {LAYOUT}") from error
    offsets = itertools.accumulate((length for length, _ in lengths), initial=0)
    return [offset for offset, (_, filled) in zip(offsets, lengths, strict=False) if filled]


def _json_record(file: Path, offset: int) -> dict[str, Any]:
    with file.open("rb") as handle:
        handle.seek(offset)
        line = handle.readline()
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{file}: the line at byte {offset} is not JSON ({error}); {LAYOUT}") from error
    if not isinstance(record, dict):
        raise DataError(f"{file}: the line at byte {offset} is not a JSON object; {LAYOUT}")
    return record


def _parquet_record(file: Path, row: int, column: str) -> dict[str, Any]:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    if column not in parquet.schema_arrow.names:
        return dict.fromkeys(parquet.schema_arrow.names)
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if row < rows:
            return {column: parquet.read_row_group(group, columns=[column]).column(0)[row].as_py()}
        row -= rows
    raise AssertionError("row numbers come from the file's own metadata")
