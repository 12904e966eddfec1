"""A long generation of every method: device and host bytes at each token, process memory, time per token.

    python scripts/long_generation.py                                    # every method on a tiny random model
    python scripts/long_generation.py --methods sekv --backbone smollm2_135m --dtype bfloat16
    python scripts/long_generation.py --output results/long_generation_tiny.json

Each method runs in a process of its own. `most share` is the largest ratio of device bytes to the full cache's over all
steps. `beyond` is how much more the process grew than the cache did, from the first timed token to the last; `tensors`
is the same for the tensors alive, which no allocator blurs. Times are processor time of one thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import freqdepth
import kvcore.baselines
import sekv
from kvcore.attention import cache_argument, prefill
from kvcore.backbone import BackboneConfig, load_backbone
from kvcore.bench.results import write_atomically
from kvcore.budget import UnreachableBudgetError
from kvcore.cache import CompressedCache
from kvcore.environment import environment
from kvcore.method import build_method, method_class, method_names
from kvcore.tiny import build_tiny
from scripts.bench_decode import backbone_config
from scripts.plan_memory import plan_memory

REGISTERED = (kvcore.baselines, sekv, freqdepth)
BUDGETS = (0.1, 0.2, 0.35, 0.5)  # the first that a method can serve: codecs have a smallest one
HOST_TOKENS = {"keys and values", "token rows"}  # parts of a plan that grow with the text
HOST_ROOM = 256  # tokens for which they make room at a time
MIB = 1 << 20


@dataclass
class LongRun:
    """What one method did. Bytes are of the cache unless the name says otherwise.

    Attributes:
        budget: share of the full cache; None where the method keeps everything by definition.
        most_share: largest ratio of device bytes to the full cache of the same moment.
        most_over: most bytes by which the device bytes were above the budget of their moment.
        host_limit: host bytes that the method's plan allows at the end.
        cache_growth, tensor_growth, process_growth: bytes, over the timed tokens.
        process_beyond: process growth minus cache growth.
        first_ms, last_ms: mean time per token of the first and last `timed` tokens.
    """

    method: str
    budget: float | None
    prompt: int
    generated: int
    timed: int
    most_share: float
    most_over: float
    device_bytes: int
    host_bytes: int
    host_limit: float
    cache_growth: int
    tensor_growth: int
    process_growth: int
    process_beyond: int
    first_ms: float
    last_ms: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", default="tiny", help="`tiny`, or a name in conf/backbone")
    parser.add_argument("--methods", nargs="+", default=method_names(), metavar="METHOD")
    parser.add_argument("--budget", type=float, default=BUDGETS[0])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--tokens", type=int, default=4096, help="generated tokens")
    parser.add_argument("--timed", type=int, default=512, help="tokens at each end whose times are compared")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        for name in options.methods:
            method_class(name)
        if options.backbone == "tiny":
            model = tiny_model(getattr(torch, options.dtype))
        else:
            config: BackboneConfig = backbone_config(options.backbone, options.dtype)
            model = load_backbone(config).model
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = []
    for name in options.methods:
        budgets = [options.budget, *(b for b in BUDGETS if b > options.budget)]
        runs.append(in_own_process(model, name, budgets, options.prompt, options.tokens, options.timed))
        print(f"{name}: {runs[-1].last_ms:.2f} ms per token at the end", file=sys.stderr)
    Console(width=150).print(as_table(runs, options))
    if options.output:
        plain = {"backbone": options.backbone, "dtype": options.dtype, "budget": options.budget}
        rows, machine = [asdict(run) for run in runs], environment(torch.device("cpu"))
        record = {"options": plain, "rows": rows, "environment": machine}
        write_atomically(options.output, json.dumps(record, indent=1) + "\n")
    return 0


def tiny_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model that never ends an answer, with room for long ones."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    return build_tiny(dtype=dtype, eos_token_id=None, initializer_range=0.3, **shape)[0]


def in_own_process(
    model: PreTrainedModel, name: str, budgets: Sequence[float], prompt: int, tokens: int, timed: int
) -> LongRun:
    """`long_run` in a forked process: its memory is that of this method."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def work() -> None:
        writer.send(long_run(model, name, budgets, prompt, tokens, timed))

    process = context.Process(target=work)
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of method '{name}' ended without a result") from error
    finally:
        process.join()


@torch.inference_mode()
def long_run(
    model: PreTrainedModel, name: str, budgets: Sequence[float], prompt: int, tokens: int, timed: int
) -> LongRun:
    """Generate greedily and look at the cache after every token.

    Args:
        model: an attached or plain causal LM.
        name: method.
        budgets: the first that the method can serve is taken.
        prompt, tokens: lengths.
        timed: tokens at each end whose times are compared.
    """
    ids = torch.randint(5, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    cache, token = _prefilled(model, name, budgets, ids)
    spec, most, over = cache.spec, 0.0, -math.inf
    share = 1.0 if cache.budget.is_full or method_class(name).reference_only else float(cache.budget.value)
    seconds: list[float] = []
    process = psutil.Process()
    before = _memory(cache, process)
    for step in range(tokens):
        began = time.process_time()
        token = model(input_ids=token, **cache_argument(cache)).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.process_time() - began)
        held, whole = cache.memory_bytes()[0], spec.full_bytes(cache.logical_length)
        most, over = max(most, held / whole), max(over, held - share * whole)
        if step + 1 == timed:  # the allocator has seen every shape by now
            before = _memory(cache, process)
    after = _memory(cache, process)
    cache_growth, tensor_growth, process_growth = (b - a for a, b in zip(before, after, strict=True))
    bounded = not cache.budget.is_full
    method, length = build_method(name), cache.logical_length
    # the plan is of a prompt of that length; room is made for some tokens at a time
    plan = plan_memory(method, spec, cache.budget, length).host
    room = spec.full_bytes(HOST_ROOM) if HOST_TOKENS & plan.keys() else 0
    device, host = cache.memory_bytes()
    first, last = (1000 * sum(part) / len(part) for part in (seconds[:timed], seconds[-timed:]))
    return LongRun(
        method=name,
        budget=float(cache.budget.value) if bounded else None,
        prompt=prompt,
        generated=tokens,
        timed=timed,
        most_share=most,
        most_over=over,
        device_bytes=device,
        host_bytes=host,
        host_limit=sum(plan.values()) + room,
        cache_growth=cache_growth,
        tensor_growth=tensor_growth,
        process_growth=process_growth,
        process_beyond=process_growth - cache_growth,
        first_ms=first,
        last_ms=last,
        ratio=last / first,
    )


def _prefilled(
    model: PreTrainedModel, name: str, budgets: Sequence[float], ids: torch.Tensor
) -> tuple[CompressedCache, torch.Tensor]:
    """A cache at the first budget that the method can serve, after the prompt, and the first token [1, 1]."""
    whole = method_class(name).ignores_budget
    for budget in [1.0] if whole else budgets:
        try:
            cache = build_method(name).new_cache(model, budget)
            return cache, prefill(model, cache, ids).argmax(-1, keepdim=True)
        except UnreachableBudgetError as error:
            refusal = error
    raise refusal


def _memory(cache: CompressedCache, process: psutil.Process) -> tuple[int, int, int]:
    """Bytes of the cache, of all tensors alive, and of the process."""
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):  # `isinstance` would wake deprecated module attributes
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(cache.memory_bytes()), sum(storages.values()), process.memory_info().rss


def as_table(runs: Sequence[LongRun], options: argparse.Namespace) -> Table:
    """One line per method."""
    size = f"prompt {options.prompt}, {options.tokens} tokens generated"
    table = Table(title=f"{options.backbone}, {options.dtype}: {size}; memory in MiB, times in ms per token")
    shares, memory = ("budget", "most share", "bytes over"), ("host", "allowed", "cache grew", "tensors", "beyond")
    for column in ("method", *shares, *memory, "first", "last", "ratio"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.method,
            "-" if run.budget is None else f"{run.budget:g}",
            f"{run.most_share:.4f}",
            f"{run.most_over:.0f}",
            *(f"{value / MIB:.2f}" for value in (run.host_bytes, run.host_limit)),
            *(f"{value / MIB:.2f}" for value in (run.cache_growth, run.tensor_growth, run.process_beyond)),
            *(f"{value:.2f}" for value in (run.first_ms, run.last_ms, run.ratio)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
