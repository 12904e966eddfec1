"""Evaluate KV-cache compression methods: `python evaluate.py bench=niah method=streaming_llm budget=0.1`."""

from __future__ import annotations

import importlib
from pathlib import Path

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf

import freqdepth
import kvcore.baselines
import kvcore.bench.all
import sekv
from kvcore.bench.plan import evaluation_plan
from kvcore.bench.results import write_atomically
from kvcore.bench.runner import evaluate
from kvcore.cli import config_hash, is_multirun, resolved, run
from kvcore.report.plots import plot_results
from kvcore.report.tables import print_summary
from kvcore.tracking import Tracker

REGISTERED = (kvcore.baselines, kvcore.bench.all, sekv, freqdepth)  # importing them fills the registries


def evaluate_job(config: DictConfig) -> None:
    """One Hydra job: validate, run what is missing, write results, table and plots."""
    # launchers send this function, not this file, to their processes: the registries are filled there as well
    for module in REGISTERED:
        importlib.import_module(module.__name__)
    plain = resolved(config)
    plan = evaluation_plan(plain)
    folder = output_folder(plain)
    results = evaluate(plan, plain, folder)
    if not PartialState().is_main_process:
        return
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    tracker = Tracker(plan.logger, folder, plain, name=folder.name)
    try:
        print_summary(results)
        plots = plot_results(results, folder) if plain["plots"] else []
        for row in results["summary"]:
            tracker.log(row)
        tracker.log_table("summary", results["summary"])
        tracker.log_files(plots)
    finally:
        tracker.finish()
    print(f"results: {folder / 'results.json'}")
    if plots:
        print("plots:   " + ", ".join(str(path) for path in plots))


def output_folder(plain: dict[str, object]) -> Path:
    """The run's own folder: named by its configuration, so that the same command resumes and others never collide."""
    identity = {
        key: value for key, value in plain.items() if key not in ("output_dir", "plots", "logger", "finished_only")
    }
    given = plain["output_dir"]
    if given is None:
        return Path("outputs") / f"evaluate-{config_hash(identity)}"
    folder = Path(str(given)).expanduser()
    return folder / config_hash(identity) if is_multirun() else folder


def main() -> None:
    """Command-line entry point."""
    run(evaluate_job, "evaluate")


if __name__ == "__main__":
    main()
