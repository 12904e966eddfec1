"""The training loop: accumulation, processes, schedule, evaluation, checkpoints, signals, divergence.

The objective does the forward and backward of one sample; this file knows nothing about attention.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from kvcore.budget import ModelSpec
from kvcore.log import get_logger
from sekv.data import Sample, StreamState, TokenStream, sample_loader
from sekv.routing import Router
from sekv.schedule import budget_weight, learning_rate_factor
from sekv.train_config import TrainConfig
from sekv.training_state import Progress, load_checkpoint, point_to, pointed, prune, save_checkpoint

log = get_logger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DivergedError(RuntimeError):
    """A loss or gradient became NaN or infinite; names the step, the loss part and the layer."""


class Interrupted(SystemExit):
    """The run was asked to stop; it saved a checkpoint first. The exit code is 128 + the signal's number."""


@dataclass
class SampleResult:
    """What one sample gave.

    Attributes:
        parts: loss part -> unweighted values, one per layer (fp32 [L]), or one in all (fp32 [1]).
        measures: measure -> 0-d fp32.
        loss: 0-d fp32, the weighted sum.
    """

    parts: dict[str, Tensor]
    measures: dict[str, Tensor]
    loss: Tensor


class Objective(Protocol):
    """Forward and backward of one sample."""

    router: Router

    def accumulate(self, ids: Tensor, step: int, scale: float, budget_weight: float) -> SampleResult:
        """Add `scale` x the gradient of the sample's loss to the router's parameters."""

    def evaluate(self, ids: Tensor) -> dict[str, Tensor]:
        """Measures of a held-out sample; `criterion` among them, lower is better."""


class Reporter(Protocol):
    """Where records go: progress bar, local file, wandb."""

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


@dataclass
class Trainer:
    """One run.

    Attributes:
        config: options.
        objective: the losses; its router is trained.
        spec: shape and id of the backbone.
        stream: of training samples.
        heldout: samples of the evaluation, the same list in every process.
        accelerator: processes and devices.
        run: folder of the run.
        reporter: records; used by the main process alone.
        settings: options that change the trajectory, for resume.
    """

    config: TrainConfig
    objective: Objective
    spec: ModelSpec
    stream: TokenStream
    heldout: list[Sample]
    accelerator: Accelerator
    run: Path
    reporter: Reporter
    settings: dict[str, Any]
    progress: Progress = field(init=False)
    _signal: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        world = self.accelerator.num_processes
        if self.config.effective_batch % world:
            raise ValueError(
                f"train.effective_batch must be a multiple of the number of processes; received "
                f"{self.config.effective_batch} and {world} processes"
            )
        self.accumulation = self.config.effective_batch // world
        self.parameters = list(self.objective.router.parameters())
        self.optimizer = build_optimizer(self.objective.router, self.config)
        self.progress = Progress(0, StreamState(), None, None, 0.0, self.settings)

    def resume(self) -> None:
        """Continue from the run's last checkpoint."""
        folder = pointed(self.run, "last")
        self.progress = load_checkpoint(folder, self.objective.router, self.optimizer, self.spec, self.settings)
        if self.accelerator.is_main_process:
            # a run killed between its two pointers: this checkpoint is the best one, and nothing names it
            if self.progress.best_step == self.progress.step:
                point_to(self.run, "best", folder)
            prune(self.run, self.config.keep)
        log.info("resuming %s at step %d", folder, self.progress.step)

    def train(self) -> None:
        """Run to the last step.

        Raises:
            DivergedError: NaN or infinity; the last good checkpoint is kept.
            Interrupted: SIGTERM or Ctrl-C; a checkpoint was written.
        """
        samples = sample_loader(
            self.stream,
            self.progress.stream,
            self.progress.step * self.config.effective_batch,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.config.workers,
        )
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            while self.progress.step < self.config.steps:
                self._step(samples)
                self._after_step()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal:  # asked twice: stop at once
            raise KeyboardInterrupt
        self._signal = number
        log.warning("stopping after this step (%s); a second signal stops at once", signal.Signals(number).name)

    def _step(self, samples: Iterator[Sample]) -> None:
        started = time.perf_counter()
        step, config = self.progress.step, self.config
        factor = learning_rate_factor(step, config.steps, config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.zero_grad(set_to_none=True)
        weight = budget_weight(step, config.steps, config.losses.budget)
        results, taken = [], []
        for _ in range(self.accumulation):
            sample = next(samples)
            ids = sample.ids.to(self.spec.device).unsqueeze(0)
            results.append(self.objective.accumulate(ids, step, 1.0 / self.accumulation, weight))
            taken.append(sample)
        parts, measures, loss = self._mean_over_samples(results)
        check_finite(parts, step + 1)
        grad_norm = self._reduce_gradients(step + 1)
        self.optimizer.step()
        self.progress.seconds += time.perf_counter() - started
        self.progress.step = step + 1
        # the processes take samples in turn: the step ends where the last of them stands
        self.progress.stream = max(self._gather([taken[-1].state]), key=lambda state: state.index)
        names = self._gather([sample.name for sample in taken])
        if self.accelerator.is_main_process and self.progress.step % config.log_every == 0:
            self.reporter.step(
                {
                    "step": self.progress.step,
                    "loss": loss,
                    **{f"loss/{name}": float(values.mean()) for name, values in parts.items()},
                    **measures,
                    "learning_rate": config.learning_rate * factor,
                    "budget_weight": weight,
                    "grad_norm": grad_norm,
                    "tokens": self.progress.stream.tokens,
                    "skipped_documents": self.progress.stream.skipped,
                    "seconds": self.progress.seconds,
                    "samples": names,
                }
            )

    def _after_step(self) -> None:
        step, config = self.progress.step, self.config
        last = step == config.steps
        stopping = int(self._reduce(torch.tensor([float(self._signal)]), "sum").item())
        improved = False
        if config.eval_every and self.heldout and (step % config.eval_every == 0 or last):
            improved = self._evaluate()
        if improved or last or stopping or step % config.save_every == 0:
            self._save(improved)
        if stopping and not last:
            raise Interrupted(128 + (self._signal or SIGNALS[0]))

    def _save(self, improved: bool) -> None:
        if self.accelerator.is_main_process:
            target = save_checkpoint(
                self.run, self.objective.router, self.optimizer, self.progress, self.spec.backbone_id
            )
            point_to(self.run, "last", target)
            if improved:
                point_to(self.run, "best", target)
            prune(self.run, self.config.keep)
        self.accelerator.wait_for_everyone()

    def _evaluate(self) -> bool:
        """Measures on the held-out samples; whether they are the best so far."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        rows = [self.objective.evaluate(s.ids.to(self.spec.device).unsqueeze(0)) for s in self.heldout[rank::world]]
        names = sorted(rows[0]) if rows else []
        names = max(self._gather([names]), key=len)
        sums = (
            torch.stack([torch.stack([row[n].float().cpu() for n in names]) for row in rows]).sum(0) if rows else None
        )
        total = self._reduce(torch.zeros(len(names)) if sums is None else sums, "sum") / len(self.heldout)
        record = dict(zip(names, total.tolist(), strict=True))
        improved = self.progress.best is None or record["criterion"] < self.progress.best
        if improved:
            self.progress.best, self.progress.best_step = record["criterion"], self.progress.step
        if self.accelerator.is_main_process:
            self.reporter.evaluation({"step": self.progress.step, **{f"eval/{k}": v for k, v in record.items()}})
        return improved

    # --- means over samples and processes
    def _mean_over_samples(self, results: list[SampleResult]) -> tuple[dict[str, Tensor], dict[str, float], float]:
        parts = {
            name: self._reduce(torch.stack([r.parts[name].cpu() for r in results]).mean(0)) for name in results[0].parts
        }
        names = sorted(results[0].measures)
        rows = torch.stack([torch.stack([r.loss.cpu(), *(r.measures[n].cpu() for n in names)]) for r in results])
        loss, *measures = self._reduce(rows.float().mean(0)).tolist()
        return parts, dict(zip(names, measures, strict=True)), loss

    def _reduce_gradients(self, step: int) -> float:
        """Mean of the gradients over the processes, clipped; their norm before clipping.

        Raises:
            DivergedError: a gradient is NaN or infinite.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.accelerator.num_processes > 1:
            flat = self._reduce(torch.cat([grad.flatten() for grad in grads]))
            for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(values.view_as(grad))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm):
            named = self.objective.router.named_parameters()
            names = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
            raise DivergedError(f"step {step}: the gradient of {', '.join(names)} is not finite. {REMEDY}")
        return norm

    def _reduce(self, tensor: Tensor, reduction: str = "mean") -> Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), reduction=reduction).to(tensor.device)

    def _gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes, sample by sample in global order."""
        if self.accelerator.num_processes == 1:
            return items
        from accelerate.utils import gather_object

        gathered, count = gather_object(items), len(items)
        return [gathered[rank * count + i] for i in range(count) for rank in range(self.accelerator.num_processes)]


def build_optimizer(router: Router, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; thresholds have a learning rate of their own, and no decay towards a fixed threshold."""
    thresholds = [router.raw_tau]
    others = [parameter for parameter in router.parameters() if parameter is not router.raw_tau]
    threshold_rate = config.threshold_learning_rate or config.learning_rate
    groups = [
        {"params": others, "peak": config.learning_rate, "weight_decay": config.weight_decay},
        {"params": thresholds, "peak": threshold_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


REMEDY = (
    "The last good checkpoint is kept; resume from it with a lower train.learning_rate or train.max_grad_norm in a new "
    "run, and check the data of this step"
)


def check_finite(parts: dict[str, Tensor], step: int) -> None:
    """Refuse NaN and infinite losses.

    Raises:
        DivergedError: names the step, the loss part and the layer.
    """
    for name, values in parts.items():
        bad = (~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            where = f"layer {bad[0]}" if len(values) > 1 else "the model's output"
            raise DivergedError(f"step {step}: loss part '{name}' is {float(values[bad[0]])} in {where}. {REMEDY}")
