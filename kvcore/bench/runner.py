"""Run a plan: samples x methods x budgets, resumable, shared by several processes.

Processes of `accelerate launch` (on CPUs: of `torchrun`) split the samples without duplicates; each writes its own
rows, and the main process puts them together, so the score is that of one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvcore.backbone import Backbone, load_backbone
from kvcore.bench.base import Benchmark, MethodRun, Sample
from kvcore.bench.batching import work_groups
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.plan import EvaluationPlan
from kvcore.bench.results import SCHEMA, SampleStore, remove_unfinished, summarise, write_atomically
from kvcore.budget import Budget, UnreachableBudgetError
from kvcore.cli import config_hash
from kvcore.environment import environment
from kvcore.log import get_logger

log = get_logger(__name__)


class OutputFolder:
    """An output folder held by one run: created, checked for writing, locked against a second run.

    Raises:
        PermissionError: the folder cannot be written; names it.
        ValueError: another run is writing to it.
    """

    def __init__(self, folder: Path, main_process: bool) -> None:
        self.folder, self._lock = folder, None
        if not main_process:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionError(f"output_dir={folder} cannot be created: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"output_dir={folder} is not writable; choose another with output_dir=PATH")
        self._lock = FileLock(str(folder / ".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"another run is writing to {folder}; wait for it, or choose another output_dir"
            ) from error
        except OSError as error:
            raise PermissionError(f"output_dir={folder} is not writable: {error}") from error
        remove_unfinished(folder)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def evaluate(plan: EvaluationPlan, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run everything of a plan that has no row yet (nothing with `finished_only`), then write `results.json`.

    Args:
        plan: the validated plan.
        config: the resolved configuration, stored with the results.
        folder: output folder.

    Returns:
        The content of `results.json`, on every process.
    """
    # without the flag accelerate takes the processes of a CPU launch for unrelated single ones
    state = PartialState(cpu=not torch.accelerator.is_available())
    for bench in plan.benches:
        bench.check()
    held = OutputFolder(folder, state.is_main_process)
    try:
        state.wait_for_everyone()
        backbone = load_backbone(plan.backbone)
        runs = reachable_runs(plan, backbone)
        store = SampleStore(folder, state.process_index)
        for bench in () if plan.finished_only else plan.benches:
            _run_bench(bench, plan, runs, backbone, store, state)
        state.wait_for_everyone()
        store.reload()
        keys = [plan.run_key(bench, run) for bench in plan.benches for run in runs]
        rows = store.select(keys)
        if plan.finished_only and not rows:
            raise ValueError(f"finished_only=true: {folder} holds no finished sample of this configuration")
        results = assemble(plan, config, backbone, rows)
        if state.is_main_process:
            _write_results(folder, results)
        state.wait_for_everyone()
        return results
    finally:
        held.release()


def reachable_runs(plan: EvaluationPlan, backbone: Backbone) -> list[MethodRun]:
    """The runs whose method serves this model at this budget.

    Raises:
        UnreachableBudgetError, NotImplementedError: with `on_unreachable=error`.
    """
    kept = []
    for run in plan.runs:
        try:
            run.method.validate(backbone.spec, Budget(run.budget, run.budget_scope))
        except (UnreachableBudgetError, NotImplementedError) as error:
            if plan.on_unreachable == "error":
                raise
            log.warning("left out: %s", error)
        else:
            kept.append(run)
    if not kept:
        raise ValueError("no method of this run can serve this model at these budgets")
    return kept


def _run_bench(
    bench: Benchmark,
    plan: EvaluationPlan,
    runs: Sequence[MethodRun],
    backbone: Backbone,
    store: SampleStore,
    state: PartialState,
) -> None:
    samples = list(enumerate(bench.samples(backbone)))
    groups = _groups(bench, backbone, samples, state.num_processes)[state.process_index :: state.num_processes]
    keys = {id(run): plan.run_key(bench, run) for run in runs}
    total = sum(len(group) for group in groups) * len(runs)
    beyond: set[tuple[int, int | None]] = set()  # runs that cannot meet their budget at a length
    with _progress(bench.name, total, state.is_main_process) as advance:
        for group in groups:
            pending = [
                run for run in runs if any((keys[id(run)], _sample_key(sample)) not in store for _, sample in group)
            ]
            length = group[0][1].context_length
            pending = [run for run in pending if (id(run), length) not in beyond]
            advance(len(group) * (len(runs) - len(pending)))
            if not pending:
                continue
            chosen = [sample for _, sample in group]
            try:
                answers = _answers(bench, backbone, chosen, pending)
            except UnreachableBudgetError:
                if plan.on_unreachable == "error":
                    raise
                wanted = pending
                pending, answers = _reachable_answers(bench, backbone, chosen, wanted)
                beyond |= {(id(run), length) for run in wanted if run not in pending}
            rows = [
                {
                    "key": keys[id(run)],
                    "sample_key": _sample_key(sample),
                    "order": order,
                    "bench": bench.name,
                    "task": sample.task,
                    "id": sample.id,
                    "context": sample.context_length or row.get("prompt_tokens"),
                    "compress_question": bench.compress_question,
                    **run.columns,
                    "note": run.method.note(backbone.spec),
                    **({"depth": sample.meta["depth"]} if "depth" in sample.meta else {}),
                    **row,
                    "score": next(iter(row["metrics"].values()), None),
                }
                for (order, sample), sample_rows in zip(group, answers, strict=True)
                for run, row in zip(pending, sample_rows, strict=True)
            ]
            store.append(rows)
            advance(len(rows))


def _answers(
    bench: Benchmark, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
) -> list[list[dict[str, Any]]]:
    """Rows [sample][run]."""
    if isinstance(bench, GenerationBenchmark):
        return bench.run_group(backbone, samples, runs)
    return [bench.run(backbone, sample, runs) for sample in samples]


def _reachable_answers(
    bench: Benchmark, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
) -> tuple[list[MethodRun], list[list[dict[str, Any]]]]:
    """The runs that meet their budget at the length of these samples, found one by one, and their rows.

    Before a model is loaded a budget is checked at the model's longest context; side data that does not grow with it
    weighs more in short ones.
    """
    kept: list[MethodRun] = []
    rows: list[list[dict[str, Any]]] = [[] for _ in samples]
    for run in runs:
        try:
            answers = _answers(bench, backbone, samples, [run])
        except UnreachableBudgetError as error:
            log.warning("left out at %s tokens: %s", samples[0].context_length, error)
        else:
            kept.append(run)
            for own, [row] in zip(rows, answers, strict=True):
                own.append(row)
    return kept, rows


def _groups(
    bench: Benchmark, backbone: Backbone, samples: list[tuple[int, Sample]], num_processes: int
) -> list[list[tuple[int, Sample]]]:
    if not isinstance(bench, GenerationBenchmark):
        return [[one] for one in samples]
    batched = bench.batch_size > 1
    return work_groups(
        samples,
        num_processes,
        share_context=not bench.compress_question,
        batch_size=bench.batch_size,
        lengths=[bench.lengths(backbone, sample) for _, sample in samples] if batched else (),
    )


def _sample_key(sample: Sample) -> str:
    return f"{sample.task}|{sample.context_length}|{sample.id}"


class _progress:  # noqa: N801 - used like a function
    """A progress bar over samples x runs (a context manager that gives `advance(count)`)."""

    def __init__(self, name: str, total: int, visible: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not visible)
        self.task = self.bar.add_task(name, total=total)

    def __enter__(self) -> Any:
        self.bar.start()
        return lambda count: self.bar.advance(self.task, count)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def assemble(
    plan: EvaluationPlan, config: dict[str, Any], backbone: Backbone, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of `results.json` (schema 1)."""
    return {
        "schema": SCHEMA,
        "config": config,
        "environment": environment(backbone.device),
        "summary": summarise(plan.benches, rows, plan.backbone.name),
        "samples": rows,
    }


def _write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write `results.json`; the results of another configuration in the same folder are kept under their hash."""
    path = folder / "results.json"
    if path.exists():
        try:
            previous = json.loads(path.read_text(encoding="utf-8"))["config"]
        except (json.JSONDecodeError, KeyError, TypeError):
            log.warning("%s is not whole; written anew from the finished samples", path)
        else:
            if previous != results["config"]:
                os.replace(path, folder / f"results-{config_hash(previous)}.json")
    write_atomically(path, json.dumps(results, indent=1))
