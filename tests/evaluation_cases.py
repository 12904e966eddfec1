"""Shared by the tests of results, runner and command line: a small benchmark on the tiny backbone.

It runs in fractions of a second, so that resuming and locking are tested through the real runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from foundation_cases import SMALL

import kvcore.baselines
import kvcore.bench.all  # noqa: F401 - registers the benchmarks
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.plan import EvaluationPlan, evaluation_plan


@register_bench
@dataclass(frozen=True, kw_only=True)
class Toy(GenerationBenchmark):
    """Seven short prompts in two tasks; the score is the share of letters in the answer."""

    name: ClassVar[str] = "toy"
    metrics: ClassVar[dict[str, bool]] = {"letters": True}

    samples_per_task: int = 7

    def samples(self, backbone) -> Sequence[Sample]:
        count = min(self.samples_per_task, self.limit or self.samples_per_task)
        return [
            Sample(
                id=f"s{index}",
                task="ab"[index % 2],
                context=f"context number {index} of seed {self.seed}. " * 3,
                question=f"Which number? {index}",
                max_new_tokens=4,
                context_length=100,
            )
            for index in range(count)
        ]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        return {"letters": sum(map(str.isalpha, prediction)) / max(len(prediction), 1)}


def toy_config(**changes) -> dict:
    """A resolved configuration: full and streaming_llm on the toy benchmark; dotted changes reach into nodes."""
    config = {
        "backbone": {
            "name": "tiny",
            "path": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "instruct": True,
            "tiny": {**SMALL, "num_hidden_layers": 2},
        },
        "method": {"full": {}, "streaming_llm": {"num_sinks": 4}},
        "bench": {"toy": {}},
        "logger": {"mode": "disabled"},
        "budget": 0.5,
        "budget_scope": "bytes",
        "on_unreachable": "error",
        "data_dir": None,
        "output_dir": None,
        "seed": 0,
        "limit": None,
        "compress_question": False,
        "plots": False,
        "finished_only": False,
    }
    for path, value in changes.items():
        node, *rest = path.split("__")
        target = config
        for part in rest:
            target, node = target[node], part
        target[node] = value
    return config


def toy_plan(**changes) -> tuple[EvaluationPlan, dict]:
    config = toy_config(**changes)
    return evaluation_plan(config), config


class Calls:
    """Counts the samples that a benchmark really ran, and can interrupt it.

    Args:
        monkeypatch: pytest's.
        stop_after: raise KeyboardInterrupt once this many samples have run.
    """

    def __init__(self, monkeypatch, stop_after: int | None = None) -> None:
        self.ran: list[tuple[str, str]] = []
        whole = Toy._answers

        def counted(bench, backbone, batch, cache, *rest):
            if stop_after is not None and len(self.ran) >= stop_after:
                raise KeyboardInterrupt
            self.ran.extend((sample.id, cache.method) for sample, _ in batch)
            return whole(bench, backbone, batch, cache, *rest)

        monkeypatch.setattr(Toy, "_answers", counted)
