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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcore.bench.results import remove_unfinished, write_atomically
from kvcore.budget import ModelSpec
from sekv.checkpoint import load_router, save_router, write_tensors
from sekv.data import StreamState
from sekv.routing import Router

FORMAT = 1
POINTERS = ("last", "best")
T = TypeVar("T")


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
        write_tensors(_optimizer_tensors(router, optimizer), staging / "optimizer.safetensors")
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
    write_atomically(path, json.dumps({"checkpoint": target.name}))


def pointed(run: Path, pointer: str) -> Path:
    """The checkpoint that `last` or `best` names.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
        ValueError: the pointer is damaged.
    """
    path = run / "checkpoints" / f"{pointer}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run} holds no '{pointer}' checkpoint to resume from ({path} is missing)")
    try:
        target = path.parent / Path(json.loads(path.read_text())["checkpoint"]).name
    except (ValueError, KeyError, TypeError) as error:
        whole = sorted(found.parent.name for found in path.parent.glob("step-*/trainer.json"))
        raise ValueError(
            f'{path} is damaged ({error}); write {{"checkpoint": "STEP"}} into it, STEP one of '
            f"{', '.join(whole) or '(none is whole: start a new run)'}"
        ) from error
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
    remove_unfinished(folder)


def load_checkpoint(
    folder: Path,
    router: Router,
    optimizer: torch.optim.Optimizer,
    spec: ModelSpec,
    settings: dict[str, Any],
) -> Progress:
    """Continue from a checkpoint: fills the router, the optimizer and torch's random state.

    Raises:
        ValueError: a checkpoint of another backbone, shape or router form, a run with other settings, or a damaged
            file (named, with the remedy).
    """
    record = _read(folder / "trainer.json", lambda path: dict(json.loads(path.read_text())))
    if record.get("format") != FORMAT:
        raise ValueError(f"{folder} is a training checkpoint of format {record.get('format')}; expected {FORMAT}")
    _check_settings(folder, record.get("settings") or {}, settings)
    stored = load_router(folder / "router.safetensors", spec)
    if stored.config != router.config:
        raise ValueError(f"{folder} holds a router of the form {stored.config}; this run trains {router.config}")
    router.load_state_dict(stored.state_dict())
    tensors = _read(folder / "optimizer.safetensors", load_file)
    _read(folder / "optimizer.safetensors", lambda _: _fill_optimizer(router, optimizer, tensors))
    return _read(
        folder / "trainer.json",
        lambda _: Progress(
            record["step"],
            StreamState(**record["stream"]),
            record["best"],
            record["best_step"],
            record["seconds"],
            settings,
        ),
    )


def _read(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of a file.

    Raises:
        ValueError: it cannot; names the file and the remedy.
    """
    try:
        return read(path)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}). Let {path.parent.parent}/last.json "
            f"name another whole checkpoint beside {path.parent.name}, or start a new run with another output_dir"
        ) from error


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
