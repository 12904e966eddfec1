"""What a training run tells: a progress bar (or plain lines), and every record to the tracker (file and wandb)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvcore.tracking import Tracker

SHORT = {
    "loss": "loss",
    "loss/distill": "distill",
    "loss/listwise": "listwise",
    "loss/zoom": "zoom",
    "loss/reconstruction": "recon",
    "loss/budget": "budget",
    "effective_rank": "rank",
    "expansion_rate": "zoomed",
    "mass_found": "found",
    "skipped_documents": "skipped",
}
PLAIN_LINES = 50


class RunReporter:
    """Progress on the terminal, every record to the tracker.

    Args:
        steps: steps of the whole run.
        done: steps taken before.
        tracker: gets every record; it keeps a local file and knows about wandb.
        console: of the progress bar.
    """

    def __init__(self, steps: int, done: int, tracker: Tracker, console: Console | None = None) -> None:
        self.steps, self.tracker = steps, tracker
        self.console = console or Console()
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
        )
        self.task = self.bar.add_task("training", total=steps, completed=done, numbers="")

    def __enter__(self) -> RunReporter:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """One optimizer step."""
        self._write(record)
        step = record["step"]
        numbers = summary_line(record)
        self.bar.update(self.task, completed=step, numbers=numbers)
        every = max(1, self.steps // PLAIN_LINES)
        if not self.console.is_terminal and (step % every == 0 or step in (1, self.steps)):
            self.console.print(
                f"step {step}/{self.steps} {numbers} {record['seconds']:.0f}s", highlight=False, soft_wrap=True
            )

    def evaluation(self, record: dict[str, Any]) -> None:
        """Measures on held-out documents."""
        self._write(record)
        numbers = " ".join(f"{k.removeprefix('eval/')} {v:.4g}" for k, v in record.items() if k != "step")
        self.console.print(f"held out, step {record['step']}: {numbers}", highlight=False, soft_wrap=True)

    def _write(self, record: dict[str, Any]) -> None:
        self.tracker.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])


def summary_line(record: dict[str, Any]) -> str:
    """The loss parts and measures of a record, in a few words."""
    return " ".join(f"{short} {record[name]:.4g}" for name, short in SHORT.items() if name in record)


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step` (written by a session that went on after its last checkpoint)."""
    if not path.is_file():
        return
    lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(line + "\n" for line in lines))
    os.replace(temporary, path)


def _step_of(line: str) -> float:
    """The step of a record; infinite for a line that was cut short when the machine stopped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
