"""Where an answer ends besides at an EOS id: at a stop string, and after thinking at its own length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from kvcore.bench.scoring import strip_thinking


class RowEnds(StoppingCriteria):
    """Stops the rows of a batch one by one.

    Args:
        prompt_tokens: tokens before the answers, padding included.

    Attributes:
        ends: of each row that was stopped, the tokens of its answer.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.ends: dict[int, int] = {}

    @abstractmethod
    def ended(self, answers: torch.Tensor) -> list[bool]:
        """Whether each of the answers so far [B, tokens] is finished."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answers = input_ids[:, self.prompt_tokens :]
        done = self.ended(answers)
        for row in (row for row, stopped in enumerate(done) if stopped):
            self.ends.setdefault(row, answers.shape[1])
        return torch.tensor(done, device=input_ids.device)


class StopStrings(RowEnds):
    """Stops a row as soon as its answer contains one of the strings; only the newest tokens are decoded.

    Args:
        tokenizer: decodes the answers.
        strings: stop strings.
        prompt_tokens: see `RowEnds`.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_tokens: int) -> None:
        super().__init__(prompt_tokens)
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        # a token is at least one character, two more allow for a string that starts inside a token
        self.window = max(map(len, self.strings)) + 2

    def ended(self, answers: torch.Tensor) -> list[bool]:
        texts = self.tokenizer.batch_decode(answers[:, -self.window :], skip_special_tokens=True)
        return [any(string in text for string in self.strings) for text in texts]


class EndAfterThinking(RowEnds):
    """Stops a row by what follows its thinking: stop strings and the task's own answer length count there only.

    Args:
        tokenizer: decodes the answers.
        strings: stop strings.
        prompt_tokens: see `RowEnds`.
        max_new_tokens: of the answer without its thinking.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_tokens: int, max_new_tokens: int) -> None:
        super().__init__(prompt_tokens)
        self.tokenizer, self.strings, self.max_new_tokens = tokenizer, tuple(strings), max_new_tokens
        self.thought: dict[int, int] = {}

    def ended(self, answers: torch.Tensor) -> list[bool]:
        done = []
        for row, whole in enumerate(self.tokenizer.batch_decode(answers, skip_special_tokens=True)):
            text = answer_after_thinking(whole)
            if text:
                # the token that made the first character visible belongs to the answer
                self.thought.setdefault(row, answers.shape[1] - 1)
            length = answers.shape[1] - self.thought.get(row, answers.shape[1])
            done.append(length >= self.max_new_tokens or any(string in text for string in self.strings))
        return done


def answer_after_thinking(text: str) -> str:
    """What a thinking model says after its thoughts; nothing while the marks around them are not whole."""
    if "<think>".startswith(text.strip()):
        return ""
    return strip_thinking(text).lstrip("\n")
