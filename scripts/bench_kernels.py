"""Decode attention of one Llama-3-8B layer (32 query / 8 KV heads, d 128) against SDPA over the full cache.

Run: `python scripts/bench_kernels.py [--lengths 8192 32768 131072] [--out results/kernels_cpu.json]`. The forms of a
row run in turn, so that a ratio compares neighbours in time; medians and 20/80 percentiles in milliseconds; the last
line of stdout is JSON. Speed is reported only after each form's output agrees with the reference on a short cache.
On a machine that others use too, `--clock processor` with OMP_NUM_THREADS=1 counts processor time instead of elapsed
time: with more threads, spinning ones would count as work.

Legend: H KV heads, G query heads per KV head, N context tokens, S spans, n tokens of a span, R components,
d head dimension.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from env import report
from torch import Tensor

from kvcore.kernels import (
    Band,
    Coefficients,
    decode_attention,
    depth_attention,
    lowrank_attention,
    merge_states,
    reference,
    reference_compressed,
    span_scores,
)

NUM_HEADS, NUM_KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
SPAN, RANK = 64, 32
ZOOM_SHARE, RESIDENT_SHARE = 0.02, 0.05
Form = Callable[[], Tensor]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"elapsed": time.perf_counter, "processor": time.process_time}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def measure(forms: dict[str, Form], repeats: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Milliseconds of each form, and its speed against the first: the median of the rounds' ratios."""
    for form in forms.values():
        form()
    rounds: list[dict[str, float]] = []
    for _ in range(repeats):
        times = {}
        for name, form in forms.items():
            start = clock()
            form()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name] = (clock() - start) * 1e3
        rounds.append(times)
    base = next(iter(forms))
    found = {}
    for name in forms:
        values = [times[name] for times in rounds]
        ratios = [times[base] / times[name] for times in rounds]
        found[name] = {
            "median_ms": percentile(values, 0.5),
            "p20_ms": percentile(values, 0.2),
            "p80_ms": percentile(values, 0.8),
            "min_ms": min(values),
            "times_faster": percentile(ratios, 0.5),
            "times_faster_p20": percentile(ratios, 0.2),
            "times_faster_p80": percentile(ratios, 0.8),
        }
    return found


@dataclass
class FullCache:
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, length: int, dtype: torch.dtype, device: str) -> FullCache:
        shape = (1, NUM_KV_HEADS, length, DIM)
        return cls(torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))

    def grouped(self, query: Tensor) -> Tensor:
        """SDPA that reads each key once per KV head: the query heads of a group are its queries."""
        packed = query.view(1, NUM_KV_HEADS, -1, DIM)
        return F.scaled_dot_product_attention(packed, self.key, self.value, scale=SCALE).view_as(query)

    def stock(self, query: Tensor) -> Tensor:
        """SDPA as transformers calls it."""
        return F.scaled_dot_product_attention(query, self.key, self.value, scale=SCALE, enable_gqa=True)

    def kernel(self, query: Tensor) -> Tensor:
        """The shared operator over everything."""
        return decode_attention(query, self.key, self.value, SCALE)[0]

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


@dataclass
class SpanMemory:
    """What SeKV's decode attention reads: resident tokens, coarse entries, and the factors of every span."""

    resident: FullCache
    mean_key: Tensor  # [1, H, S, d]
    mean_value: Tensor
    directions: Tensor  # [1, H, S, 1, d]
    lengths: Tensor  # [1, S]
    factors: list[Tensor]  # keys' U [H * S, n, R] and V [H * S, R, d], values' U and V
    zoom: int  # spans expanded per KV head

    @classmethod
    def of(cls, length: int, resident: int, zoom: int, dtype: torch.dtype, device: str) -> SpanMemory:
        spans = max(1, (length - resident) // SPAN)

        def make(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device) * size[-2] ** -0.5

        lines = NUM_KV_HEADS * spans
        factors = [make(lines, *size) for size in ((SPAN, RANK), (RANK, DIM)) * 2]
        coarse = make(1, NUM_KV_HEADS, spans, DIM), make(1, NUM_KV_HEADS, spans, DIM)
        directions = make(1, NUM_KV_HEADS, spans, 1, DIM) * 0.1
        lengths = torch.full((1, spans), float(SPAN), device=device)
        return cls(FullCache.of(resident, dtype, device), *coarse, directions, lengths, factors, min(zoom, spans))

    def attend(self, query: Tensor) -> Tensor:
        """Scores, resident, coarse, factor-space zoom, merge."""
        _, score = span_scores(query, self.mean_key, self.lengths, SCALE, directions=self.directions)
        spans = score.shape[-1]
        wanted = score.view(1, NUM_KV_HEADS, -1, spans).amax(2).topk(self.zoom, dim=-1).indices
        head = torch.arange(NUM_KV_HEADS, device=query.device)[:, None] * spans
        line = (wanted[0] + head).flatten()
        picked = [factor.index_select(0, line).unflatten(0, (1, NUM_KV_HEADS, self.zoom)) for factor in self.factors]
        lengths = torch.full((1, NUM_KV_HEADS, self.zoom), SPAN, device=query.device)
        near = decode_attention(query, self.resident.key, self.resident.value, SCALE)
        weight = self.lengths.log().expand(NUM_KV_HEADS, spans).scatter(1, wanted[0], float("-inf"))
        far = decode_attention(query, self.mean_key, self.mean_value, SCALE, weight[None, :, None, None])
        fine = lowrank_attention(query, *picked, lengths, SCALE)
        return merge_states([near[0], far[0], fine[0]], [near[1], far[1], fine[1]])[0]

    @property
    def device_bytes(self) -> int:
        """Resident part, coarse entries, directions, and the expansion buffer (counted once)."""
        coarse = self.mean_key.nbytes + self.mean_value.nbytes + self.directions.nbytes + self.lengths.nbytes
        buffer = sum(factor.nbytes for factor in self.factors) * self.zoom // self.lengths.shape[1]
        return self.resident.nbytes + coarse + buffer


@dataclass
class DepthMemory:
    """What one layer of a FreqDepthKV block of two layers reads: shared heads in 4 bits, exact heads, residuals."""

    key: Coefficients
    value: Coefficients
    exact: FullCache  # the exact heads' keys and values

    @classmethod
    def of(cls, length: int, exact_heads: int, dtype: torch.dtype, device: str) -> DepthMemory:
        heads, residual = NUM_KV_HEADS - exact_heads, max(1, length // 50)

        def side() -> Coefficients:
            codes = torch.randint(0, 256, (1, heads, DIM, length // 2), dtype=torch.uint8, device=device)
            step = torch.full((1, heads, DIM), 0.1, device=device)
            basis = torch.randn(1, heads, DIM, DIM, dtype=dtype, device=device) * DIM**-0.5
            correction = torch.randn(1, heads, residual, DIM, dtype=dtype, device=device) * 0.1
            mean = torch.zeros(1, heads, DIM, dtype=dtype, device=device)
            return Coefficients([Band(codes, 4, length, step, -7.5)], basis, mean, correction)

        full = FullCache.of(length, dtype, device)
        return cls(side(), side(), FullCache(full.key[:, :exact_heads].clone(), full.value[:, :exact_heads].clone()))

    def attend(self, query: Tensor) -> Tensor:
        split = query.shape[1] // NUM_KV_HEADS * self.key.basis.shape[1]
        shared = depth_attention(query[:, :split], self.key, self.value, SCALE)[0]
        exact = decode_attention(query[:, split:], self.exact.key, self.exact.value, SCALE)[0]
        return torch.cat([shared, exact], dim=1)

    @property
    def bytes_per_layer(self) -> float:
        """Bytes stored per layer: codes serve two layers."""
        sides = (self.key, self.value)
        own = sum(x.basis.nbytes + (x.residual.nbytes if x.residual is not None else 0) for x in sides)
        return sum(x.bands[0].codes.nbytes for x in sides) / 2 + own + self.exact.nbytes


def check(dtype: torch.dtype, device: str) -> None:
    """No speed is reported for wrong results."""
    query = torch.randn(1, NUM_HEADS, 1, DIM, dtype=dtype, device=device)
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    memory = DepthMemory.of(512, 1, dtype, device)
    shared = query[:, : NUM_HEADS - NUM_HEADS // NUM_KV_HEADS]
    wanted = reference_compressed.depth_attention(shared, memory.key, memory.value, SCALE)[0]
    torch.testing.assert_close(memory.attend(query)[:, : shared.shape[1]], wanted, **tolerance)
    full = FullCache.of(512, dtype, device)
    wanted = reference.decode_attention(query, full.key, full.value, SCALE)[0]
    for form in (full.grouped, full.stock, full.kernel):
        torch.testing.assert_close(form(query), wanted, **tolerance)
    everything = SpanMemory.of(512, 64, 7, dtype, device)
    factors = [factor.unflatten(0, (1, NUM_KV_HEADS, -1)) for factor in everything.factors]
    lengths = torch.full((1, NUM_KV_HEADS, 7), SPAN, device=device)
    resident = reference.decode_attention(query, everything.resident.key, everything.resident.value, SCALE)
    zoomed = reference_compressed.lowrank_attention(query, *factors, lengths, SCALE)
    wanted = reference.merge_states([resident[0], zoomed[0]], [resident[1], zoomed[1]])[0]
    torch.testing.assert_close(everything.attend(query), wanted, **tolerance)


def benchmark(length: int, dtype: torch.dtype, device: str, repeats: int, clock: Clock) -> dict[str, Any]:
    """One row: every form at one length and dtype."""
    query = torch.randn(1, NUM_HEADS, 1, DIM, dtype=dtype, device=device)
    full = FullCache.of(length, dtype, device)
    resident, zoom = int(RESIDENT_SHARE * length), max(1, round(ZOOM_SHARE * length / SPAN))
    spans = SpanMemory.of(length, resident, zoom, dtype, device)
    fixed = SpanMemory.of(length, 1024, 10, dtype, device)  # growth: the same resident part and zoom at every length
    depth = DepthMemory.of(length, 1, dtype, device)
    forms: dict[str, Form] = {
        "full": lambda: full.grouped(query),
        "full_stock_sdpa": lambda: full.stock(query),
        "full_decode_attention": lambda: full.kernel(query),
        "sekv": lambda: spans.attend(query),
        "sekv_fixed_zoom": lambda: fixed.attend(query),
        "freqdepth": lambda: depth.attend(query),
    }
    return {
        "length": length,
        "dtype": str(dtype)[6:],
        "sekv_budget": spans.device_bytes / full.nbytes,
        "freqdepth_compression": full.nbytes / depth.bytes_per_layer,
        "forms": measure(forms, repeats, clock),
    }


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much longer each form takes at the longest length than at the shortest, per dtype; nothing for one length."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = sorted((row for row in rows if row["dtype"] == dtype), key=lambda row: row["length"])
        first, last = mine[0], mine[-1]
        if first is last:
            continue
        times = {name: last["forms"][name]["median_ms"] / first["forms"][name]["median_ms"] for name in first["forms"]}
        found.append({"dtype": dtype, "from": first["length"], "to": last["length"], "times": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="elapsed")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name in options.dtypes:
            dtype = getattr(torch, name)
            check(dtype, device)
            for length in options.lengths:
                row = benchmark(length, dtype, device, options.repeats, CLOCKS[options.clock])
                rows.append(row)
                print(f"{length:7} {name:8} SeKV budget {row['sekv_budget']:.3f}", end=" ")
                print(f"FreqDepthKV compression {row['freqdepth_compression']:.2f}x")
                for form, entry in row["forms"].items():
                    print(
                        f"    {form:21} {entry['median_ms']:8.2f} ms ({entry['p20_ms']:.2f} to {entry['p80_ms']:.2f}), "
                        f"{entry['times_faster']:.2f} times the speed of full"
                    )
    for entry in growth(rows):
        times = ", ".join(f"{form} {ratio:.2f}" for form, ratio in entry["times"].items())
        print(f"{entry['dtype']}: times the time of {entry['from']} tokens at {entry['to']}: {times}")
    result = {
        "environment": report(),
        "clock": options.clock,
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
        "growth": growth(rows),
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
