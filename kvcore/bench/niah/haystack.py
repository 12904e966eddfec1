"""Haystacks and needles: a context of an exact token length with a needle at a given depth.

Length is counted with the evaluated model's tokenizer. The needle stands whole, on a sentence border.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvcore.text import haystack_text, local_documents

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Haystack:
    """A filler text that can be cut to any length; repeated when it is too short."""

    text: str

    @classmethod
    def load(cls, kind: str, data_dir: str | None) -> Haystack:
        """`essay`: the embedded text, or every document of `data_dir`; `noise`: five sentences repeated.

        Raises:
            ValueError: unknown kind.
            FileNotFoundError: nothing readable at `data_dir`.
        """
        if kind == "noise":
            return cls(NOISE * 20)
        if kind != "essay":
            raise ValueError(f"bench.niah.haystacks must hold 'essay' or 'noise'; received {kind!r}")
        if data_dir is None:
            return cls(haystack_text())
        return cls("\n".join(document.text for document in local_documents(data_dir)))

    def cut(self, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
        """The text's beginning, `tokens` tokens long (within one: cutting can merge characters differently)."""
        needed = self.text
        while True:
            # 12 characters a token is more than any text needs: never tokenise a whole library
            ids = tokenizer(needed[: 12 * tokens + 100], add_special_tokens=False).input_ids
            if len(ids) >= tokens:
                return str(tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False))
            needed = needed + "\n" + self.text


def plant(text: str, needle: str, depth: float) -> str:
    """Put the needle on the sentence border nearest to a depth.

    Args:
        text: the haystack.
        needle: the sentence to find.
        depth: 0.0 is the beginning, 1.0 the end.
    """
    target = round(depth * len(text))
    borders = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    where = min(borders, key=lambda border: abs(border - target))
    before, after = text[:where].rstrip(), text[where:].lstrip()
    return (
        "\n".join(part for part in (before, needle, after) if part)
        if "\n" in text
        else (" ".join(part for part in (before, needle, after) if part))
    )
