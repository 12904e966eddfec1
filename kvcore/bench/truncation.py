"""Cut over-long prompts in the middle, as LongBench and InfiniteBench do: half of the tokens from each end."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvcore.backbone import Backbone
from kvcore.chat import build_prompt


@dataclass(frozen=True)
class Cut:
    """A prompt that fits.

    Attributes:
        context: what is compressed.
        question: the rest.
        truncated: whether tokens were removed.
    """

    context: str
    question: str
    truncated: bool


def cut_middle(tokenizer: PreTrainedTokenizerBase, context: str, question: str, max_tokens: int) -> Cut:
    """Keep the first and the last half of `max_tokens` tokens of context + question.

    The halves are decoded and joined as text, so the join may tokenise into more tokens than were kept; the halves are
    then shortened until the text fits. The question stays whole unless it alone is longer than a half.

    Args:
        tokenizer: of the evaluated model.
        context: what is compressed.
        question: what follows it.
        max_tokens: tokens allowed, without special tokens.

    Raises:
        ValueError: fewer than two tokens are allowed.
    """
    if max_tokens < 2:
        raise ValueError(f"a prompt cut in the middle keeps at least 2 tokens; {max_tokens} are allowed")
    ids = tokenizer(context + question, add_special_tokens=False).input_ids
    if len(ids) <= max_tokens:
        return Cut(context, question, truncated=False)
    half = max_tokens // 2
    while True:
        head = str(tokenizer.decode(ids[:half], skip_special_tokens=True))
        tail = str(tokenizer.decode(ids[-half:], skip_special_tokens=True))
        excess = len(tokenizer(head + tail, add_special_tokens=False).input_ids) - max_tokens
        if excess <= 0 or half == 1:
            break
        half = max(1, half - max(1, excess // 2))
    if tail.endswith(question):
        return Cut(head + tail[: len(tail) - len(question)], question, truncated=True)
    return Cut(head, tail, truncated=True)


def prompt_room(backbone: Backbone, max_new_tokens: int, chat: bool, system: str | None = None) -> int:
    """Tokens that context and question may take: the model's length less answer, thinking, BOS and chat template."""
    config = backbone.config
    empty = build_prompt(
        backbone.tokenizer,
        "x",
        "",
        chat=chat and config.instruct,
        system=system,
        enable_thinking=config.enable_thinking,
    )
    return backbone.spec.max_positions - max_new_tokens - backbone.thinking_room(chat) - len(empty.ids)
