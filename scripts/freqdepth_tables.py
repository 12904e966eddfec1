"""The energy and KL tables of the depth transforms, from scratch, on the embedded backbone.

    python scripts/freqdepth_tables.py data_dir=FOLDER_OR_GLOB            # both tables, 3 documents
    python scripts/freqdepth_tables.py data_dir=... tables=[energy]       # a few seconds per document
    python scripts/freqdepth_tables.py data_dir=... documents=24 output=outputs/freqdepth_tables.json

Energy: share of the energy of keys and values in the lowest depth frequency (as published; after an orthogonal
alignment) or in the best rank-d token basis shared by the block. KL: the context's keys and values, sinks and the
last `window` tokens excepted, are replaced by their reconstruction, and the next tokens are teacher-forced; nats.
Shares are of a full cache of 16 bits per number: `coefficients` alone, and `everything` with bases and side data.

Legend: L layers, J layers of a block, H KV heads, T context tokens, M middle tokens, d head dimension.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from freqdepth.compress import SharedFitter
from freqdepth.drafts import BlockInput
from freqdepth.method import FreqDepth
from freqdepth.probe import LayerProbe
from freqdepth.transform import align_layers, depth_transform, stack_features
from kvcore.attention import prefill
from kvcore.backbone import Backbone, BackboneConfig, load_backbone
from kvcore.cli import config_dir, fail
from kvcore.environment import environment
from kvcore.method import build_method
from kvcore.quant import quantize, quantized_bytes
from kvcore.rope import shift_positions
from kvcore.text import load_documents, token_windows

BITS = 16  # of a number in the full cache that shares refer to


@dataclass
class Options:
    """Command line: `key=value`.

    Attributes:
        data_dir: a file, folder or glob of documents; null means the embedded texts.
        backbone: a file of `conf/backbone`.
        backbone_path: overrides the backbone's path.
        context, continuation: tokens of the context and tokens scored.
        window: newest context tokens left exact, beside 4 sinks.
        documents: windows averaged.
        seed: of their choice.
        tables: `energy`, `kl`, `counted` (the same forms with everything counted).
        output: JSON file for the numbers, or null.
    """

    data_dir: str | None = None
    backbone: str = "smollm2_135m"
    backbone_path: str | None = None
    context: int = 2048
    continuation: int = 128
    window: int = 64
    documents: int = 3
    seed: int = 0
    tables: list[str] = field(default_factory=lambda: ["energy", "kl", "counted"])
    output: str | None = None


@dataclass
class Form:
    """One row of a KL table: how a block is rebuilt.

    Attributes:
        label: of the row.
        block_size: layers per block.
        options: of `FreqDepth`, for the transform and the widths.
    """

    label: str
    block_size: int
    options: dict[str, Any]


def klt(label: str, block_size: int, plan: list[tuple[int, int]], heads: str = "single", **more: Any) -> Form:
    """A depth KLT with a fixed number of coefficients and bits."""
    return Form(label, block_size, {"heads": heads, "coefficient_plan": plan, "subspace_iterations": 4, **more})


def dct(label: str, block_size: int, basis: str) -> Form:
    """A DCT that keeps the lowest frequency."""
    return Form(label, block_size, {"basis": basis, "heads": "single", "coefficient_bits": (16,)})


UNCOUNTED = [
    dct("DCT as published, B=2, shared only", 2, "dct"),
    *(dct(f"DCT after Procrustes alignment, B={size}", size, "aligned_dct") for size in (2, 3, 5)),
    *(klt(f"depth KLT per head, B=5, rank {rank}", 5, [(rank, 16)], basis_bits=16) for rank in (64, 128, 160)),
    *(
        klt(f"depth KLT per head, B={size}, rank {rank}", size, [(rank, 16)], basis_bits=16)
        for size, rank in ((10, 128), (15, 192), (30, 384))
    ),
    *(klt(f"depth KLT over all heads, B=5, rank {r}", 5, [(r, 16)], "joint", basis_bits=16) for r in (192, 384)),
    *(klt(f"depth KLT per head, B=5, rank {r} at 4 bits", 5, [(r, 4)], basis_bits=16) for r in (128, 192, 256)),
    klt("keys before RoPE, per head, B=5, rank 128", 5, [(128, 16)], basis_bits=16, keys="pre_rope"),
    *(klt(f"SVD per layer, rank {rank}", 1, [(rank, 16)], basis_bits=16) for rank in (16, 32)),
]
COUNTED = [
    klt("B=5: 192 x 4", 5, [(192, 4)], "joint", basis_bits=8),
    klt("B=5: 64 x 4 + 192 x 2", 5, [(64, 4), (192, 2)], "joint", basis_bits=8),
    klt("B=10: 64 x 6 + 160 x 4 + 160 x 2", 10, [(64, 6), (160, 4), (160, 2)], "joint", basis_bits=8),
    klt("B=5: 32 x 6 + 96 x 4 + 160 x 2", 5, [(32, 6), (96, 4), (160, 2)], "joint", basis_bits=8),
    klt("B=5: 96 x 6 + 192 x 4 + 288 x 2", 5, [(96, 6), (192, 4), (288, 2)], "joint", basis_bits=8),
    klt("B=5: 192 x 16 (unquantised)", 5, [(192, 16)], "joint", basis_bits=8),
]


# --- the context of one window
@dataclass
class Context:
    """Keys and values [L, H, T, d] (fp32), the continuation's ids [1, C], and the full cache's log-probabilities."""

    keys: Tensor
    values: Tensor
    following: Tensor
    reference: Tensor


@torch.no_grad()
def read_context(backbone: Backbone, ids: list[int], options: Options) -> Context:
    """Prefill a window and feed its continuation with the full cache."""
    tokens = torch.tensor([ids], device=backbone.device)
    cache = DynamicCache()
    backbone.model(tokens[:, : options.context], past_key_values=cache, logits_to_keep=1)
    keys = torch.stack([layer.keys[0] for layer in cache.layers])
    values = torch.stack([layer.values[0] for layer in cache.layers])
    following = tokens[:, options.context :]
    return Context(keys, values, following, following_logits(backbone, cache, following))


@torch.no_grad()
def following_logits(backbone: Backbone, cache: Any, following: Tensor) -> Tensor:
    """Log-probabilities [C, V] (fp32) after each continuation token."""
    return backbone.model(following, past_key_values=cache).logits[0].float().log_softmax(-1)


def divergence(context: Context, found: Tensor) -> float:
    """Mean KL (nats) from the full cache."""
    return float((context.reference.exp() * (context.reference - found)).sum(-1).mean())


# --- energy
def energy_rows(context: Context) -> dict[str, list[float]]:
    """Energy shares for blocks of 2, 3 and 5 layers, by row label."""
    rows: dict[str, list[float]] = {}
    for name, x in (("keys", context.keys), ("values", context.values)):
        for size in energy_blocks(x.shape[0]):
            blocks = [x[start : start + size].float() for start in range(0, x.shape[0] - size + 1, size)]
            rows.setdefault(f"{name}, as published", []).append(_mean(lowest_share(b) for b in blocks))
            rows.setdefault(f"{name}, each layer rotated onto the first", []).append(_mean(map(rotated_share, blocks)))
            rows.setdefault(f"{name}, best rank-d token basis", []).append(_mean(map(basis_share, blocks)))
    return rows


def energy_blocks(num_layers: int) -> list[int]:
    """Block sizes of the energy table that the model has layers for."""
    return [size for size in (2, 3, 5) if size <= num_layers]


def lowest_share(block: Tensor) -> float:
    """Share of the energy of [J, H, T, d] in the lowest depth frequency."""
    energy = depth_transform(block).square().sum((1, 2, 3))
    return float(energy[0] / energy.sum())


def rotated_share(block: Tensor) -> float:
    """The same after every layer has been rotated onto the first, on centred tokens."""
    centred = block - block.mean(2, keepdim=True)
    return lowest_share(centred @ align_layers(centred))


def basis_share(block: Tensor) -> float:
    """Share of the centred energy in the best d directions of each head's layers side by side."""
    features = stack_features(block - block.mean(2, keepdim=True), joint=False)
    energy = torch.linalg.eigvalsh(features.mT @ features).flip(-1)
    return float((energy[:, : block.shape[-1]].sum(-1) / energy.sum(-1)).mean())


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# --- KL
def rebuilt(context: Context, form: Form, backbone: Backbone, options: Options) -> tuple[Tensor, Tensor, float, float]:
    """Keys and values [L, H, T, d] with the middle rebuilt, and the shares (coefficients, everything)."""
    keys, values = context.keys.float().clone(), context.values.float().clone()
    middle = slice(4, options.context - options.window)
    method = FreqDepth(block_size=max(form.block_size, 2), **form.options)
    coefficient_bits = stored_bytes = 0.0
    for start in range(0, keys.shape[0], form.block_size):
        layers = slice(start, min(start + form.block_size, keys.shape[0]))
        block = unit_input(keys[layers, :, middle], values[layers, :, middle], method, backbone, middle)
        fitter = SharedFitter(block, method, list(range(keys.shape[1])), 1e15)
        draft = fitter.draft(1e15)
        streams = draft.keys.raw[0].shape[0]
        every = torch.arange(block.keys.shape[2]).expand(streams, -1)
        key_error, value_error = fitter.errors(0, draft.keys, every), fitter.errors(1, draft.values, every)
        if block.positions is not None and block.frequencies is not None:
            key_error = shift_positions(key_error, block.positions, block.frequencies)
        keys[layers, :, middle] -= key_error
        values[layers, :, middle] -= value_error
        widths = [*draft.keys.widths, *draft.values.widths]
        coefficient_bits += streams * block.keys.shape[2] * sum(bits * count for bits, count in widths)
        stored_bytes += draft.num_bytes
    exact = 2 * keys[:, :, : 4 + options.window].numel() * BITS / 8
    full = 2 * keys.numel() * BITS / 8
    middle_full = 2 * keys[:, :, middle].numel() * BITS
    return keys, values, coefficient_bits / middle_full, (stored_bytes + exact) / full


def unit_input(keys: Tensor, values: Tensor, method: FreqDepth, backbone: Backbone, middle: slice) -> BlockInput:
    """A block whose channels all weigh the same: the plain transform, without a probe."""
    num_layers, num_heads, num_tokens, head_dim = keys.shape
    ones = torch.ones(num_heads, num_tokens)
    probe = LayerProbe(torch.zeros(num_heads, 1, 1, head_dim), torch.ones(num_heads, head_dim), ones[:, 0], ones)
    block = BlockInput(
        keys, values, keys, [probe] * num_layers, ones.expand(num_layers, -1, -1), torch.bfloat16, 0
    )  # bf16 side data, as in a cache of 16 bits
    if method.keys == "pre_rope":
        assert backbone.spec.inverse_frequencies is not None
        block.positions = torch.arange(middle.start, middle.stop, dtype=torch.int32)
        block.frequencies = backbone.spec.inverse_frequencies
        block.keys = shift_positions(keys, -block.positions, block.frequencies)
    return block


def quantized_only(bits: int) -> Callable[[Context, Options], tuple[Tensor, Tensor, float]]:
    """Group-wise quantisation in KIVI's layout: keys along tokens, values along channels, groups of 32."""

    def rebuild(context: Context, options: Options) -> tuple[Tensor, Tensor, float]:
        keys, values = context.keys.float().clone(), context.values.float().clone()
        middle = slice(4, options.context - options.window)
        keys[:, :, middle] = quantize(keys[:, :, middle], bits, 32, "tokens").dequantize()
        values[:, :, middle] = quantize(values[:, :, middle], bits, 32, "channels").dequantize()
        head_dim, tokens = keys.shape[-1], middle.stop - middle.start
        spent = quantized_bytes(tokens, head_dim, bits, 32, "tokens")
        spent += quantized_bytes(tokens, head_dim, bits, 32, "channels")
        spent += 2 * (4 + options.window) * head_dim * BITS // 8
        return keys, values, spent / (2 * options.context * head_dim * BITS / 8)

    return rebuild


def plain_cache(keys: Tensor, values: Tensor, dtype: torch.dtype) -> DynamicCache:
    """A transformers cache of [L, H, T, d] keys and values."""
    cache = DynamicCache()
    for layer in range(keys.shape[0]):
        cache.update(keys[layer : layer + 1].to(dtype), values[layer : layer + 1].to(dtype), layer)
    return cache


def kl_rows(context: Context, forms: list[Form], backbone: Backbone, options: Options) -> dict[str, list[float]]:
    """Shares and KL by form: [coefficients, everything, KL]."""
    rows: dict[str, list[float]] = {}
    dtype = backbone.spec.dtype
    for form in forms:
        keys, values, share, counted = rebuilt(context, form, backbone, options)
        found = following_logits(backbone, plain_cache(keys, values, dtype), context.following)
        rows[form.label] = [share, counted, divergence(context, found)]
    for bits in (4, 3, 2):
        keys, values, counted = quantized_only(bits)(context, options)
        found = following_logits(backbone, plain_cache(keys, values, dtype), context.following)
        rows[f"group-wise quantisation alone, {bits} bits"] = [bits / BITS, counted, divergence(context, found)]
    return rows


@torch.no_grad()
def method_rows(context: Context, ids: list[int], backbone: Backbone, options: Options) -> dict[str, list[float]]:
    """The same measure for whole methods at 10%, everything counted (in the model's dtype)."""
    import kvcore.baselines  # noqa: F401 - registers the baselines

    rows: dict[str, list[float]] = {}
    for name in ("streaming_llm", "snapkv", "freqdepth"):
        cache = build_method(name).new_cache(backbone.model, budget=0.1)
        prefill(backbone.model, cache, torch.tensor([ids[: options.context]], device=backbone.device))
        found = following_logits(backbone, cache, context.following)
        rows[f"{name}, budget 0.1"] = [0.1, cache.ledger.device_share, divergence(context, found)]
    return rows


# --- output
def main(arguments: list[str]) -> None:
    """Compute the tables asked for, print them, and write them when `output` is given."""
    options: Options = OmegaConf.to_object(  # type: ignore[assignment]
        OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli(arguments))
    )
    known = {"energy", "kl", "counted"}
    if set(options.tables) - known:
        raise ValueError(f"tables must be among {', '.join(sorted(known))}; received {list(options.tables)}")
    settings = OmegaConf.load(config_dir() / "backbone" / f"{options.backbone}.yaml")
    if options.backbone_path is not None:
        settings.path = options.backbone_path
    backbone = load_backbone(BackboneConfig(**OmegaConf.to_container(settings)))  # type: ignore[arg-type]
    length = options.context + options.continuation
    windows = token_windows(
        load_documents(options.data_dir), backbone.tokenizer, length, options.documents, options.seed
    )
    collected: dict[str, dict[str, list[list[float]]]] = {name: {} for name in options.tables}
    for window in windows:
        ids = window.token_ids
        context = read_context(backbone, ids, options)
        for name in options.tables:
            rows = energy_rows(context) if name == "energy" else None
            if name == "kl":
                rows = kl_rows(context, UNCOUNTED, backbone, options) | method_rows(context, ids, backbone, options)
            if name == "counted":
                rows = kl_rows(context, COUNTED, backbone, options)
            for label, numbers in (rows or {}).items():
                collected[name].setdefault(label, []).append(numbers)
    means = {
        name: {label: torch.tensor(found).mean(0).tolist() for label, found in rows.items()}
        for name, rows in collected.items()
    }
    for name, rows in means.items():
        print_table(name, rows, options)
    if options.output is not None:
        path = Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python scripts/freqdepth_tables.py", *arguments])
        found = {"command": command, "environment": environment(backbone.device), "tables": means}
        path.write_text(json.dumps(found, indent=1) + "\n")


def print_table(name: str, rows: dict[str, list[float]], options: Options) -> None:
    """One table on the terminal."""
    widest = max(map(len, rows.values()))
    energy = [f"B={size}" for size in (2, 3, 5)[:widest]]
    columns = energy if name == "energy" else ["coefficients", "everything", "KL (nats)"]
    title = f"{name}: context {options.context}, {options.documents} documents"
    table = Table("form", *columns, title=title)
    for label, numbers in rows.items():
        table.add_row(label, *(f"{number:.3f}" for number in numbers))
    Console(width=110).print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        fail(str(error))
