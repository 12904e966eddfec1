"""Prefill and decode time of methods against the full cache, in processor time, steps interleaved in one process.

    python scripts/bench_decode.py
    python scripts/bench_decode.py --methods sekv freqdepth --context 4096 --steps 48 --dtype bfloat16 --threads 1
    python scripts/bench_decode.py --methods snapkv kivi sekv --budgets 0.1 0.2 | tail -1 > times.json

Processor time of one thread and interleaved steps make the ratios hold on a busy machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

import freqdepth
import kvcore.baselines
import sekv
from kvcore.attention import cache_argument, prefill
from kvcore.backbone import Backbone, BackboneConfig, load_backbone
from kvcore.budget import Budget, UnreachableBudgetError
from kvcore.environment import environment
from kvcore.method import Method, build_method
from kvcore.options import typed_options
from kvcore.text import load_documents, token_windows

REGISTERED = (kvcore.baselines, sekv, freqdepth)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", default="smollm2_135m", help="a name in conf/backbone")
    parser.add_argument("--methods", nargs="+", default=["sekv", "freqdepth"])
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.1], help="a method that cannot reach one skips it"
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--steps", type=int, default=48, help="decoded tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir", help="documents; the embedded text otherwise")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        methods = [build_method(name) for name in dict.fromkeys(["full", *options.methods])]
        backbone = load_backbone(backbone_config(options.backbone, options.dtype))
        rows = measure(backbone, reachable(backbone, methods, options.budgets), options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(as_table(rows, options))
    print(json.dumps({"options": vars(options), "rows": rows, "environment": environment(backbone.device)}))
    return 0


def backbone_config(name: str, dtype: str) -> BackboneConfig:
    """The backbone of `conf/backbone`, in a dtype."""
    with initialize_config_module("conf", version_base=None):
        plain = OmegaConf.to_container(compose(f"backbone/{name}"), resolve=True)
    assert isinstance(plain, dict)
    options: dict[str, Any] = {str(k): v for k, v in plain.get("backbone", plain).items()}
    return typed_options(BackboneConfig, options | {"dtype": dtype}, "backbone")


def reachable(backbone: Backbone, methods: list[Method], budgets: list[float]) -> list[tuple[Method, float]]:
    """Every method at every budget that it reaches; the full cache once, first."""
    runs = []
    for method in methods:
        for budget in [1.0] if method.ignores_budget else budgets:
            try:
                method.validate(backbone.spec, Budget(budget))
            except UnreachableBudgetError as error:
                print(f"left out: {error}", file=sys.stderr)
            else:
                runs.append((method, budget))
    return runs


@torch.inference_mode()
def measure(backbone: Backbone, runs: list[tuple[Method, float]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of prefill and milliseconds per decoded token of every method; the first is what ratios compare with."""
    documents = load_documents(options.data_dir)
    window = token_windows(documents, backbone.tokenizer, options.context + options.steps, 1, 0)[0]
    ids = torch.tensor([window.token_ids], device=backbone.device)
    backbone.model(input_ids=ids[:, :64])
    prefills, caches = [], []
    for method, budget in runs:
        cache = method.new_cache(backbone.model, budget)
        began = time.process_time()
        prefill(backbone.model, cache, ids[:, : options.context])
        prefills.append(time.process_time() - began)
        caches.append(cache)
    steps: list[list[float]] = [[] for _ in runs]
    for position in range(options.context, options.context + options.steps):
        for cache, times in zip(caches, steps, strict=True):
            began = time.process_time()
            backbone.model(input_ids=ids[:, position : position + 1], **cache_argument(cache))
            times.append(1000 * (time.process_time() - began))
    medians, means = [statistics.median(times) for times in steps], [statistics.mean(times) for times in steps]
    return [
        {
            "method": method.name,
            "budget": budget,
            "prefill_seconds": prefills[index],
            "prefill_ratio": prefills[index] / prefills[0],
            "ms_per_token_median": medians[index],
            "ms_per_token_mean": means[index],
            "decode_ratio_median": medians[index] / medians[0],
            "decode_ratio_mean": means[index] / means[0],
            **caches[index].ledger.as_row(),
        }
        for index, (method, budget) in enumerate(runs)
    ]


def as_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """One line per method."""
    table = Table(title=f"context {options.context}, {options.dtype}, processor time")
    for column in ("method", "budget", "prefill s", "ratio", "ms/token (median)", "ratio", "ms/token (mean)", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['budget']:g}",
            f"{row['prefill_seconds']:.2f}",
            f"{row['prefill_ratio']:.2f}",
            f"{row['ms_per_token_median']:.1f}",
            f"{row['decode_ratio_median']:.2f}",
            f"{row['ms_per_token_mean']:.1f}",
            f"{row['decode_ratio_mean']:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
