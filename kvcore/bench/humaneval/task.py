"""HumanEval (arXiv 2107.03374): pass@1 of one greedy completion.

Generated programs run only with `allow_code_execution=true`, in a separate process with limits (`sandbox.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.base import MethodRun, Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.humaneval.data import prompts, records
from kvcore.bench.humaneval.sandbox import Limits, protection
from kvcore.bench.humaneval.scoring import check, completion_of
from kvcore.log import get_logger

log = get_logger(__name__)


@register_bench
@dataclass(frozen=True, kw_only=True)
class HumanEval(GenerationBenchmark):
    """Options of HumanEval.

    Attributes:
        allow_code_execution: consent to run code that the model writes; nothing runs without it.
        timeout_seconds: time of one program (officially 3).
        memory_mib: address space of one program in MiB.
        max_new_tokens: completion length in tokens.
        chat: whether an instruct model gets its chat template; the official form is a plain completion.
    """

    name: ClassVar[str] = "humaneval"
    metrics: ClassVar[dict[str, bool]] = {"pass@1": True}
    proportions: ClassVar[dict[str, float]] = {"pass@1": 100.0}

    allow_code_execution: bool = False
    timeout_seconds: float = 3.0
    memory_mib: int = 1024
    max_new_tokens: int = 512
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout_seconds <= 0 or self.memory_mib < 64 or self.max_new_tokens < 1:
            raise ValueError(
                "bench.humaneval needs timeout_seconds > 0, memory_mib >= 64 and max_new_tokens >= 1; received "
                f"{self.timeout_seconds}, {self.memory_mib} and {self.max_new_tokens}"
            )

    def check(self) -> None:
        if not self.allow_code_execution:
            raise PermissionError(
                "bench humaneval runs code that the model writes, in a separate process with limits of time, memory, "
                "files and network; that holds accidents, not attacks. Give your consent: "
                "bench.humaneval.allow_code_execution=true"
            )
        records(self.data_dir)
        log.info("bench humaneval: generated programs run under: %s", ", ".join(protection()))

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        problems = records(self.data_dir)[: self.limit]
        longest = max(len(backbone.tokenizer(record["prompt"]).input_ids) for record in problems)
        return [
            Sample(
                id=record["task_id"],
                task="humaneval",
                question=record["prompt"],
                references=(record.get("canonical_solution", ""),),
                max_new_tokens=self.max_new_tokens,
                chat=self.chat,
                context_length=longest,
                stop=tuple(prompts()["stop"]) if not self.chat else (),
                meta={key: record[key] for key in ("prompt", "entry_point", "test")},
            )
            for record in problems
        ]

    def run_group(
        self, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
    ) -> list[list[dict[str, Any]]]:
        rows = super().run_group(backbone, samples, runs)
        enforced = list(protection())
        return [[{**row, "code_execution": enforced} for row in answers] for answers in rows]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        if not self.allow_code_execution:
            raise PermissionError("bench.humaneval.allow_code_execution is false: nothing is run")
        code = completion_of(prediction, sample.meta["prompt"], sample.meta["entry_point"], prompts()["stop"])
        outcome = check(sample.meta, code, Limits(self.timeout_seconds, self.memory_mib << 20))
        return {"pass@1": 100.0 * outcome.passed}
