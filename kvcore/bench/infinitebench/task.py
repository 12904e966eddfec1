"""InfiniteBench (arXiv 2402.13718): its English, code, maths and retrieval tasks, official templates and scorers.

The `yarn_mistral` templates are completions (no chat template, a few new tokens); `gpt4` and `claude2` are messages.
Over-long prompts are cut in the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.aggregate import mean_of_tasks
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.infinitebench.data import TASKS, max_new_tokens, records, split_prompt, template_names
from kvcore.bench.infinitebench.scoring import label_of, score
from kvcore.bench.scoring import strip_thinking
from kvcore.bench.truncation import cut_middle, prompt_room
from kvcore.log import get_logger
from kvcore.method import did_you_mean

log = get_logger(__name__)


@register_bench
@dataclass(frozen=True, kw_only=True)
class InfiniteBench(GenerationBenchmark):
    """Options of InfiniteBench.

    Attributes:
        tasks: task names; empty means all.
        variant: which file of a task, for shorter sets in the same schema (`8192`: passkey_8192.jsonl).
        template: family of official templates.
        chat: whether an instruct model gets its chat template; None means for all families but `yarn_mistral`.
        max_prompt_tokens: tokens kept of an over-long prompt; None means the model's length less answer and template.
        max_answer_tokens: cap on the official answer length (math_calc allows 30,000 tokens); None means no cap.
    """

    name: ClassVar[str] = "infinitebench"
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "f1": True, "rouge_lsum": True, "average": True}
    proportions: ClassVar[dict[str, float]] = {"accuracy": 100.0}

    tasks: tuple[str, ...] = ()
    variant: str | int | None = None
    template: str = "yarn_mistral"
    chat: bool | None = None
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tasks", tuple(self.tasks) or TASKS)
        object.__setattr__(self, "variant", None if self.variant is None else str(self.variant))
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"bench.infinitebench.tasks has no '{task}'. {did_you_mean(task, TASKS)}")
        if self.template not in template_names():
            raise ValueError(
                f"bench.infinitebench.template has no '{self.template}'. "
                f"{did_you_mean(self.template, template_names())}"
            )
        for key, value in (
            ("max_prompt_tokens", self.max_prompt_tokens),
            ("max_answer_tokens", self.max_answer_tokens),
        ):
            if value is not None and value < 2:
                raise ValueError(f"bench.infinitebench.{key} must be >= 2 tokens or null; received {value}")

    def check(self) -> None:
        for task in self.tasks:
            records(task, None if self.variant is None else str(self.variant), self.data_dir)

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        samples = []
        for task in self.tasks:
            found = records(task, None if self.variant is None else str(self.variant), self.data_dir)[: self.limit]
            made = [self._sample(backbone, task, record, index) for index, record in enumerate(found)]
            cut = sum(sample.truncated for sample in made)
            if cut:
                log.info("bench infinitebench, task %s: %d of %d prompts were cut in the middle", task, cut, len(made))
            samples += made
        return samples

    def _sample(self, backbone: Backbone, task: str, record: dict[str, Any], index: int) -> Sample:
        answer_tokens = min(max_new_tokens(task), self.max_answer_tokens or max_new_tokens(task))
        chat = self.template != "yarn_mistral" if self.chat is None else self.chat
        room = prompt_room(backbone, answer_tokens, chat)
        context, question = split_prompt(task, self.template, record)
        cut = cut_middle(backbone.tokenizer, context, question, min(room, self.max_prompt_tokens or room))
        label = label_of(task, record)
        # ids of the official files repeat between variants: the content tells them apart
        digest = hashlib.sha256((context + question).encode()).hexdigest()[:8]
        return Sample(
            id=f"{task}-{index}-{digest}",
            task=task,
            context=cut.context,
            question=cut.question,
            references=tuple(map(str, label)) if isinstance(label, list) else (str(label),),
            max_new_tokens=answer_tokens,
            chat=chat,
            context_length=self.max_prompt_tokens or backbone.spec.max_positions,
            truncated=cut.truncated,
            meta={"label": label},
        )

    def summarise(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The plain mean of the tasks, as InfiniteBench reports it."""
        return mean_of_tasks(rows, "average", self.seed)

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        metric = {"longbook_qa_eng": "f1", "longbook_sum_eng": "rouge_lsum"}.get(sample.task, "accuracy")
        text = strip_thinking(prediction)
        return {metric: 100 * score(sample.task, text, sample.meta["label"], self.template == "gpt4")}
