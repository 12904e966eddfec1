"""Checkpoints of a training run: router, optimizer, stream and random state; whole or not there at all.

RUN/checkpoints/step-00000100/{router.safetensors, optimizer.safetensors, trainer.json}, and two pointers,
RUN/checkpoints/last.json and best.json, each naming one of these folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcore.budget import ModelSpec
from sekv.checkpoint import load_router, save_router
from sekv.data import StreamState
from sekv.routing import Router

FORMAT = 1
POINTERS = ("last", "best")


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        stream: state of the token stream after them.
        best: lowest value of the evaluation so far; None before the first.
        best_step: step of that evaluation.
        seconds: training time so far, over all sessions.
        settings: every option that changes the trajectory; a resume with others is refused.
    """

    step: int
    stream: StreamState
    best: float | None
    best_step: int | None
    seconds: float
    settings: dict[str, Any]


def save_checkpoint(
    run: Path, router: Router, optimizer: torch.optim.Optimizer, progress: Progress, backbone_id: str
) -> Path:
    """Write one checkpoint folder; it appears whole or not at all.

    Args:
        run: folder of the run.
        router: being trained.
        optimizer: AdamW over `router.parameters()`, in their order.
        progress: where the run stands.
        backbone_id: of the frozen model.

    Returns:
        The checkpoint's folder.
    """
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{progress.step:08d}"
    staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        save_router(router, staging / "router.safetensors", backbone_id, {"step": str(progress.step)})
        save_file(_optimizer_tensors(router, optimizer), staging / "optimizer.safetensors")
        record = {
            "format": FORMAT,
            "step": progress.step,
            "stream": progress.stream.as_dict(),
            "best": progress.best,
            "best_step": progress.best_step,
            "seconds": progress.seconds,
            "settings": progress.settings,
        }
        (staging / "trainer.json").write_text(json.dumps(record, indent=1))
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def point_to(run: Path, pointer: str, target: Path) -> None:
    """Make `last` or `best` name a checkpoint, atomically."""
    assert pointer in POINTERS
    path = run / "checkpoints" / f"{pointer}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({"checkpoint": target.name}))
    os.replace(temporary, path)


def pointed(run: Path, pointer: str) -> Path:
    """The checkpoint that `last` or `best` names.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
    """
    path = run / "checkpoints" / f"{pointer}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run} holds no '{pointer}' checkpoint to resume from ({path} is missing)")
    target = path.parent / json.loads(path.read_text())["checkpoint"]
    if not (target / "trainer.json").is_file():
        raise FileNotFoundError(f"{path} names {target.name}, which is not a whole checkpoint")
    return target


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and those that `last` and `best` name, and unfinished ones."""
    folder = run / "checkpoints"
    named = {pointed(run, pointer) for pointer in POINTERS if (folder / f"{pointer}.json").is_file()}
    steps = sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name))
    for path in [*steps[:-keep], *folder.glob(".writing-*")]:
        if path not in named:
            shutil.rmtree(path)


def load_checkpoint(
    folder: Path,
    router: Router,
    optimizer: torch.optim.Optimizer,
    spec: ModelSpec,
    settings: dict[str, Any],
) -> Progress:
    """Continue from a checkpoint: fills the router, the optimizer and torch's random state.

    Raises:
        ValueError: a checkpoint of another backbone, shape or router form, or a run with other settings.
    """
    record = json.loads((folder / "trainer.json").read_text())
    if record.get("format") != FORMAT:
        raise ValueError(f"{folder} is a training checkpoint of format {record.get('format')}; expected {FORMAT}")
    _check_settings(folder, record["settings"], settings)
    stored = load_router(folder / "router.safetensors", spec)
    if stored.config != router.config:
        raise ValueError(f"{folder} holds a router of the form {stored.config}; this run trains {router.config}")
    router.load_state_dict(stored.state_dict())
    _fill_optimizer(router, optimizer, load_file(folder / "optimizer.safetensors"))
    return Progress(
        record["step"],
        StreamState(**record["stream"]),
        record["best"],
        record["best_step"],
        record["seconds"],
        settings,
    )


def _check_settings(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    different = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
    if different:
        pairs = "; ".join(f"{name}: {stored.get(name)} there, {wanted.get(name)} here" for name in different)
        raise ValueError(f"{folder} cannot be resumed with other settings ({pairs}). Start a new run, or restore them")


def _optimizer_tensors(router: Router, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"rng.torch": torch.get_rng_state()}
    for name, parameter in router.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value.detach().cpu().contiguous()
    return tensors


def _fill_optimizer(router: Router, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors.pop("rng.torch"))
    parameters = dict(router.named_parameters())
    for stored, tensor in tensors.items():
        key, _, name = stored.partition(".")
        parameter = parameters[name]
        optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)
