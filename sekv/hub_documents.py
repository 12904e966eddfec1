"""Training documents from the hub, or from files behind URLs, by streaming `datasets`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcore.text import LAYOUT
from sekv.documents import DataError, Document, DocumentSource

OFFLINE = f"Without a network use local files: data=local data.path=...; {LAYOUT}"


@dataclass
class HubDocuments(DocumentSource):
    """A dataset of the hub, or files behind URLs, by streaming `datasets`.

    Attributes:
        name: of the subset, for messages.
        path: hub id, or the name of a `datasets` builder (`json`, `parquet`, `text`) together with files.
        config_name, split, revision: as in `datasets.load_dataset`; pin `revision` for reproducible runs.
        data_files: files or URLs of a builder.
        url_list: a URL or file with one line per data file, instead of `data_files`.
        url_filter: only lines of `url_list` holding this text.
        url_format: how a line becomes a URL; `{line}` stands for it.
        text_field: name of the text column.
        shuffle_buffer: documents in the shuffle buffer; 0 keeps the order.
        seed: of the shuffle, together with the epoch.
        part: `train` leaves out the first `heldout_documents`, `heldout` takes only those, `all` takes every one.
        heldout_documents: documents at the head of the data set that are held out.
    """

    name: str
    path: str
    config_name: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: list[str] | None = None
    url_list: str | None = None
    url_filter: str = ""
    url_format: str = "{line}"
    text_field: str = "text"
    shuffle_buffer: int = 1000
    seed: int = 0
    part: str = "all"
    heldout_documents: int = 0

    def stream(self, start: int) -> Iterator[Document]:
        return itertools.islice(self._endless(), start, None)

    def _endless(self) -> Iterator[Document]:
        dataset = self._load()
        if self.part != "all":
            dataset = (dataset.skip if self.part == "train" else dataset.take)(self.heldout_documents)
        for epoch in itertools.count():
            shuffled = dataset
            if self.shuffle_buffer:
                shuffled = dataset.shuffle(seed=self.seed + epoch, buffer_size=self.shuffle_buffer)
            count = 0
            # `iter` with a batch size, because plain iteration gives every loader worker other shards: here each
            # worker walks the whole stream and takes its turns
            for count, record in enumerate(shuffled.iter(batch_size=1), start=1):
                if self.text_field not in record:
                    raise DataError(
                        f"data source '{self.name}' ({self.path}) has no column '{self.text_field}'; its columns: "
                        f"{', '.join(record)}. Set text_field"
                    )
                yield Document(record[self.text_field][0], f"{self.name}:{epoch}:{count - 1}")
            if not count:
                raise DataError(f"data source '{self.name}' ({self.path}, split {self.split}) holds no documents")

    def _load(self) -> Any:
        from datasets import load_dataset

        files = self.data_files or (self._listed_files() if self.url_list else None)
        try:
            return load_dataset(
                self.path,
                self.config_name,
                data_files=files,
                split=self.split,
                revision=self.revision,
                streaming=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"data source '{self.name}' ({self.path}) cannot be opened: {error}. {OFFLINE}") from error

    def _listed_files(self) -> list[str]:
        import fsspec

        assert self.url_list is not None
        try:
            with fsspec.open(self.url_list, "rt") as handle:
                lines = [line.strip() for line in handle if self.url_filter in line and line.strip()]
        except Exception as error:  # fsspec passes on whatever its transport raises
            raise DataError(
                f"data source '{self.name}': the list of files {self.url_list} cannot be read: {error!r}. {OFFLINE}"
            ) from error
        if not lines:
            raise DataError(f"data source '{self.name}': no line of {self.url_list} holds {self.url_filter!r}")
        return [self.url_format.format(line=line) for line in lines]
