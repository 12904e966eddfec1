"""Bytes of a compressed cache, part by part, before any model is loaded: no weights, no hub, no data.

    python scripts/plan_memory.py backbone=llama31_8b context=131072 budget=0.1
    python scripts/plan_memory.py backbone=qwen3_8b method=freqdepth context=32768 budget=0.26 batch=4
    python scripts/plan_memory.py backbone=smollm2_135m context=2048 budget=0.1 results=results/quickstart.json
    python scripts/plan_memory.py table      # the table of docs/use_in_your_project.md

Arguments are those of evaluate.py (backbone, method, budget, budget_scope, method.sekv.window=64, ...), and `context`
in tokens, `batch` in rows, and `results`: files of evaluate.py to take measured traffic from. `backbone.dtype=auto`
means bfloat16, as on an accelerator.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import freqdepth
import kvcore.baselines
import sekv
from freqdepth.cache import window_line_bytes, window_policy
from freqdepth.method import FreqDepth
from kvcore.backbone import BackboneConfig
from kvcore.baselines.quest import Quest
from kvcore.baselines.retroinfer import RetroInfer
from kvcore.baselines.sentencekv import SentenceKV
from kvcore.bench.plan import method_from_config
from kvcore.budget import Budget, ModelSpec
from kvcore.cli import check_overrides, config_dir, fail, resolved
from kvcore.method import Method
from kvcore.options import typed_options
from kvcore.shapes import SHAPES, backbone_shape
from sekv.method import SeKV
from sekv.plan import LAYER_COUNTERS, MAP_INDEX_BYTES, SHARED_COUNTERS, SPAN_INDEX_BYTES, Planner

REGISTERED = (kvcore.baselines, sekv, freqdepth)  # importing them fills the registry
OWN = ("context", "batch", "results")
RETRIEVING = (Quest, RetroInfer, SentenceKV)  # their tokens live on the host
NOMINAL_BITS = 4  # width at which coefficients of FreqDepthKV are counted; the real ones follow the spectrum
TABLE_CONTEXTS = (8192, 32768, 131072)
HOST_COUNTERS = 64  # bytes per row and layer, at most: lengths and fill levels that the Python side keeps
STORE_GROWTH = 8  # `sekv.rows.TokenStore` makes room for an eighth more when generated tokens first arrive


@dataclass
class MemoryPlan:
    """Bytes of a cache of one row.

    Attributes:
        device, host: bytes by part.
        traffic: most host-to-device bytes per generated token; None where the method does not bound it.
        notes: how to read the numbers.
    """

    device: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    traffic: float | None = None
    notes: list[str] = field(default_factory=list)


def plan_memory(method: Method, spec: ModelSpec, budget: Budget, context: int) -> MemoryPlan:
    """The plan of one row of `context` tokens right after its prefill.

    Raises:
        NotImplementedError, ValueError: a budget that the method cannot serve.
    """
    counters = {"lengths of the rows, at most": float(HOST_COUNTERS * spec.num_layers)}
    if method.name == "full" or budget.is_full:
        return MemoryPlan({"keys and values": spec.full_bytes(context)}, counters, traffic=0.0)
    if isinstance(method, SeKV):
        return plan_sekv(method, spec, budget, context)
    method.validate(spec, budget)
    if isinstance(method, FreqDepth):
        return plan_freqdepth(method, spec, budget, context)
    allowed = budget.device_bytes(spec, context)
    plan = MemoryPlan({"entries and their side data, at most": allowed}, counters, traffic=0.0)
    if isinstance(method, RETRIEVING) and getattr(method, "offload", True):
        plan.host["keys and values"] = spec.full_bytes(context)
        plan.traffic = None
        plan.notes.append("Traffic follows what is retrieved: give results= for measured numbers.")
    if method.reference_only:
        plan.device = {"keys and values": spec.full_bytes(context)}
        plan.notes.append("A reference that stores everything.")
    return plan


def plan_sekv(method: SeKV, spec: ModelSpec, budget: Budget, context: int) -> MemoryPlan:
    """SeKV's own split; only the number of spans depends on the text, and it moves a few bytes between parts."""
    planner = Planner(spec, budget, method)
    form = planner.choose_sketch(context)
    window, block = planner.window(context)
    window = min(window, context)
    middle = max(context - window - method.num_sinks, 0)
    segments = planner.segment_options()
    if method.segmentation == "paper":
        raise ValueError("segmentation=paper keeps what the text asks for: its bytes cannot be planned ahead")
    spans = max(1, middle // segments.span_tokens)
    anchored = method.segmentation == "budget" and method.anchors
    pinned = method.num_sinks + (math.ceil(method.anchor_share * middle) if anchored else 0)
    split = planner.plan(context, window, block, pinned, spans)
    heads, dim = spec.num_layers * spec.num_kv_heads, spec.head_dim
    mapped = context - window if split.mapped else 0
    sketch = method.summary == "sketch"
    counters = SHARED_COUNTERS + LAYER_COUNTERS * spec.num_layers
    plan = MemoryPlan()
    plan.device = {
        "window": (window + block) * spec.entry_bytes * heads,
        "slots (pinned tokens and factor cache)": split.slots * planner.slot_bytes * heads,
        "sketch of the keys": form.device_bytes(mapped, dim) * heads if split.mapped and sketch else 0,
        "coarse entries": spans * planner.coarse_bytes() * heads if split.mapped else 0,
        "indices": mapped * MAP_INDEX_BYTES + (spans * SPAN_INDEX_BYTES if split.mapped else 0) + counters,
        "steps of the row codec": 4 * dim * heads if method.row_bits else 0,
        "expansion buffer (once for all layers)": split.buffer * planner.row_bytes * spec.num_kv_heads,
    }
    rows = (context - window) * planner.row_bytes * heads
    where = plan.host if method.offload else plan.device
    where["token rows"] = rows
    plan.host["analysis rows of the sketch"] = 4 * form.dims * dim * heads if sketch else 0
    plan.host["room for generated tokens, once some leave the window"] = rows // STORE_GROWTH
    # the hard limit; the budget may leave a smaller buffer, by a few spans more or fewer
    most = min(math.floor(method.max_zoom * context), mapped)
    plan.traffic = float(most * planner.row_bytes * heads) if method.offload else 0.0
    plan.notes.append(
        f"Traffic is an upper bound: max_zoom={method.max_zoom:g} lets every layer and head fetch {most} tokens per "
        f"step, and the buffer that the budget pays for holds about {split.buffer}. Measured traffic: give results=."
    )
    return plan


def plan_freqdepth(method: FreqDepth, spec: ModelSpec, budget: Budget, context: int) -> MemoryPlan:
    """The exact part is fixed; the rest of the budget is divided by the probe, here at one nominal width."""
    policy = window_policy(method, budget, context, spec.dtype)
    allowed = budget.device_bytes(spec, context)
    heads = spec.num_layers * spec.num_kv_heads
    if policy.limit is not None:
        return MemoryPlan({"exact tokens": policy.limit * spec.entry_bytes * heads}, traffic=0.0)
    window = heads * window_line_bytes(policy, spec)
    middle = context - policy.num_sinks - policy.window % policy.fold
    side = method.block_size * spec.head_dim * (spec.num_kv_heads if method.heads == "joint" else 1)
    coefficient = middle * NOMINAL_BITS / 8  # of one coefficient: a number per token, ...
    basis = side * (method.basis_bits or 8) / 8  # ... a column of the basis, ...
    scales = 2.0 * spec.dtype.itemsize  # ... a step and an offset
    rank = max(allowed - window, 0) / (coefficient + basis + scales)
    plan = MemoryPlan(traffic=0.0)
    plan.device = {
        "window and sinks": window,
        f"coefficients ({NOMINAL_BITS} bits)": rank * coefficient,
        "bases": rank * basis,
        "scales": rank * scales,
    }
    plan.notes += [
        f"The probe divides what the window leaves between coefficients of {list(method.coefficient_bits)} bits, "
        "bases, residuals (at most 30% of it) and exact heads. Coefficients, bases and scales are given as if all "
        f"went to coefficients of {NOMINAL_BITS} bits; their sum is at most the budget, whatever the probe decides.",
    ]
    return plan


def measured_traffic(paths: list[str], label: str, budget: float | int) -> list[dict[str, Any]]:
    """One summary row per backbone, bench and context of a method at a budget, from results files."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["summary"]
        for row in sorted(rows, key=lambda row: row["task"] not in ("all", "mean")):
            if row["method"] == label and row["budget"] == budget and row.get("h2d_bytes_per_token") is not None:
                found.setdefault((row["backbone"], row["bench"], row["context"]), row)
    return list(found.values())


def compose(arguments: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration of evaluate.py's arguments, and this script's own ones.

    Raises:
        ValueError: an unknown argument, or no context.
    """
    own = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in OWN}
    others = [a for a in arguments if a.partition("=")[0] not in OWN]
    if not any(a.startswith("method=") for a in others):
        others.append("method=sekv")
    problem = check_overrides(others, "evaluate")
    if problem:
        raise ValueError(problem)
    if not own.get("context", "").isdigit() or not own.get("batch", "1").isdigit():
        raise ValueError("give whole numbers: context=TOKENS, for example context=131072, and batch=ROWS")
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return resolved(hydra.compose("evaluate", others)), own


def overview(budget: float = 0.1) -> str:
    """A Markdown table of the configured models at common contexts, bfloat16, one row of text each."""
    lines = [
        "| model | context (tokens) | full cache (GiB) | any method at 10%, device (GiB) | sekv at 10%, host (GiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    for path in SHAPES:
        spec = backbone_shape(BackboneConfig(name=path, path=path))
        for context in (c for c in TABLE_CONTEXTS if c <= spec.max_positions):
            plan = plan_memory(SeKV(checkpoint="none"), spec, Budget(budget), context)
            sizes = (spec.full_bytes(context), sum(plan.device.values()), sum(plan.host.values()))
            cells = " | ".join(f"{size / 2**30:.2f}" for size in sizes)
            lines.append(f"| {path.split('/')[1]} | {context:,} | {cells} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print one table per method and budget."""
    if arguments == ["table"]:
        print(overview())
        return
    config, own = compose(arguments)
    context, batch = int(own["context"]), int(own.get("batch", "1"))
    spec = backbone_shape(typed_options(BackboneConfig, config["backbone"], "backbone"))
    budgets = config["budget"] if isinstance(config["budget"], list) else [config["budget"]]
    results = [path for path in own.get("results", "").strip("[]").split(",") if path]
    console = Console(width=110, highlight=False)
    if context > spec.max_positions:
        console.print(f"note: {spec.backbone_id} was built for {spec.max_positions} tokens")
    for label, options in config["method"].items():
        method = method_from_config(label, options or {})
        for budget in [1.0] if method.ignores_budget else budgets:
            plan = plan_memory(method, spec, Budget(budget, config["budget_scope"]), context)
            console.print(as_table(plan, spec, f"{label}, budget {budget:g}", context, batch))
            for note in plan.notes:
                console.print(note)
            for row in measured_traffic(results, label, budget):
                console.print(
                    f"measured: {row['h2d_bytes_per_token'] / 1024:.0f} KiB per token, attended "
                    f"{row['attended_share']:.3f}, device share {row['device_share']:.3f} ({row['bench']} on "
                    f"{row['backbone']}, context {row['context']}, n={row['n']})"
                )


def as_table(plan: MemoryPlan, spec: ModelSpec, title: str, context: int, batch: int) -> Table:
    """Parts, sums and traffic of `batch` rows."""
    full = spec.full_bytes(context)
    dtype = str(spec.dtype).removeprefix("torch.")
    table = Table(title=f"{spec.backbone_id} ({dtype}), {context} tokens, batch {batch}: {title}", title_justify="left")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("% of the full cache", justify="right")

    def add(name: str, value: float) -> None:
        table.add_row(name, f"{batch * value / 2**20:,.1f}", f"{100 * value / full:.2f}")

    for place, parts in (("device", plan.device), ("host", plan.host)):
        for name, value in parts.items():
            add(f"{place}: {name}", value)
        if parts:
            add(f"{place}, together", sum(parts.values()))
            table.add_section()
    add("full cache", full)
    if plan.traffic is not None:
        table.add_row("host to device per generated token, at most", f"{batch * plan.traffic / 2**20:,.1f}", "")
    return table


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        fail(str(error))
