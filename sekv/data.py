"""The training stream: documents -> token windows -> samples, resumed exactly.

A sample is a window of consecutive tokens of one document. Every sample has a global index; process r of R takes the
indices r, r + R, ..., so the data of a step does not depend on the number of processes or loader workers.
Legend: N tokens of a sample (context and queries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from sekv.documents import DataError, Document, DocumentSource

# Characters tokenised per token wanted: text has 2 to 5 characters a token; longer documents are cut to a random part.
CHARS_PER_TOKEN = 8
# Documents in a row that may be too short before the stream gives up, when the length of an epoch is unknown.
MAX_SHORT_DOCUMENTS = 20_000


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands.

    Attributes:
        index: global index of the next sample.
        documents: position of the current document in its source.
        window: next window of that document.
        skipped: documents skipped so far because they were shorter than the sequence.
        tokens: tokens handed out so far.
    """

    index: int = 0
    documents: int = 0
    window: int = 0
    skipped: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """One window.

    Attributes:
        ids: int64 [N].
        name: document and first token, unique within an epoch.
        index: global index.
        state: of the stream after this sample.
    """

    ids: Tensor
    name: str
    index: int
    state: StreamState


@dataclass
class TokenStream:
    """Samples of a document source, from any state on.

    Attributes:
        source: the documents.
        tokenizer: of the backbone.
        length_of: tokens N of the sample with a given global index (the curriculum).
        windows_per_document: most windows taken from one document in an epoch, at random places.
        seed: of those places.
    """

    source: DocumentSource
    tokenizer: PreTrainedTokenizerBase
    length_of: Callable[[int], int]
    windows_per_document: int = 4
    seed: int = 0

    def samples(self, state: StreamState) -> Iterator[Sample]:
        """Samples from `state` on, without end.

        Raises:
            DataError: no document is as long as the sequence.
        """
        bos = _bos_id(self.tokenizer)
        in_a_row = longest = 0
        limit = self.source.epoch_length() or MAX_SHORT_DOCUMENTS
        for document in self.source.stream(state.documents):
            windows, tokens = self._windows(document, self.length_of(state.index), state.documents)
            if not windows and state.window == 0:
                in_a_row, longest = in_a_row + 1, max(longest, tokens)
                state = replace(state, skipped=state.skipped + 1)
                if in_a_row >= limit:
                    raise DataError(
                        f"none of {in_a_row} documents holds a sequence of {self.length_of(state.index)} tokens (the "
                        f"longest holds {longest}). Lower train.sequence or give longer documents"
                    )
            for first, ids in windows[state.window :]:
                in_a_row = 0
                index = state.index
                state = replace(state, index=index + 1, window=state.window + 1, tokens=state.tokens + len(ids))
                grows = self.length_of(index + 1) != len(ids)
                if grows:  # the rest of this document was cut for the old length
                    state = replace(state, documents=state.documents + 1, window=0)
                yield Sample(_with_bos(ids, bos), f"{document.name}#{first}", index, state)
                if grows:
                    break
            else:
                state = replace(state, documents=state.documents + 1, window=0)

    def _windows(self, document: Document, length: int, position: int) -> tuple[list[tuple[int, Tensor]], int]:
        """(first token, ids [N]) of the windows of a document, and the number of tokens it was found to hold."""
        generator = np.random.default_rng([self.seed, position])
        text = document.text
        limit = CHARS_PER_TOKEN * length * self.windows_per_document
        if len(text) > limit:
            first_char = int(generator.integers(len(text) - limit))
            text = text[first_char : first_char + limit]
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        slots = len(ids) // length
        chosen = np.sort(generator.permutation(slots)[: self.windows_per_document])
        phase = int(generator.integers(len(ids) - slots * length + 1)) if slots else 0
        starts = [phase + int(slot) * length for slot in chosen]
        return [(start, torch.tensor(ids[start : start + length])) for start in starts], len(ids)


class _Share(IterableDataset[Sample]):
    """The samples of one process, divided among its loader workers in turn."""

    def __init__(self, stream: TokenStream, state: StreamState, rank: int, world: int, start: int) -> None:
        self.stream, self.state, self.rank, self.world, self.start = stream, state, rank, world, start

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for sample in self.stream.samples(self.state):
            turn = sample.index - self.start
            if turn >= 0 and turn % self.world == self.rank and turn // self.world % workers == number:
                yield sample


def sample_loader(
    stream: TokenStream, state: StreamState, start: int, rank: int = 0, world: int = 1, workers: int = 0
) -> Iterator[Sample]:
    """The samples of one process.

    Args:
        stream: the stream all processes share.
        state: where to begin; its index may lie before `start`.
        start: global index of the first sample of the run or resumed run (a multiple of the effective batch).
        rank, world: this process and the number of processes.
        workers: loader processes that tokenise ahead; 0 tokenises here.
    """
    loader: DataLoader[Any] = DataLoader(
        _Share(stream, state, rank, world, start), batch_size=None, num_workers=workers, collate_fn=_unchanged
    )
    return iter(loader)


def _unchanged(sample: Any) -> Any:
    return sample


def _with_bos(ids: Tensor, bos: int | None) -> Tensor:
    return ids if bos is None else torch.cat([torch.tensor([bos]), ids[:-1]])


def _bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that the tokenizer itself puts first, if it does: models that expect it use it as attention sink."""
    ids = tokenizer("a")["input_ids"]
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None
