"""A prompt or a file in, an answer out, with a line of cache statistics.

python scripts/generate.py --prompt "Name three rivers."
python scripts/generate.py --file report.txt --question "Who wrote it?" --budget 0.1 --method sekv --option tau=0.25
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import freqdepth
import kvcore.baselines
import sekv
from kvcore.attention import cache_argument, prefill
from kvcore.backbone import Backbone, BackboneConfig, load_backbone
from kvcore.cache import CompressedCache
from kvcore.chat import build_prompt
from kvcore.cli import config_dir
from kvcore.method import build_method
from kvcore.options import did_you_mean, typed_options

REGISTERED = (kvcore.baselines, sekv, freqdepth)  # importing them fills the registry


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the whole prompt")
    source.add_argument("--file", type=Path, help="a text file: the context, compressed before the question is read")
    parser.add_argument("--question", default="", help="asked about the file or added to the prompt")
    parser.add_argument("--method", default="sekv")
    parser.add_argument("--budget", default="0.1", help="share of the full cache (0.1) or tokens (1024)")
    parser.add_argument("--budget-scope", default="bytes", choices=("bytes", "layer"))
    parser.add_argument("--backbone", default="smollm2_135m", help="a file of conf/backbone, without .yaml")
    parser.add_argument("--path", help="another hub id or local folder for the backbone")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    return parser.parse_args(arguments)


def backbone_config(name: str, path: str | None) -> BackboneConfig:
    """The backbone's configuration.

    Raises:
        ValueError: no such configuration.
    """
    folder = config_dir() / "backbone"
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"no backbone '{name}'. {did_you_mean(name, sorted(f.stem for f in folder.glob('*.yaml')))}")
    plain: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    if path is not None:
        plain["path"] = path
    return typed_options(BackboneConfig, plain, "backbone")


def context_text(arguments: argparse.Namespace) -> str:
    """The text to compress.

    Raises:
        ValueError: an unreadable file.
    """
    if arguments.prompt is not None:
        return arguments.prompt
    try:
        return arguments.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {arguments.file}: {error}. A UTF-8 text file is expected") from error


@torch.inference_mode()
def answer(
    backbone: Backbone, cache: CompressedCache, text: str, question: str, max_new_tokens: int
) -> tuple[str, str]:
    """The answer, and a line of statistics."""
    config = backbone.config
    prompt = build_prompt(
        backbone.tokenizer, text, question, chat=config.instruct, enable_thinking=config.enable_thinking
    )
    ids = torch.tensor([prompt.ids], device=backbone.device)
    context = ids[:, : len(prompt.context_ids)]
    began = time.perf_counter()
    if context.shape[1]:
        prefill(backbone.model, cache, context, chunk_size=config.prefill_chunk)
    prefilled = time.perf_counter()
    model: Any = backbone.model  # its mixin types `generate` as a tensor
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(cache),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=backbone.tokenizer.pad_token_id,
    )
    new = generated[0, ids.shape[1] :]
    seconds = (time.perf_counter() - prefilled) / max(len(new), 1)
    line = statistics(cache, len(prompt.ids), len(new), prefilled - began, seconds)
    return str(backbone.tokenizer.decode(new, skip_special_tokens=True)).strip(), line


def statistics(cache: CompressedCache, read: int, written: int, prefill_seconds: float, seconds: float) -> str:
    """One line: tokens, time, memory, and what was zoomed into."""
    ledger = cache.ledger
    parts = [
        f"{cache.method} budget={cache.budget.value}",
        f"{read} tokens read in {prefill_seconds:.1f} s, {written} written at {1000 * seconds:.0f} ms",
        f"device {ledger.device_bytes / 2**20:.2f} MiB = {100 * ledger.device_share:.1f}% of the full cache",
        f"host {ledger.host_bytes / 2**20:.2f} MiB",
        f"attended {100 * ledger.attended_share:.1f}%",
        f"fetched {ledger.h2d_bytes_per_token / 1024:.0f} KiB per token, {ledger.h2d_stall_ms_per_token:.1f} ms waited",
    ]
    zoom = cache.zoom_statistics() if isinstance(cache, sekv.SeKVCache) else None
    if zoom is not None and zoom.hit_rate is not None:
        parts.append(f"factor cache hit rate {100 * zoom.hit_rate:.0f}%")
    return " | ".join(parts)


def main(arguments: list[str]) -> int:
    """Exit status."""
    options = parsed(arguments)
    try:
        text = context_text(options)
        chosen = dict(pair.split("=", 1) if "=" in pair else (pair, "true") for pair in options.option)
        method = build_method(options.method, **{name: yaml.safe_load(value) for name, value in chosen.items()})
        backbone = load_backbone(backbone_config(options.backbone, options.path))
        cache = method.new_cache(backbone.model, yaml.safe_load(options.budget), options.budget_scope)
        reply, line = answer(backbone, cache, text, options.question, options.max_new_tokens)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(reply)
    print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
