"""What one `evaluate.py` run will do, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from kvcore.backbone import BackboneConfig
from kvcore.bench.base import Benchmark, MethodRun, build_bench
from kvcore.budget import Budget, Scope
from kvcore.cli import config_hash
from kvcore.method import Method, build_method
from kvcore.options import (
    check_flag,
    check_output_dir,
    check_seed,
    did_you_mean,
    mapping,
    require_keys,
    typed_options,
)
from kvcore.tracking import LoggerConfig

ON_UNREACHABLE = ("error", "skip")
TOP_LEVEL_KEYS = (
    *("backbone", "method", "bench", "logger", "budget", "budget_scope", "on_unreachable", "data_dir", "output_dir"),
    *("seed", "limit", "compress_question", "plots", "finished_only"),
)
OWN_BUDGET = "_budget_"  # of a method's node: a budget or a list, in place of the run's
TOP_LEVEL_BENCH_OPTIONS = ("data_dir", "limit", "seed", "compress_question")


@dataclass(frozen=True)
class EvaluationPlan:
    """Benches x methods x budgets on one backbone.

    Attributes:
        backbone: which model.
        benches: the benchmarks, with their options.
        runs: every method at every budget; a method that ignores budgets appears once, at 1.0.
        logger: wandb options.
        on_unreachable: `error`, or `skip` for tables where some methods cannot reach some budgets.
        finished_only: the results of the samples that are finished; none is run.
    """

    backbone: BackboneConfig
    benches: list[Benchmark]
    runs: list[MethodRun]
    logger: LoggerConfig
    on_unreachable: str = "error"
    finished_only: bool = False

    def run_key(self, bench: Benchmark, run: MethodRun) -> str:
        """Hash of everything that can change a result row."""
        return config_hash(
            {
                "bench": {"name": bench.name, **dataclasses.asdict(bench)},
                "backbone": dataclasses.asdict(self.backbone),
                **run.columns,
            },
            digits=16,
        )


def evaluation_plan(config: dict[str, Any]) -> EvaluationPlan:
    """Validate a resolved configuration.

    A method runs at every budget of `budget`, or at those of its own node's `_budget_`.

    Raises:
        ValueError: an unknown name or option (close matches named) or a value out of range.
    """
    for key in config:
        if key not in TOP_LEVEL_KEYS:
            raise ValueError(f"unknown key '{key}'. {did_you_mean(key, TOP_LEVEL_KEYS)}")
    # an empty list of methods or benches leaves their key out; said better below
    require_keys(config, (key for key in TOP_LEVEL_KEYS if key not in ("method", "bench")))
    check_output_dir(config["output_dir"])
    check_flag(config["plots"], "plots")
    check_flag(config["finished_only"], "finished_only")
    check_seed(config["seed"])
    methods, benches = mapping(config.get("method"), "method"), mapping(config.get("bench"), "bench")
    scope = config["budget_scope"]
    if scope not in get_args(Scope):
        raise ValueError(f"budget_scope must be one of {', '.join(get_args(Scope))}; received {scope!r}")
    if config["on_unreachable"] not in ON_UNREACHABLE:
        raise ValueError(f"on_unreachable must be error or skip; received {config['on_unreachable']!r}")
    if not methods:
        raise ValueError("no method given; for example method=[full,streaming_llm]")
    if not benches:
        raise ValueError("no bench given; for example bench=fidelity")
    budgets = _budgets(config["budget"], scope, "budget")
    shared = {name: config[name] for name in TOP_LEVEL_BENCH_OPTIONS}
    return EvaluationPlan(
        backbone=typed_options(BackboneConfig, config["backbone"], "backbone"),
        benches=[_bench(name, mapping(options, f"bench.{name}"), shared) for name, options in benches.items()],
        runs=_runs(methods, budgets, scope),
        logger=typed_options(LoggerConfig, config["logger"], "logger"),
        on_unreachable=config["on_unreachable"],
        finished_only=config["finished_only"],
    )


def _bench(name: str, options: dict[str, Any], shared: dict[str, Any]) -> Benchmark:
    options = dict(options)
    registered = str(options.pop("_name_", name))
    for key, value in shared.items():
        if options.get(key) is None:
            options[key] = value
    return build_bench(registered, **options)


def _runs(methods: dict[str, dict[str, Any] | None], budgets: Sequence[float | int], scope: Scope) -> list[MethodRun]:
    runs = []
    for label, options in methods.items():
        method = method_from_config(label, options)
        own = mapping(options, f"method.{label}").get(OWN_BUDGET)
        wanted = budgets if own is None else _budgets(own, scope, f"method.{label}.{OWN_BUDGET}")
        for budget in [1.0] if method.ignores_budget else wanted:
            runs.append(MethodRun(method, budget, scope, label))
    return runs


def _budgets(given: Any, scope: Scope, key: str) -> list[float | int]:
    """One budget or a list of them, checked; `key` names it in errors."""
    budgets = given if isinstance(given, list) else [given]
    if not budgets:
        raise ValueError(f"{key} is an empty list; give at least one, for example {key}=[0.05,0.1]")
    for budget in budgets:
        Budget(budget, scope)
    return budgets


def method_from_config(label: str, options: dict[str, Any] | None) -> Method:
    """A method from its configuration node.

    `_name_` is the registered name, the node's own name otherwise; `_budget_` (see `evaluation_plan`) is no option.
    """
    options = mapping(options, f"method.{label}")
    options.pop(OWN_BUDGET, None)
    return build_method(str(options.pop("_name_", label)), **options)
