"""GSM8K (arXiv 2110.14168) with many solved examples: 50-shot, greedy, exact match of the final number.

All questions share the examples, so they are prefilled and compressed once; every question runs on a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.gsm8k.data import examples_text, prompts, question_text, records
from kvcore.bench.gsm8k.scoring import score
from kvcore.bench.truncation import prompt_room
from kvcore.log import get_logger

log = get_logger(__name__)


@register_bench
@dataclass(frozen=True, kw_only=True)
class GSM8K(GenerationBenchmark):
    """Options of GSM8K.

    Attributes:
        num_shots: solved examples, the first of the training set.
        max_new_tokens: answer length in tokens.
        chat: whether an instruct model gets its chat template (the few-shot form is plain text).
    """

    name: ClassVar[str] = "gsm8k"
    metrics: ClassVar[dict[str, bool]] = {"exact_match": True, "strict_match": True}
    proportions: ClassVar[dict[str, float]] = {"exact_match": 100.0, "strict_match": 100.0}

    num_shots: int = 50
    max_new_tokens: int = 256
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_shots < 0 or self.max_new_tokens < 1:
            raise ValueError(
                "bench.gsm8k.num_shots must be >= 0 and max_new_tokens >= 1; received "
                f"{self.num_shots} and {self.max_new_tokens}"
            )

    def check(self) -> None:
        records("test", self.data_dir)
        if self.num_shots:
            train = records("train", self.data_dir)
            if len(train) < self.num_shots:
                raise ValueError(f"bench.gsm8k.num_shots is {self.num_shots}; the training file holds {len(train)}")

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        tests = records("test", self.data_dir)[: self.limit]
        examples = records("train", self.data_dir)[: self.num_shots] if self.num_shots else []
        fitting = self._fitting(backbone, examples, tests)
        if fitting < len(examples):
            log.warning(
                "bench gsm8k: %d of %d solved examples fit %s's %d tokens beside the longest question and %d new "
                "tokens; the task is named for it",
                fitting, len(examples), backbone.config.name, backbone.spec.max_positions, self.max_new_tokens,
            )  # fmt: skip
        context = examples_text(examples[:fitting])
        length = len(backbone.tokenizer(context, add_special_tokens=False).input_ids)
        return [
            Sample(
                id=f"gsm8k-{index}",
                task=f"gsm8k_{fitting}shot",
                context=context,
                question=question_text(record),
                references=(record["answer"],),
                max_new_tokens=self.max_new_tokens,
                chat=self.chat,
                stop=tuple(prompts()["stop"]),
                context_length=length or None,
                truncated=fitting < len(examples),
                meta={"num_shots": fitting},
            )
            for index, record in enumerate(tests)
        ]

    def _fitting(self, backbone: Backbone, examples: Sequence[dict[str, Any]], tests: Sequence[dict[str, Any]]) -> int:
        """How many examples fit beside the longest question.

        Raises:
            ValueError: the longest question alone is too long.
        """

        def tokens(text: str) -> int:
            return len(backbone.tokenizer(text, add_special_tokens=False).input_ids)

        longest = max(tokens(question_text(record)) for record in tests)
        room = prompt_room(backbone, self.max_new_tokens, self.chat) - longest
        if room < 0:
            raise ValueError(
                f"bench gsm8k: the longest question takes {longest} tokens and {self.max_new_tokens} are to be "
                f"generated; {backbone.config.name} was built for {backbone.spec.max_positions}"
            )
        count = len(examples)
        while count and tokens(examples_text(examples[:count])) > room:
            count -= 1
        return count

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        found = score(prediction, sample.references[0], sample.stop)
        return {name: 100 * value for name, value in found.items()}
