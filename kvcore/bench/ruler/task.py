"""RULER (arXiv 2404.06654): 13 synthetic tasks at any context length.

Prompts are generated on the spot in the official wording, at lengths counted with the evaluated model's tokenizer, or
read from official prompt files (`data_dir/LENGTH/TASK.jsonl`), or from the hub (`source=hub`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.aggregate import mean_of_tasks
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.ruler.data import (
    LAYOUT,
    Draft,
    QuestionSet,
    haystack_words,
    question_file,
    read_questions,
    split_prompt,
    task_configs,
)
from kvcore.bench.ruler.fit import Growth, LengthError, fit
from kvcore.bench.ruler.generate import make_growth, question_growth
from kvcore.bench.ruler.invented import invented_questions
from kvcore.bench.scoring import contained_share, contains_any, strip_thinking
from kvcore.bench.sources import HubSource, find_file, missing_message, read_hub, read_records, require_fields
from kvcore.chat import build_prompt
from kvcore.log import get_logger
from kvcore.method import did_you_mean

log = get_logger(__name__)
SOURCES = ("auto", "generate", "files", "hub")
QA_SOURCES = ("data", "invented")
HUB = "simonjegou/ruler"


@register_bench
@dataclass(frozen=True, kw_only=True)
class Ruler(GenerationBenchmark):
    """Options of RULER.

    Attributes:
        contexts: lengths in tokens of the evaluated model, prompt and answer together.
        tasks: task names; empty means all 13.
        num_samples: samples per task and length (the official set has 500); `limit` lowers it.
        source: `generate`, `files` (ready-made prompts of `data_dir`), `hub`, or `auto`: files where `data_dir` has
            them for the length, else generated.
        qa_source: `data` takes qa_1 and qa_2 from SQuAD and HotpotQA files; `invented` generates questions about
            invented people (no download, not comparable with published scores; the task is then named so).
        chat: whether an instruct model gets its chat template.
    """

    name: ClassVar[str] = "ruler"
    metrics: ClassVar[dict[str, bool]] = {"string_match": True}

    contexts: tuple[int, ...] = (4096,)
    tasks: tuple[str, ...] = ()
    num_samples: int = 25
    source: str = "auto"
    qa_source: str = "data"
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "contexts", tuple(self.contexts))
        object.__setattr__(self, "tasks", tuple(self.tasks) or tuple(task_configs()))
        for task in self.tasks:
            if task not in task_configs():
                raise ValueError(f"bench.ruler.tasks has no '{task}'. {did_you_mean(task, task_configs())}")
        for key, value, valid in (("source", self.source, SOURCES), ("qa_source", self.qa_source, QA_SOURCES)):
            if value not in valid:
                raise ValueError(f"bench.ruler.{key} must be one of {', '.join(valid)}; received {value!r}")
        if not self.contexts or min(self.contexts) < 1 or self.num_samples < 1:
            raise ValueError(
                "bench.ruler.contexts must be token counts and num_samples >= 1; received "
                f"{list(self.contexts)} and {self.num_samples}"
            )

    def check(self) -> None:
        for task in self.tasks:
            if self.source == "hub":
                return
            for length in self.contexts:
                if self._prompt_file(task, length) is None:
                    if self.source == "files":
                        raise FileNotFoundError(missing_message("ruler", [f"{length}/{task}"], self.data_dir, LAYOUT))
                    self._check_questions(task)

    def _check_questions(self, task: str) -> None:
        dataset = _dataset(task)
        if dataset is None or self.qa_source == "invented" or question_file(dataset, self.data_dir):
            return
        others = ",".join(name for name in self.tasks if _dataset(name) is None)
        raise FileNotFoundError(
            f"{missing_message('ruler', [dataset], self.data_dir, LAYOUT)}. Or leave the question tasks out: "
            f"bench.ruler.tasks=[{others}]; or generate questions about invented people: bench.ruler.qa_source=invented"
        )

    def _prompt_file(self, task: str, length: int) -> Any:
        if self.data_dir is None or self.source == "generate":
            return None
        return find_file(f"{self.data_dir}/{length}", [task])

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        count = min(self.num_samples, self.limit or self.num_samples)
        samples: list[Sample] = []
        for length in self.contexts:
            if length > backbone.spec.max_positions:
                raise ValueError(
                    f"bench.ruler.contexts asks for {length} tokens; {backbone.config.name} was built for "
                    f"{backbone.spec.max_positions}. Lower bench.ruler.contexts, or take a backbone with more"
                )
            hub = _hub_records(length) if self.source == "hub" else {}
            for task in self.tasks:
                drafts, name = self._drafts(backbone, task, length, count, hub), task
                if _dataset(task) and self.qa_source == "invented":
                    name = f"{task}_invented"
                config = task_configs()[task]
                for index, draft in enumerate(drafts):
                    samples.append(
                        Sample(
                            id=f"{name}-{length}-{index}",
                            task=name,
                            context=draft.context,
                            question=draft.question,
                            answer_prefix=draft.answer_prefix,
                            references=draft.references,
                            max_new_tokens=config["tokens_to_generate"],
                            chat=self.chat,
                            context_length=length,
                            meta={"metric": config["metric"]},
                        )
                    )
        return samples

    def _drafts(
        self, backbone: Backbone, task: str, length: int, count: int, hub: dict[str, list[dict[str, Any]]]
    ) -> list[Draft]:
        if self.source == "hub":
            return [_hub_draft(record) for record in hub[task][:count]]
        path = self._prompt_file(task, length)
        if path is not None:
            records = read_records(path)
            require_fields(records, ("input", "outputs"), str(path))
            return [split_prompt(task, record) for record in records[:count]]
        return list(self._generated(backbone, task, length, count))

    def _generated(self, backbone: Backbone, task: str, length: int, count: int) -> Iterator[Draft]:
        tokenizer, config = backbone.tokenizer, backbone.config
        limit = length - task_configs()[task]["tokens_to_generate"]

        def tokens(draft: Draft) -> int:
            prompt = build_prompt(
                tokenizer,
                draft.context,
                draft.question,
                chat=self.chat and config.instruct,
                answer_prefix=draft.answer_prefix,
                enable_thinking=config.enable_thinking,
            )
            return len(prompt.ids)

        def text_tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False).input_ids)

        try:
            dataset = _dataset(task)
            if dataset is not None:
                yield from self._question_drafts(task, self._questions(dataset), tokens, limit, length, count)
                return
            growth = make_growth(task, length, text_tokens, haystack_words(self.data_dir))
            units: int | None = None
            for index in range(count):
                draft, units = fit(growth, f"{self.seed}/{task}/{length}/{index}", tokens, limit, units)
                yield draft
        except LengthError as error:
            raise LengthError(
                f"bench.ruler: task {task} does not fit a length of {length} tokens: {error}. "
                "Raise bench.ruler.contexts or leave the task out of bench.ruler.tasks"
            ) from error

    def _questions(self, dataset: str) -> QuestionSet:
        if self.qa_source == "invented":
            return invented_questions(dataset, self.seed)
        path = question_file(dataset, self.data_dir)
        assert path is not None, "check() has found it"
        return read_questions(dataset, path)

    def _question_drafts(
        self, task: str, questions: QuestionSet, tokens: Any, limit: int, length: int, count: int
    ) -> Iterator[Draft]:
        """The first questions whose own documents fit; the official script would try a longer one for ever."""
        made = skipped = 0
        for index, question in enumerate(questions.questions):
            if made == count:
                break
            growth: Growth = question_growth(task, questions, question)
            try:
                draft, _ = fit(growth, f"{self.seed}/{task}/{length}/{index}", tokens, limit)
            except LengthError as error:
                skipped, shortest = skipped + 1, error
                continue
            made += 1
            yield draft
        if made == 0:
            raise shortest
        if skipped or made < count:
            log.warning(
                "bench ruler, task %s at %d: %d of %d samples; %d questions left out whose own documents do not fit",
                task, length, made, count, skipped,
            )  # fmt: skip

    def summarise(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The plain mean of the tasks, as RULER reports it."""
        return mean_of_tasks(rows, "string_match", self.seed)

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        scorer = contains_any if sample.meta["metric"] == "string_match_part" else contained_share
        return {"string_match": 100 * scorer(strip_thinking(prediction), sample.references)}


def _dataset(task: str) -> str | None:
    """The question set that a task needs, or None."""
    dataset: str | None = task_configs()[task]["args"].get("dataset")
    return dataset


def _hub_records(length: int) -> dict[str, list[dict[str, Any]]]:
    hub = HubSource(repo=HUB, licence="Apache-2.0 (generated by NVIDIA/RULER)", data_dir=str(length))
    by_task: dict[str, list[dict[str, Any]]] = {task: [] for task in task_configs()}
    for record in read_hub("ruler", hub, missing_message("ruler", [str(length)], None, LAYOUT)):
        by_task.setdefault(record["task"], []).append(record)
    return by_task


def _hub_draft(record: dict[str, Any]) -> Draft:
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    return Draft(record["context"], record["question"], record["answer_prefix"], tuple(map(str, answers)))
