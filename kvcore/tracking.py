"""Weights & Biases beside a local log: online, offline, disabled or not installed, never a reason to stop a run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.log import get_logger

log = get_logger(__name__)
MODES = ("online", "offline", "disabled")
INIT_SECONDS = 8


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`conf/logger/*.yaml`.

    Attributes:
        mode: online, offline or disabled.
        project, entity, group: where the run appears.
        tags: labels of the run.
    """

    mode: str = "disabled"
    project: str = "sekv"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"logger.mode must be one of {', '.join(MODES)}; received {self.mode!r}")


class Tracker:
    """Writes every metric to `metrics.jsonl` in a folder, and to wandb when that is possible.

    Args:
        config: logger options.
        folder: of the run; must exist.
        run_config: the resolved configuration, plain nested data.
        name: name of the run.
    """

    def __init__(self, config: LoggerConfig, folder: Path, run_config: dict[str, Any], name: str) -> None:
        self.path = folder / "metrics.jsonl"
        self._run = _start_wandb(config, folder, run_config, name)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics (numbers, or anything json can hold)."""
        line = json.dumps({**({} if step is None else {"step": step}), **metrics})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if self._run is not None:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            self._run.log(numbers, step=step)

    def log_files(self, paths: list[Path]) -> None:
        """Attach pictures to the wandb run."""
        if self._run is None or not paths:
            return
        import wandb

        self._run.log({path.stem: wandb.Image(str(path)) for path in paths if path.suffix == ".png"})

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Attach a table to the wandb run."""
        if self._run is None or not rows:
            return
        import wandb

        columns: list[Any] = list(rows[0])
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({name: wandb.Table(columns=columns, data=data)})

    def finish(self) -> None:
        """Close the wandb run; quick in every mode."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _start_wandb(config: LoggerConfig, folder: Path, run_config: dict[str, Any], name: str) -> Any:
    """A wandb run, or None with the reason logged."""
    if config.mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        log.warning("logger.mode=%s but wandb is not installed (pip install wandb); logging to files only", config.mode)
        return None
    mode: Any = config.mode
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        log.warning("logger.mode=online but no wandb key is set (WANDB_API_KEY or `wandb login`); recording offline")
        mode = "offline"
    options: dict[str, Any] = {
        "project": config.project,
        "entity": config.entity,
        "group": config.group,
        "tags": list(config.tags),
        "dir": str(folder),
        "config": run_config,
        "name": name,
    }
    settings = wandb.Settings(init_timeout=INIT_SECONDS, silent=True)
    try:
        return wandb.init(mode=mode, settings=settings, **options)
    except wandb.errors.Error as error:
        log.warning("wandb could not start online (%s); recording offline", error)
        return wandb.init(mode="offline", settings=settings, **options)
