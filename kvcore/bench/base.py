"""What a benchmark is: samples, and how one sample is run for several methods that share its prefill.

A benchmark is a dataclass of options, registered by name like a method. Those that generate text subclass
`GenerationBenchmark` (`kvcore.bench.generation`) and only say what the samples are and how an answer is scored.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from kvcore.backbone import Backbone
from kvcore.budget import Scope
from kvcore.cache import CompressedCache
from kvcore.method import Method
from kvcore.options import did_you_mean, typed_options

BenchType = TypeVar("BenchType", bound="type[Benchmark]")
_registry: dict[str, type[Benchmark]] = {}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with its references. Plain data only, so that it can be hashed and stored.

    Attributes:
        id: unique within bench, task and context length.
        task: name of the task inside the benchmark.
        context: the part that is compressed.
        question: the rest of the user's message; may be empty.
        answer_prefix: text the answer starts with, after the assistant header.
        references: accepted answers.
        max_new_tokens, min_new_tokens: generation limits in tokens.
        chat: whether an instruct model gets its chat template.
        system: system message.
        stop: strings that end the generation.
        extra_eos_ids: token ids that end it besides the model's own.
        context_length: the nominal length in tokens that results are grouped by; None means the prompt's own.
        truncated: whether the benchmark cut the prompt to the model's length.
        meta: what the scorer needs besides.
    """

    id: str
    task: str
    context: str = ""
    question: str = ""
    answer_prefix: str = ""
    references: tuple[str, ...] = ()
    max_new_tokens: int = 32
    min_new_tokens: int = 0
    chat: bool = True
    system: str | None = None
    stop: tuple[str, ...] = ()
    extra_eos_ids: tuple[int, ...] = ()
    context_length: int | None = None
    truncated: bool = False
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodRun:
    """A method at a budget: one row of a comparison.

    Attributes:
        method: the method with its options.
        budget, budget_scope: see `kvcore.budget.Budget`.
        label: name in results; presets and ablations of one method differ here. Empty means the method's name.
    """

    method: Method
    budget: float | int
    budget_scope: Scope = "bytes"
    label: str = ""

    def new_cache(self, backbone: Backbone) -> CompressedCache:
        """An empty cache of this run."""
        return self.method.new_cache(backbone.model, self.budget, self.budget_scope)

    @property
    def columns(self) -> dict[str, Any]:
        """What identifies the run in a result row."""
        return {
            "label": self.label or self.method.name,
            "method": self.method.name,
            "method_options": dataclasses.asdict(self.method),
            "reference_only": self.method.reference_only,
            "budget": self.budget,
            "budget_scope": self.budget_scope,
        }


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """Options of one benchmark (`conf/bench/*.yaml`).

    Class attributes:
        name: the registered name.
        metrics: whether higher is better, per metric.
        proportions: metrics that count answers found, with the score of a full one; their interval is Wilson's.

    Attributes:
        data_dir: local data (file, folder or glob); None means the benchmark's own source.
        limit: samples per task; None means all.
        seed: fixes everything random.
        compress_question: whether the question is seen before the context is compressed.
    """

    name: ClassVar[str]
    metrics: ClassVar[dict[str, bool]]
    proportions: ClassVar[dict[str, float]] = {}

    data_dir: str | None = None
    limit: int | None = None
    seed: int = 0
    compress_question: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be >= 1 sample, or null for all; received {self.limit}")

    def check(self) -> None:  # noqa: B027 - most benchmarks have nothing to check
        """Fail before a model is loaded: missing data files, refused options."""

    @abstractmethod
    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        """The samples, in a fixed order, prompts already cut to the model's length where the protocol says so."""

    @abstractmethod
    def run(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        """One result row per run, in the same order.

        A row holds `prediction`, `references`, `metrics` {name: value}, the ledger's columns and timings; the runner
        adds bench, task, id, context and the run's columns.
        """

    def summarise(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Extra summary rows over the tasks of one run and context (RULER's mean of 13); the default has none."""
        return []


def register_bench(cls: BenchType) -> BenchType:
    """Class decorator: put a benchmark into the registry under its `name`."""
    _registry[cls.name] = cls
    return cls


def bench_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_registry)


def build_bench(name: str, **options: Any) -> Benchmark:
    """A benchmark with options; the rest keep their defaults.

    Raises:
        ValueError: unknown benchmark or option, with close matches; a value out of range.
    """
    if name not in _registry:
        raise ValueError(f"unknown bench '{name}'. {did_you_mean(name, bench_names())}")
    return typed_options(_registry[name], options, f"bench '{name}'")
