"""Prompts: one BOS at most, and context + question ids equal to those of the one-string prompt.

The whole prompt is rendered and tokenised once; the context's share is the longest prefix of tokens that lies inside
the context's characters, so cutting it off changes no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_MARK = "\u2063\u2064context-ends-here\u2064\u2063"


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, cut where the context ends.

    Attributes:
        context_ids: compressed before the question is seen.
        question_ids: read afterwards; at least one token, so that the first answer token has logits to come from.
    """

    context_ids: list[int]
    question_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.context_ids + self.question_ids


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    question: str,
    *,
    chat: bool,
    answer_prefix: str = "",
    system: str | None = None,
    enable_thinking: bool = False,
) -> Prompt:
    """Render and tokenise a prompt.

    Args:
        tokenizer: a fast tokenizer of the evaluated model.
        context, question: together the user's message; the cut lies between them.
        chat: through the model's chat template, answer prefix after the assistant header; else plain text.
        answer_prefix: text the answer starts with.
        system: system message for the chat template.
        enable_thinking: for models whose template can think (Qwen3).

    Raises:
        ValueError: an empty prompt, or `chat` with a tokenizer that has no chat template.
    """
    if not (context + question + answer_prefix):
        raise ValueError("the prompt is empty: give a context or a question")
    if chat:
        head, tail = _rendered(tokenizer, context, question, system, enable_thinking)
    else:
        head, tail = context, question
    text = head + tail + answer_prefix
    encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    ids, offsets = _single_bos(tokenizer, ids, offsets)
    cut = sum(1 for _ in _prefix(offsets, len(head)))
    cut = min(cut, len(ids) - 1)
    return Prompt(ids[:cut], ids[cut:])


def _prefix(offsets: list[tuple[int, int]], characters: int) -> Any:
    """The leading tokens that end within the first `characters` characters."""
    for start, stop in offsets:
        if stop > characters or (start >= characters and stop > start):
            return
        yield (start, stop)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str, system: str | None, enable_thinking: bool
) -> tuple[str, str]:
    """The chat template's text before and after the end of the context."""
    if not tokenizer.chat_template:
        raise ValueError(
            "this tokenizer has no chat template; use an instruct model, or backbone.instruct=false for plain prompts"
        )
    before = [] if system is None else [{"role": "system", "content": system}]

    def render(content: str) -> str:
        text = tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        assert isinstance(text, str)
        return text

    # the mark finds the cut; blanks that a template trims off the whole message would survive beside it
    text = render(context + question)
    head = render(context + _MARK + question).partition(_MARK)[0]
    cut = next(
        (index for index, (a, b) in enumerate(zip(text, head, strict=False)) if a != b), min(len(text), len(head))
    )
    return text[:cut], text[cut:]


def _single_bos(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], offsets: list[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Drop every BOS but the first, which must stand at index 0 if there is one."""
    bos = tokenizer.bos_token_id
    leading = 0
    while leading + 1 < len(ids) and ids[leading] == bos and ids[leading + 1] == bos:
        leading += 1
    return ids[leading:], offsets[leading:]
