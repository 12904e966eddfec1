"""LongBench (arXiv 2308.14508): 16 English tasks, or the 13 of LongBench-E by length class.

Protocol of the official script: prompt texts and answer lengths as published, over-long prompts cut in the middle
before the chat template is applied, no chat template on trec, triviaqa, samsum, lcc and repobench-p, greedy decoding,
samsum also stops at a line end, trec, triviaqa and samsum are scored on their first line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kvcore.backbone import Backbone
from kvcore.bench.aggregate import mean_of_tasks
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.longbench.data import records, split_prompt, task_configs
from kvcore.bench.longbench.scoring import length_bucket, score
from kvcore.bench.scoring import EDIT_BACKENDS, EditBackend, strip_thinking
from kvcore.bench.truncation import cut_middle, prompt_room
from kvcore.log import get_logger
from kvcore.method import did_you_mean

log = get_logger(__name__)


@register_bench
@dataclass(frozen=True, kw_only=True)
class LongBench(GenerationBenchmark):
    """Options of LongBench.

    Attributes:
        tasks: task names; empty means all (of LongBench-E with `extended`).
        extended: LongBench-E: its own records, scores per length class (0-4k, 4-8k, 8k+ words).
        max_prompt_tokens: tokens kept of an over-long prompt; None means the model's length less answer and template
            (the official table gives e.g. 3500 for a 4K and 31500 for a 32K model).
        edit_similarity: `difflib` as the official requirements install fuzzywuzzy, `indel` as with python-Levenshtein.
    """

    name: ClassVar[str] = "longbench"
    metrics: ClassVar[dict[str, bool]] = {
        metric: True
        for metric in ("f1", "rouge_l", "classification", "count", "retrieval", "edit_similarity", "average")
    }

    tasks: tuple[str, ...] = ()
    extended: bool = False
    max_prompt_tokens: int | None = None
    edit_similarity: str = "difflib"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name, config in task_configs().items() if config["extended"] or not self.extended]
        object.__setattr__(self, "tasks", tuple(self.tasks) or tuple(known))
        for task in self.tasks:
            if task not in known:
                raise ValueError(f"bench.longbench.tasks has no '{task}'. {did_you_mean(task, known)}")
        if self.edit_similarity not in EDIT_BACKENDS:
            raise ValueError(
                f"bench.longbench.edit_similarity must be one of {', '.join(EDIT_BACKENDS)}; "
                f"received {self.edit_similarity!r}"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 2:
            raise ValueError(f"bench.longbench.max_prompt_tokens must be >= 2; received {self.max_prompt_tokens}")

    def check(self) -> None:
        for task in self.tasks:
            records(task, self.extended, self.data_dir)

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        samples = []
        for task in self.tasks:
            found = records(task, self.extended, self.data_dir)[: self.limit]
            made = [self._sample(backbone, task, record, index) for index, record in enumerate(found)]
            cut = sum(sample.truncated for sample in made)
            if cut:
                log.info("bench longbench, task %s: %d of %d prompts were cut in the middle", task, cut, len(made))
            samples += made
        return samples

    def _sample(self, backbone: Backbone, task: str, record: dict[str, Any], index: int) -> Sample:
        config = task_configs()[task]
        answer_tokens, chat = config["max_new_tokens"], config["chat"]
        room = prompt_room(backbone, answer_tokens, chat)
        cut = cut_middle(backbone.tokenizer, *split_prompt(task, record), min(room, self.max_prompt_tokens or room))
        name = f"{task}_e {length_bucket(record['length'])}" if self.extended else task
        newline = backbone.tokenizer.encode("\n", add_special_tokens=False)[-1]
        return Sample(
            id=f"{task}-{record.get('_id', index)}",
            task=name,
            context=cut.context,
            question=cut.question,
            references=tuple(record["answers"]),
            max_new_tokens=answer_tokens,
            min_new_tokens=1 if task == "samsum" else 0,
            chat=chat,
            extra_eos_ids=(newline,) if task == "samsum" else (),
            context_length=self.max_prompt_tokens or backbone.spec.max_positions,
            truncated=cut.truncated,
            meta={
                "metric": config["metric"],
                "first_line": config["first_line"],
                "all_classes": list(record["all_classes"] or ()),
            },
        )

    def summarise(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The plain mean of the tasks, as LongBench reports it."""
        return mean_of_tasks(rows, "average", self.seed)

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        value = score(
            sample.meta["metric"],
            strip_thinking(prediction),
            sample.references,
            sample.meta["all_classes"],
            sample.meta["first_line"],
            cast(EditBackend, self.edit_similarity),
        )
        return {sample.meta["metric"]: 100 * value}
