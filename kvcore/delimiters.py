"""Where a text may be cut: token ids that end a clause or a sentence, read from the model's own tokenizer.

Used by methods that compress along the text (SemantiCache, SentenceKV). Legend: n tokens of one row.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from kvcore.log import get_logger

log = get_logger(__name__)
SENTENCE_END = ".!?\n\u3002\uff01\uff1f"  # Latin and full-width marks
CLAUSE_END = SENTENCE_END + ",;:\uff0c\uff1b\uff1a"


def delimiter_token_ids(model: PreTrainedModel, characters: str) -> tuple[int, ...]:
    """Ids of the tokens whose text ends with one of `characters` (spaces after it ignored), sorted.

    The tokenizer is the one beside the model's weights. A model without one (random weights of a test) has no
    delimiters: the methods then cut at their largest chunk length, and a warning says so once.
    """
    source = str(model.config._name_or_path)
    found = _ids_from(source, characters, model.config.vocab_size) if source else None
    if found is None:
        _warn_once(source)
        return ()
    return found


@functools.lru_cache(maxsize=8)
def _ids_from(source: str, characters: str, vocab_size: int) -> tuple[int, ...] | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=os.path.isdir(source))
    except (OSError, ValueError, KeyError):
        return None
    texts = tokenizer.batch_decode([[index] for index in range(min(len(tokenizer), vocab_size))])
    return tuple(index for index, text in enumerate(texts) if text.rstrip(" \t\r")[-1:] in set(characters))


@functools.lru_cache(maxsize=8)
def _warn_once(source: str) -> None:
    log.warning("no tokenizer beside the model %r: text is cut at the largest chunk length only", source)


def chunk_ids(token_ids: Tensor, delimiters: tuple[int, ...], max_tokens: int) -> Tensor:
    """Number the chunks of a text: a chunk ends with a delimiter, and after `max_tokens` tokens in any case.

    A run of delimiters ("...", blank lines) belongs to the chunk that it ends.

    Args:
        token_ids: [n] of one row, padding left out.
        delimiters: ids after which a chunk ends.
        max_tokens: longest chunk, in tokens.

    Returns:
        [n] int64, from 0, increasing.
    """
    ids = token_ids.cpu()
    ends = torch.isin(ids, torch.tensor(delimiters, dtype=ids.dtype)) if delimiters else torch.zeros_like(ids).bool()
    starts = torch.ones_like(ends)
    starts[1:] = ends[:-1] & ~ends[1:]
    positions = torch.arange(len(ids))
    natural = torch.where(starts, positions, 0).cummax(0).values
    starts |= (positions - natural) % max_tokens == 0
    return starts.long().cumsum(0) - 1
