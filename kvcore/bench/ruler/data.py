"""RULER's data: task configurations, word lists, haystack text, question sets, and ready-made prompt files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvcore.bench.sources import data_cache, local_files, read_records
from kvcore.text import haystack_text

LAYOUT = (
    "LENGTH/TASK.jsonl with fields input, outputs, answer_prefix (ready-made prompts); or, for the generator, any of "
    "squad.json (or dev-v2.0.json: SQuAD JSON) for qa_1, hotpotqa.json (or hotpot*.json: HotpotQA distractor JSON) for "
    'qa_2, PaulGrahamEssays.json ({"text"}) or *essays*.jsonl ({"text"}) as haystack'
)
QA_PATTERNS = {"squad": r"(squad.*|dev-v2\.0)\.json", "hotpotqa": r"hotpot.*\.json"}
ESSAY_PATTERN = r".*essays.*\.jsonl?"


@dataclass(frozen=True)
class Draft:
    """One prompt: what is compressed, the question, the start of the answer, the accepted answers."""

    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question with the ids of its own documents and of related ones.

    Attributes:
        query: the question.
        answers: accepted answers.
        own: documents that hold the answer (with the distractors that belong to the question).
        related: documents of the same article, preferred as distractors.
    """

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions over a pool of documents."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files(__package__) / "tasks.json").read_text(encoding="utf-8"))
    return loaded


def task_configs() -> dict[str, dict[str, Any]]:
    """The 13 official task configurations by name, in the official order."""
    tasks: dict[str, dict[str, Any]] = _file()["tasks"]
    return tasks


def fragment(name: str) -> str:
    """A piece of official wording: `needle`, `noise`, `document`, `assign_value`, `assign_variable`."""
    text: str = _file()["fragments"][name]
    return text


@lru_cache(maxsize=4)
def word_list(kind: str) -> tuple[str, ...]:
    """wonderwords' list that RULER uses: `noun`, `adjective` or `verb`, sorted, without repeats."""
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))


@lru_cache(maxsize=2)
def haystack_words(data_dir: str | None) -> list[str]:
    """Words of the filler text: essays of `data_dir` or of the data cache where there are some, else embedded text."""
    for path in _candidates(data_dir):
        if re.fullmatch(ESSAY_PATTERN, path.name, re.IGNORECASE):
            if path.suffix == ".json":
                return str(json.loads(path.read_text(encoding="utf-8"))["text"]).split()
            return " ".join(str(record["text"]) for record in read_records(path)).split()
    return haystack_text().split()


def question_file(dataset: str, data_dir: str | None) -> Path | None:
    """The SQuAD or HotpotQA file of `data_dir`, or of the data cache; None when there is none."""
    for path in _candidates(data_dir):
        if re.fullmatch(QA_PATTERNS[dataset], path.name, re.IGNORECASE):
            return path
    return None


def _candidates(data_dir: str | None) -> list[Path]:
    return local_files(data_dir or str(data_cache("ruler")))


def read_questions(dataset: str, path: Path) -> QuestionSet:
    """Questions and documents of a SQuAD or HotpotQA file; unanswerable questions are left out.

    Raises:
        ValueError: a file in another schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _squad(data) if dataset == "squad" else _hotpot(data)
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no {dataset} file ({error!r}). Layout expected: {LAYOUT}") from error


def _squad(data: dict[str, Any]) -> QuestionSet:
    documents = tuple(sorted({p["context"] for article in data["data"] for p in article["paragraphs"]}))
    index = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in data["data"]:
        members = [index[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = index[paragraph["context"]]
            for qa in paragraph["qas"]:
                # SQuAD 1.1 files have no such field: all of their questions have answers
                if not qa.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in qa["answers"])
                    related = tuple(dict.fromkeys(m for m in members if m != own))
                    questions.append(Question(qa["question"], answers, (own,), related))
    return QuestionSet(tuple(questions), documents)


def _hotpot(data: Sequence[dict[str, Any]]) -> QuestionSet:
    def text(title: str, sentences: Sequence[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = tuple(sorted({text(t, s) for record in data for t, s in record["context"]}))
    index = {document: number for number, document in enumerate(documents)}
    questions = tuple(
        Question(record["question"], (record["answer"],), tuple(index[text(t, s)] for t, s in record["context"]))
        for record in data
    )
    return QuestionSet(questions, documents)


def split_prompt(task: str, record: dict[str, Any]) -> Draft:
    """A ready-made prompt cut into context, question and answer prefix at the template's own borders.

    Records without `answer_prefix` (older files) carry it at the end of `input`.

    Raises:
        ValueError: the prompt does not follow the task's template.
    """
    config = task_configs()[task]
    text, prefix = str(record["input"]), record.get("answer_prefix")
    if prefix is None:
        start = text.rfind(_lead(_singular(config["answer_prefix"]), config["answer_prefix"], text))
        text, prefix = text[:start], text[start:]
    tail = config["template"].partition("{context}")[2]
    cut = text.rfind(_lead(_singular(tail), tail, text))
    return Draft(text[:cut], text[cut:], str(prefix), tuple(map(str, record["outputs"])))


def _lead(singular: str, plural: str, text: str) -> str:
    """The fixed start of a piece of template, in the form that the text has."""
    for form in (plural, singular):
        lead = form.partition("{")[0]
        if lead in text:
            return lead
    raise ValueError(f"a prompt of RULER does not hold {plural.partition('{')[0]!r}. Layout expected: {LAYOUT}")


def _singular(template: str) -> str:
    """RULER's wording for a single needle."""
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, single)
    return template


def singular(template: str) -> str:
    """RULER's wording for a single needle: `Some ... are` becomes `A ... is`."""
    return _singular(template)
