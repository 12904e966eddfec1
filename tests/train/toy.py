"""A toy objective: the trainer's loop without a language model, quick enough to run hundreds of steps.

Run as a script it trains, for the tests with several processes and with signals.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from kvcore.budget import ModelSpec
from kvcore.tiny import byte_tokenizer
from sekv.data import Sample, StreamState, TokenStream
from sekv.documents import TextDocuments
from sekv.routing import Router
from sekv.schedule import Curriculum
from sekv.train_config import LossConfig, TrainConfig
from sekv.trainer import SampleResult, Trainer

LAYERS = 2
SPEC = ModelSpec(
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
    max_positions=512,
    sliding_windows=(None,) * LAYERS,
    backbone_id="toy",
)


def toy_router() -> Router:
    from sekv.checkpoint import router_config

    return Router(router_config(SPEC, maps="untied", summary="mean", map_rank=2))


class ToyObjective:
    """Pulls every parameter towards a value that depends on the sample; `poison_step` makes one loss NaN."""

    def __init__(self, poison_step: int | None = None) -> None:
        self.router, self.poison_step = toy_router(), poison_step

    def _parts(self, ids: Tensor) -> Tensor:
        wanted = ids.float().mean() / 300 + ids[0, 0] / 300
        return torch.stack(
            [sum((p[layer % len(p)] - wanted).square().mean() for p in self.router.parameters()) for layer in (0, 1)]
        )

    def accumulate(self, ids: Tensor, step: int, scale: float, budget_weight: float) -> SampleResult:
        values = self._parts(ids)
        loss = values.mean() * (1 + budget_weight)
        (loss * scale).backward()
        values = values.detach()
        if step == self.poison_step:
            values[1] = float("nan")
        return SampleResult({"listwise": values}, {"expansion_rate": values.mean()}, loss.detach())

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> dict[str, Tensor]:
        return {"criterion": self._parts(ids).mean()}


class ListReporter:
    """Keeps records; sends this process a signal after a step when asked to."""

    def __init__(self, stop_after: int | None = None, number: int = signal.SIGTERM) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.stop_after, self.number = stop_after, number

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)
        if record["step"] == self.stop_after:
            os.kill(os.getpid(), self.number)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)


def documents() -> list[tuple[str, str]]:
    return [(f"doc{i}", chr(97 + i) * (20 + 13 * i) + "xyz" * 10) for i in range(7)]


def toy_config(**options: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": 20,
        "sequence": (24, 40),
        "query_tokens": 8,
        "effective_batch": 4,
        "losses": LossConfig(distill=0.0, listwise=1.0, zoom=0.0, reconstruction=0.0),
        "windows_per_document": 2,
        "eval_every": 5,
        "eval_samples": 3,
        "save_every": 7,
    }
    return TrainConfig(**{**values, **options})


def toy_trainer(run: Path, reporter: ListReporter, objective: ToyObjective | None = None, **options: Any) -> Trainer:
    config = toy_config(**options)
    curriculum = Curriculum(config.sequence, config.steps, config.effective_batch)
    stream = TokenStream(TextDocuments(documents), byte_tokenizer(), curriculum, config.windows_per_document)
    heldout = [Sample(torch.arange(40) + i, f"h{i}", i, StreamState()) for i in range(config.eval_samples)]
    return Trainer(
        config, objective or ToyObjective(), SPEC, stream, heldout, Accelerator(cpu=True), run, reporter, {"seed": 0}
    )


def main() -> None:
    """toy.py RUN: trains and writes RUN/records.json (from the main process)."""
    run, reporter = Path(sys.argv[1]), ListReporter()
    trainer = toy_trainer(run, reporter)
    trainer.train()
    if trainer.accelerator.is_main_process:
        processes = trainer.accelerator.num_processes
        record = {"steps": reporter.steps, "evaluations": reporter.evaluations, "processes": processes}
        (run / "records.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
