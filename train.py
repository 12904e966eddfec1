"""Train SeKV's routing for a frozen backbone: `python train.py`, `python train.py backbone=llama3_8b`."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf

from kvcore.backbone import Backbone, BackboneConfig, load_backbone
from kvcore.bench.plan import method_from_config
from kvcore.bench.results import write_atomically
from kvcore.bench.runner import OutputFolder
from kvcore.budget import Budget
from kvcore.cli import config_hash, fail, is_multirun, resolved, run
from kvcore.environment import git_revision
from kvcore.log import get_logger
from kvcore.options import check_flag, check_output_dir, check_seed, mapping, require_keys, typed_options
from kvcore.tracking import LoggerConfig, Tracker
from sekv.calibration import ThresholdCalibration
from sekv.checkpoint import load_router, router_config, save_router
from sekv.data import Sample, StreamState, TokenStream
from sekv.documents import DocumentSource
from sekv.method import SeKV
from sekv.objective import SeKVObjective
from sekv.reporting import RunReporter, keep_until
from sekv.routing import Router
from sekv.schedule import Curriculum
from sekv.train_config import DataConfig, LossConfig, TrainConfig
from sekv.trainer import DivergedError, Trainer
from sekv.training_state import POINTERS, pointed

log = get_logger(__name__)
TOP_LEVEL_KEYS = (
    *("backbone", "method", "train", "data", "logger"),
    *("budget", "budget_scope", "output_dir", "resume", "seed"),
)
# Options that do not change what is learned: a run may be resumed with others.
FREE = ("output_dir", "resume", "logger", "experiment")
FREE_TRAIN = ("eval_every", "eval_samples", "save_every", "keep", "log_every", "workers", "gradient_checkpointing")


@dataclass(frozen=True)
class TrainPlan:
    """A validated configuration."""

    backbone: BackboneConfig
    method: SeKV
    train: TrainConfig
    data: DataConfig
    logger: LoggerConfig
    budget: Budget
    seed: int
    documents: DocumentSource
    heldout: DocumentSource


def train_plan(config: dict[str, Any]) -> TrainPlan:
    """Check every option and the data files, before any model is loaded.

    Raises:
        ValueError: an unknown option (close matches named), a value out of range, or unreadable data.
    """
    require_keys(config, TOP_LEVEL_KEYS)
    check_output_dir(config["output_dir"])
    check_flag(config["resume"], "resume")
    check_seed(config["seed"])
    methods = mapping(config["method"], "method")
    if list(methods) != ["sekv"]:
        raise ValueError(f"train.py trains one method, sekv; received method={list(methods)}")
    options = mapping(config["train"], "train")
    options["losses"] = typed_options(LossConfig, mapping(options.get("losses"), "train.losses"), "train.losses")
    data = typed_options(DataConfig, config["data"], "data")
    method = method_from_config("sekv", methods["sekv"])
    assert isinstance(method, SeKV)
    return TrainPlan(
        backbone=typed_options(BackboneConfig, config["backbone"], "backbone"),
        method=method,
        train=typed_options(TrainConfig, options, "train"),
        data=data,
        logger=typed_options(LoggerConfig, config["logger"], "logger"),
        budget=Budget(config["budget"], config["budget_scope"]),
        seed=config["seed"],
        documents=data.source(config["seed"], heldout=False),
        heldout=data.source(config["seed"], heldout=True),
    )


def train_job(config: DictConfig) -> None:
    """One Hydra job: train, or go on, and write the router."""
    plain = resolved(config)
    plan = train_plan(plain)
    folder = output_folder(plain)
    if _last_exists(folder) and not plain["resume"]:
        raise ValueError(f"{folder} already holds checkpoints; use resume=true to go on, or another output_dir")
    # without the flag accelerate takes the processes of a CPU launch for unrelated single ones
    accelerator = Accelerator(cpu=plan.backbone.device == "cpu" or not torch.accelerator.is_available())
    held = OutputFolder(folder, accelerator.is_main_process)
    try:
        train_in(folder, config, plan, accelerator)
    finally:
        held.release()


def train_in(folder: Path, config: DictConfig, plan: TrainPlan, accelerator: Accelerator) -> None:
    """Train, or go on, in an output folder that this run holds, and write the router."""
    plain, resuming = resolved(config), _last_exists(folder)
    backbone = load_backbone(_placed(plan.backbone, accelerator))
    objective = build_objective(plan, backbone)
    trainer = build_trainer(plan, backbone, objective, accelerator, folder, trajectory(plain))
    if resuming:
        trainer.resume()
    else:
        calibrate(objective, plan, backbone)
    main = accelerator.is_main_process
    if main:
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        keep_until(folder / "metrics.jsonl", trainer.progress.step)
    tracker = Tracker(plan.logger if main else LoggerConfig(), folder, plain, name=folder.name)
    try:
        with RunReporter(plan.train.steps, trainer.progress.step, tracker) as trainer.reporter:
            trainer.train()
    except DivergedError as error:
        fail(str(error))
    finally:
        tracker.finish()
    if main:
        path = export(trainer, backbone, plain)
        print(f"router:      {path}\ncheckpoints: {folder / 'checkpoints'}\nmetrics:     {folder / 'metrics.jsonl'}")


def build_objective(plan: TrainPlan, backbone: Backbone) -> SeKVObjective:
    """The untrained router of the form, and its losses.

    Raises:
        ValueError: sequences beyond the model's length, or a form and budget that the backbone cannot serve.
    """
    spec, longest = backbone.spec, max(plan.train.sequence)
    if longest > spec.max_positions:
        raise ValueError(
            f"train.sequence asks for {longest} tokens; {spec.backbone_id} was built for {spec.max_positions}. Lower it"
        )
    method = dataclasses.replace(plan.method, checkpoint="none")
    method.validate(spec, plan.budget)
    router = Router(router_config(spec, **method.router_form())).to(spec.device)
    return SeKVObjective(backbone.model, router, method, plan.budget, plan.train, plan.backbone.prefill_chunk)


def build_trainer(
    plan: TrainPlan,
    backbone: Backbone,
    objective: SeKVObjective,
    accelerator: Accelerator,
    folder: Path,
    settings: dict[str, Any],
) -> Trainer:
    """Data stream, held-out samples and trainer of a plan."""
    train = plan.train
    curriculum = Curriculum(train.sequence, train.steps, train.effective_batch)
    stream = TokenStream(plan.documents, backbone.tokenizer, curriculum, train.windows_per_document, plan.seed)
    heldout = heldout_samples(plan, backbone, max(train.sequence))
    silent = RunReporter(train.steps, 0, Tracker(LoggerConfig(), folder, {}, ""))
    return Trainer(train, objective, backbone.spec, stream, heldout, accelerator, folder, silent, settings)


def calibrate(objective: SeKVObjective, plan: TrainPlan, backbone: Backbone) -> None:
    """Set the thresholds on the first samples of a stream of their own; the same ones in every process."""
    count = plan.train.calibration_samples
    if not count:
        return
    always = Curriculum((max(plan.train.sequence),), 1, 1)
    stream = TokenStream(plan.documents, backbone.tokenizer, always, windows_per_document=1, seed=plan.seed + 1)
    calibration = ThresholdCalibration(objective, plan.seed)
    for sample in itertools.islice(stream.samples(StreamState()), count):
        calibration.add(sample.ids.to(backbone.device).unsqueeze(0))
    spread = calibration.apply().std().item()
    log.info("thresholds calibrated on %d samples; spread of log tau over heads: %.2f", count, spread)


def heldout_samples(plan: TrainPlan, backbone: Backbone, length: int) -> list[Sample]:
    """The samples of every evaluation of the run: always the same, one per document."""
    if not plan.train.eval_every or not plan.train.eval_samples:
        return []
    always = Curriculum((length,), 1, 1)
    stream = TokenStream(plan.heldout, backbone.tokenizer, always, windows_per_document=1, seed=0)
    return list(itertools.islice(stream.samples(StreamState()), plan.train.eval_samples))


def export(trainer: Trainer, backbone: Backbone, plain: dict[str, Any]) -> Path:
    """Write the best router (the last one of a run without evaluation) for use, with how it was made."""
    progress = trainer.progress
    pointer = "best" if progress.best is not None else "last"
    folder = pointed(trainer.run, pointer)
    router = load_router(folder / "router.safetensors", trainer.spec).half()
    notes = {
        "command": shlex.join(["python", "train.py", *sys.argv[1:]]),
        "seed": str(plain["seed"]),
        "data": str({key: value for key, value in plain["data"].items() if value is not None}),
        "steps": str(progress.step),
        "exported_step": str(progress.best_step if pointer == "best" else progress.step),
        "training_seconds": f"{progress.seconds:.0f}",
        "tokens": str(progress.stream.tokens),
        "git": str(git_revision()),
    }
    path = trainer.run / "router.safetensors"
    save_router(router, path, backbone.config.name, notes)
    return path


def trajectory(plain: dict[str, Any]) -> dict[str, Any]:
    """The options that change what is learned, flat."""
    kept = {key: value for key, value in plain.items() if key not in FREE}
    kept["train"] = {key: value for key, value in kept["train"].items() if key not in FREE_TRAIN}
    return _flat(kept)


def output_folder(plain: dict[str, Any]) -> Path:
    """The run's own folder: named by its configuration, so that the same command resumes and others never collide."""
    name = config_hash({key: value for key, value in plain.items() if key not in FREE})
    if plain["output_dir"] is None:
        return Path("outputs") / f"train-{name}"
    folder = Path(str(plain["output_dir"])).expanduser()
    return folder / name if is_multirun() else folder


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _last_exists(folder: Path) -> bool:
    return (folder / "checkpoints" / f"{POINTERS[0]}.json").is_file()


def _placed(config: BackboneConfig, accelerator: Accelerator) -> BackboneConfig:
    """With several processes, each takes its own device."""
    if accelerator.num_processes == 1 or config.device != "auto" or config.device_map is not None:
        return config
    return dataclasses.replace(config, device=str(accelerator.device))


def main() -> None:
    """Command-line entry point."""
    run(train_job, "train")


if __name__ == "__main__":
    main()
