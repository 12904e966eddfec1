"""InfiniteBench's tasks, prompt templates and records."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcore.bench.sources import HubSource, load_records, require_fields

LAYOUT = "TASK.jsonl (or TASK_VARIANT.jsonl, e.g. passkey_8192.jsonl), fields context, input, answer, options"
HUB_REPO = "xinrongzhang2022/InfiniteBench"
TASKS = (
    "passkey",
    "number_string",
    "kv_retrieval",
    "longdialogue_qa_eng",
    "longbook_sum_eng",
    "longbook_choice_eng",
    "longbook_qa_eng",
    "math_find",
    "math_calc",
    "code_run",
    "code_debug",
)


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files(__package__) / "prompts.json").read_text("utf-8"))
    return loaded


def template_names() -> tuple[str, ...]:
    """Families of templates: `gpt4`, `yarn_mistral`, `claude2`."""
    return tuple(_file()["templates"])


def max_new_tokens(task: str) -> int:
    """Official answer length in tokens."""
    tokens: int = _file()["max_new_tokens"][task]
    return tokens


def records(task: str, variant: str | None, data_dir: str | None) -> list[dict[str, Any]]:
    """Records of a task.

    Args:
        task: task name.
        variant: of the file, behind the task's name (`8192` reads passkey_8192); None is the official file.
        data_dir: file, folder or glob; None means the data cache, then the hub.

    Raises:
        FileNotFoundError: no file (names the path and the layout expected), and the hub out of reach.
        ValueError: a record that lacks a field.
    """
    hub = HubSource(repo=HUB_REPO, licence="MIT", file=f"{task}.jsonl") if variant is None else None
    name = task if variant is None else f"{task}_{variant}"
    found = load_records("infinitebench", [name], data_dir, hub, LAYOUT)
    # the number lists of math_find and code_run carry everything in these too
    require_fields(found, ("context", "input", "answer"), f"bench 'infinitebench', task {name}")
    return found


def split_prompt(task: str, template: str, record: dict[str, Any]) -> tuple[str, str]:
    """The official prompt of a template family, cut where the record's context ends.

    Raises:
        ValueError: a record of math_find or code_run whose question has another form.
    """
    values = _values(task, record)
    head, _, tail = _file()["templates"][template][task].partition("{context}")
    return head.format(**values) + record["context"], tail.format(**values)


def _values(task: str, record: dict[str, Any]) -> dict[str, str]:
    question = record["input"]
    if task == "code_run":
        call = _find(r"func_[0-9]+\(-?[0-9]+\)", question, task)
        return {"func": call.split("(")[0], "func_call": call}
    if task == "math_find":
        wanted = _find(r"The .+ of", question, task).lower()[: -len(" of")]
        return {"prefix": f"What is {wanted} in the following list?", "input": question}
    options = record.get("options") or []
    return {"input": question, "question": question} | {
        f"OPTION_{letter}": text for letter, text in zip("ABCD", options, strict=False)
    }


def _find(pattern: str, text: str, task: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"bench 'infinitebench', task {task}: the question {text!r} does not match {pattern!r}")
    return found.group()
