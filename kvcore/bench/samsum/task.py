"""SAMSum (arXiv 1911.12237): dialogue summaries after many solved examples, ROUGE-L by rouge-score.

The prompt is the one of LongBench's samsum task, filled with examples up to a context length. All test dialogues share
the examples, so they are prefilled and compressed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.samsum.data import dialogue_text, example_text, examples_text, prompts, records
from kvcore.bench.scoring import first_line, rouge_f, strip_thinking
from kvcore.bench.truncation import prompt_room
from kvcore.log import get_logger

log = get_logger(__name__)


@register_bench
@dataclass(frozen=True, kw_only=True)
class SAMSum(GenerationBenchmark):
    """Options of SAMSum.

    Attributes:
        context: tokens that the solved examples may take.
        max_new_tokens: summary length in tokens.
        stem: Porter stemming in ROUGE, as summarisation papers report it.
        chat: whether an instruct model gets its chat template (the few-shot form is plain text).
    """

    name: ClassVar[str] = "samsum"
    metrics: ClassVar[dict[str, bool]] = {"rouge_l": True}

    context: int = 4096
    max_new_tokens: int = 128
    stem: bool = True
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context < 1 or self.max_new_tokens < 1:
            raise ValueError(
                "bench.samsum.context and max_new_tokens must be >= 1 token; received "
                f"{self.context} and {self.max_new_tokens}"
            )

    def check(self) -> None:
        records("test", self.data_dir)
        records("train", self.data_dir)

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        tests = records("test", self.data_dir)[: self.limit]
        longest = max(self._tokens(backbone, dialogue_text(record)) for record in tests)
        room = prompt_room(backbone, self.max_new_tokens, self.chat) - longest
        if self.context > room:
            raise ValueError(
                f"bench.samsum.context is {self.context} tokens; {backbone.config.name} has room for {max(room, 0)} "
                f"beside the longest dialogue ({longest}) and {self.max_new_tokens} new tokens. Lower "
                "bench.samsum.context"
            )
        examples = self._examples(backbone)
        log.info("bench samsum: %d solved examples in %d tokens", len(examples), self.context)
        context = examples_text(examples)
        return [
            Sample(
                id=str(record.get("id", index)),
                task=f"samsum_{len(examples)}shot",
                context=context,
                question=dialogue_text(record),
                references=(record["summary"],),
                max_new_tokens=self.max_new_tokens,
                min_new_tokens=1,
                chat=self.chat,
                stop=tuple(prompts()["stop"]),
                context_length=self.context,
                meta={"num_shots": len(examples)},
            )
            for index, record in enumerate(tests)
        ]

    def _tokens(self, backbone: Backbone, text: str) -> int:
        return len(backbone.tokenizer(text, add_special_tokens=False).input_ids)

    def _examples(self, backbone: Backbone) -> list[dict[str, Any]]:
        """The first training examples that fill the context."""
        used, examples = self._tokens(backbone, prompts()["header"]), []
        for record in records("train", self.data_dir):
            used += self._tokens(backbone, example_text(record))
            if used > self.context:
                break
            examples.append(record)
        return examples

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        # a model may start with a blank before the line end that stops it
        text = first_line(strip_thinking(prediction).strip())
        return {"rouge_l": 100 * rouge_f(text, sample.references[0], "rougeL", self.stem)}
