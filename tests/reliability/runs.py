"""The runs that the fault tests disturb: a toy evaluation and a toy training, and what must come out of them."""

from __future__ import annotations

import json
from pathlib import Path

from evaluation_cases import toy_plan

from kvcore.bench.runner import evaluate
from sekv.checkpoint import load_router
from sekv.training_state import pointed
from tests.train.toy import ListReporter, toy_trainer


def predictions(results: dict) -> list[tuple]:
    return [(r["id"], r["label"], r["budget"], r["prediction"], r["metrics"]) for r in results["samples"]]


def evaluate_toy(run: Path) -> dict:
    return evaluate(*toy_plan(), run)


def train_toy(run: Path) -> None:
    """Train, or go on: 20 steps, a checkpoint every second one and an evaluation every fifth."""
    trainer = toy_trainer(run, ListReporter(), save_every=2)
    if (run / "checkpoints" / "last.json").is_file():
        trainer.resume()
    trainer.train()


def outcome_of_training(run: Path) -> tuple[dict, dict]:
    """The last record with the names of the last and best checkpoints, and the router's weights."""
    folder = pointed(run, "last")
    record = json.loads((folder / "trainer.json").read_text())
    best = pointed(run, "best").name
    return {**record, "seconds": None, "pointed": (folder.name, best)}, load_router(
        folder / "router.safetensors"
    ).state_dict()
