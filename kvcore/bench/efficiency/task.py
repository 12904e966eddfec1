"""Time, throughput and memory of each method beside the full cache of the same run.

Settings are pairs (input, output) in tokens; the article's are 4096/1024 and 8192/4096, its memory curve runs from 8K
to 128K. Every method reads the same text with a prefill of its own, then writes the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from kvcore.attention import cache_argument, prefill
from kvcore.backbone import Backbone
from kvcore.bench.base import Benchmark, MethodRun, Sample, register_bench
from kvcore.bench.efficiency.measure import PeakMemory, StepClock, now
from kvcore.log import get_logger, warn_once
from kvcore.method import build_method
from kvcore.text import load_documents, token_windows

log = get_logger(__name__)
# metric: whether more is better; `_ratio` is own value over the full cache's
TIMES = ("ms_per_token", "ttft_seconds", "prefill_seconds", "total_seconds")
PEAKS = ("peak_bytes", "peak_growth_bytes")
BYTES = ("device_bytes", *PEAKS)


@register_bench
@dataclass(frozen=True, kw_only=True)
class Efficiency(Benchmark):
    """Options of the efficiency benchmark.

    Attributes:
        settings: (input, output) tokens.
        repeats: texts per setting; `limit` lowers it.
        batch_size: rows that are generated together.
        warmup_tokens: input of an unmeasured generation before the first measurement.
    """

    name: ClassVar[str] = "efficiency"
    metrics: ClassVar[dict[str, bool]] = {
        **{name: False for name in (*TIMES, *BYTES, "host_bytes", "h2d_bytes_per_token", "h2d_stall_ms_per_token")},
        **{f"{name}_ratio": False for name in (*TIMES, *BYTES)},
        "tokens_per_second": True,
        "tokens_per_second_ratio": True,
    }

    settings: tuple[tuple[int, int], ...] = ((1024, 32), (4096, 32))
    repeats: int = 1
    batch_size: int = 1
    warmup_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = tuple(tuple(pair) for pair in self.settings)
        object.__setattr__(self, "settings", settings)
        if not settings or any(len(pair) != 2 or pair[0] < 2 or pair[1] < 2 for pair in settings):
            raise ValueError(
                "bench.efficiency.settings are pairs [input, output] of at least 2 tokens each, for example "
                f"[[4096,1024],[8192,4096]]; received {[list(pair) for pair in settings]}"
            )
        if self.repeats < 1 or self.batch_size < 1 or self.warmup_tokens < 0:
            raise ValueError(
                "bench.efficiency needs repeats >= 1, batch_size >= 1 and warmup_tokens >= 0; received "
                f"{self.repeats}, {self.batch_size} and {self.warmup_tokens}"
            )

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        documents = load_documents(self.data_dir)
        count = min(self.repeats, self.limit or self.repeats)
        samples = []
        for length, output in self.settings:
            if length + output > backbone.spec.max_positions:
                raise ValueError(
                    f"bench.efficiency.settings asks for {length} + {output} tokens; {backbone.config.name} was built "
                    f"for {backbone.spec.max_positions}. Lower bench.efficiency.settings"
                )
            windows = token_windows(documents, backbone.tokenizer, length, count * self.batch_size, self.seed)
            for index in range(count):
                rows = windows[index * self.batch_size : (index + 1) * self.batch_size]
                samples.append(
                    Sample(
                        id=f"{length}-{output}-{index}",
                        task=f"{length}/{output}",
                        max_new_tokens=output,
                        context_length=length,
                        meta={"ids": [window.token_ids for window in rows]},
                    )
                )
        return samples

    def run(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        ids = torch.tensor(sample.meta["ids"], device=backbone.device)
        full = MethodRun(build_method("full"), 1.0)
        if self.warmup_tokens:
            for run in (full, *runs):
                _generate(backbone, ids[:, : max(self.warmup_tokens, 2)], 2, run)
        rows = [_generate(backbone, ids, sample.max_new_tokens, run) for run in runs]
        at_full = [row for row, run in zip(rows, runs, strict=True) if run.method.name == "full"]
        if not at_full:
            warn_once(log, "bench efficiency: full is not among the methods; it is measured for the ratios")
        reference = at_full[0] if at_full else _generate(backbone, ids, sample.max_new_tokens, full)
        # a process keeps freed pages, so on a CPU the runs after the first grow by little or nothing: no ratio there
        peaks = () if reference["memory_meter"] == "resident_set" else PEAKS
        for row in rows:
            row["metrics"] |= {
                f"{name}_ratio": row["metrics"][name] / max(reference["metrics"][name], 1e-9)
                for name in (*TIMES, "device_bytes", *peaks, "tokens_per_second")
            }
        return rows


@torch.inference_mode()
def _generate(backbone: Backbone, ids: torch.Tensor, output: int, run: MethodRun) -> dict[str, Any]:
    """Read `ids` [B, N], write `output` tokens a row, and measure.

    Time to the first token counts the prefill; time per token counts the tokens after the first; throughput is the
    written tokens of all rows over the whole time.
    """
    device = backbone.device
    config = GenerationConfig(
        max_new_tokens=output,
        min_new_tokens=output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=backbone.tokenizer.pad_token_id,
    )
    clock = StepClock(device)
    with PeakMemory(device) as memory:
        cache = run.new_cache(backbone)
        began = now(device)
        prefill(backbone.model, cache, ids[:, :-1], chunk_size=backbone.config.prefill_chunk)
        prefilled = now(device)
        generate: Any = backbone.model.generate
        generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
            **cache_argument(cache),
        )
        ended = now(device)
    ledger = cache.ledger.as_row()
    ms_per_token = 1000 * (clock.times[-1] - clock.times[0]) / (output - 1)
    return {
        "prediction": "",
        "references": [],
        "metrics": {
            "ms_per_token": ms_per_token,
            "ttft_seconds": clock.times[0] - began,
            "prefill_seconds": prefilled - began,
            "total_seconds": ended - began,
            "tokens_per_second": output * ids.shape[0] / (ended - began),
            "device_bytes": float(ledger["device_bytes"]),
            "peak_bytes": float(memory.peak),
            "peak_growth_bytes": float(memory.growth),
            "host_bytes": float(ledger["host_bytes"]),
            "h2d_bytes_per_token": float(ledger["h2d_bytes_per_token"]),
            "h2d_stall_ms_per_token": float(ledger["h2d_stall_ms_per_token"]),
        },
        "memory_meter": memory.kind,
        "batch_size": ids.shape[0],
        "new_tokens": output,
        "prompt_tokens": ids.shape[1],
        **ledger,
        "prefill_seconds": prefilled - began,
        "ms_per_token": ms_per_token,
    }
