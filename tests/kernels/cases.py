"""Random operands of every operator, from a seed and a shape.

Legend: B batch, H KV heads, G query heads per KV head, Q query tokens, N entries, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcore.kernels import Band, Coefficients, dispatch, reference, reference_compressed
from kvcore.kernels.plane_operands import CoefficientPlanes, TokenLines
from kvcore.quant import pack, quantize


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    kv_heads: int = 2
    group: int = 3
    queries: int = 1
    length: int = 65
    dim: int = 64


class Operands:
    """A seeded source of tensors of one dtype on one device."""

    def __init__(self, seed: int, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.dtype, self.device = shape, dtype, device

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.dtype).to(self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=self.generator).to(self.device)

    def query(self) -> Tensor:
        s = self.shape
        return self.normal(s.batch, s.kv_heads * s.group, s.queries, s.dim)

    def entries(self, length: int | None = None) -> Tensor:
        s = self.shape
        # strided: heads and tokens are swapped in memory, as after a projection
        size = s.length if length is None else length
        return self.normal(s.batch, size, s.kv_heads, s.dim).transpose(1, 2)

    def bias(self, length: int) -> Tensor:
        """Per entry, shared by the queries; about a third hidden, and the whole last row of the batch at times."""
        s = self.shape
        bias = self.uniform(s.batch, s.kv_heads, 1, s.queries, length) - 0.5
        hidden = self.uniform(s.batch, s.kv_heads, 1, s.queries, length) < 0.3
        hidden[-1, -1] = True
        return bias.masked_fill(hidden, float("-inf"))

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


Case = tuple[tuple[Any, ...], dict[str, Any]]


def decode(o: Operands) -> Case:
    return (o.query(), o.entries(), o.entries(), o.scale), {"bias": o.bias(o.shape.length)}


def decode_mask(o: Operands) -> Case:
    s = o.shape
    mask = o.uniform(s.batch, 1, 1, 1, s.length) > 0.4
    return (o.query(), o.entries(), o.entries(), o.scale), {"mask": mask}


def gather(o: Operands) -> Case:
    s, page = o.shape, 4
    index = o.integers(-1, -(-s.length // page), s.batch, s.kv_heads, 9)
    bias = o.bias(9 * page)
    return (o.query(), o.entries(), o.entries(), index, o.scale, page), {"bias": bias}


def gather_tokens(o: Operands) -> Case:
    s = o.shape
    index = o.integers(0, s.length, s.batch, s.kv_heads, 21).int()
    return (o.query(), o.entries().contiguous(), o.entries().contiguous(), index, o.scale), {}


def scores(o: Operands) -> Case:
    s = o.shape
    lengths = o.integers(0, 40, s.batch, s.length).float()
    heads = s.kv_heads * s.group
    directions = o.normal(s.batch, s.kv_heads, s.length, 2, s.dim) * 0.3
    options = {"routing_query": o.query(), "routing_gain": o.uniform(s.batch, heads, s.length)}
    options |= {"directions": directions, "curvature": o.uniform(heads)}
    return (o.query(), o.entries(), lengths, o.scale), options


def first_order_scores(o: Operands) -> Case:
    s = o.shape
    return (o.query(), o.entries(), o.integers(1, 40, s.batch, s.length).float(), o.scale), {}


def lowrank(o: Operands) -> Case:
    s, rank, rank_v, longest = o.shape, 8, 11, 20
    spans = max(1, min(s.length // 10, 30))
    lead = (s.batch, s.kv_heads, spans)
    lengths = o.integers(0, longest + 1, *lead)
    bases = [o.normal(*lead, r, s.dim) * r**-0.5 for r in (rank, rank_v)]
    factors = [o.normal(*lead, longest, r) for r in (rank, rank_v)]
    gains = {"key_gain": o.uniform(*lead, rank), "value_gain": o.uniform(*lead, rank_v)}
    hidden = o.uniform(s.batch, s.kv_heads, s.group, s.queries, spans) < 0.3
    bias = torch.zeros(hidden.shape, device=o.device).masked_fill(hidden, float("-inf"))
    return (o.query(), factors[0], bases[0], factors[1], bases[1], lengths, o.scale), {**gains, "span_bias": bias}


def depth(bits: tuple[int, ...], joint: bool) -> Callable[[Operands], Case]:
    def build(o: Operands) -> Case:
        return (o.query(), _coefficients(o, bits, joint), _coefficients(o, bits, joint), o.scale), {
            "bias": o.bias(o.shape.length)
        }

    return build


def _coefficients(o: Operands, bits: tuple[int, ...], joint: bool) -> Coefficients:
    s = o.shape
    streams, count = 1 if joint else s.kv_heads, 12
    padded = -(-s.length // 64) * 64
    bands = []
    for width in bits:
        if width == 16:
            bands.append(Band(o.normal(s.batch, streams, count, s.length), 16, s.length))
            continue
        codes = o.integers(0, 2**width, s.batch, streams, count, padded).to(torch.uint8)
        step = (o.uniform(s.batch, streams, count) + 0.5) * 2.0 ** (1 - width)
        bands.append(Band(pack(codes, width), width, s.length, step, 0.5 - 2 ** (width - 1)))
    total = count * len(bits)
    basis = o.normal(s.batch, s.kv_heads, total, s.dim) * total**-0.5
    first = min(5, s.length)
    residual, mixing = o.normal(s.batch, s.kv_heads, first, 7), o.normal(s.batch, s.kv_heads, 7, s.dim) * 0.3
    return Coefficients(bands, basis, o.normal(s.batch, s.kv_heads, s.dim), residual, mixing)


def quantised(bits: int) -> Callable[[Operands], Case]:
    def build(o: Operands) -> Case:
        group = 16 if o.shape.dim % 32 else 32
        key = quantize(o.entries(), bits, 32, "tokens")
        value = quantize(o.entries(), bits, group, "channels", "uint8")
        window = {"window_key": o.entries(9), "window_value": o.entries(9), "window_bias": o.bias(9)}
        return (o.query(), key, value, o.scale), {"bias": o.bias(o.shape.length), **window}

    return build


def coordinates(parts: list[tuple[int, int]]) -> Callable[[Operands], Case]:
    def build(o: Operands) -> Case:
        s = o.shape
        num_bytes = sum(dims * bits // 8 for dims, bits in parts)
        codes = o.integers(0, 256, s.batch, s.kv_heads, num_bytes, s.length).to(torch.uint8)
        heads, dims = s.kv_heads * s.group, sum(dims for dims, _ in parts)
        query = (o.normal(s.batch, heads, s.queries, dims) * 0.03).to(o.dtype)
        return (query, codes, parts, o.uniform(s.batch, heads, s.queries)), {}

    return build


def _coefficient_planes(o: Operands) -> CoefficientPlanes:
    """49 coefficients of 8, 6, 3, 2 and no bits in one stream (integers on a CPU) or one per KV head; two tiles."""
    s = o.shape
    streams, main = 1 if s.batch == 1 else s.kv_heads, max(0, s.length - 16)
    lines = TokenLines(main, -(-main // 8), s.length - main, (s.length - main) // 2 // 8 * 8)
    if s.length < 16:
        lines = TokenLines(s.length, -(-s.length // 8))
    layout = ((4, ((0, 5, 0), (0, 5, 4), (5, 9, 0))), (2, ((5, 9, 4), (14, 7, 0), (21, 20, 0))), (1, ((14, 7, 2),)))
    packed = [
        o.integers(0, 256, streams, lines.places * width // 8, sum(count for _, count, _ in runs)).to(torch.uint8)
        for width, runs in layout
    ]
    return CoefficientPlanes(packed, layout, 49, lines)


def plane_logits(o: Operands) -> Case:
    codes = _coefficient_planes(o)
    # so small that what integers may be off by, 2 ** -15 of the largest entry times the sum of the codes, is tolerated
    return (o.normal(codes.packed[0].shape[0], o.shape.group * o.shape.queries, 49) * 0.01, codes), {}


def plane_mix(o: Operands) -> Case:
    codes = _coefficient_planes(o)
    weights = o.uniform(codes.packed[0].shape[0], o.shape.group * o.shape.queries, o.shape.length)
    return (weights / weights.sum(-1, keepdim=True), codes), {}


# name -> (operands, public function, reference)
OPERATORS: dict[str, tuple[Callable[[Operands], Case], Callable[..., Any], Callable[..., Any]]] = {
    "decode": (decode, dispatch.decode_attention, reference.decode_attention),
    "decode-mask": (decode_mask, dispatch.decode_attention, reference.decode_attention),
    "gather-pages": (gather, dispatch.gather_attention, reference.gather_attention),
    "gather-tokens": (gather_tokens, dispatch.gather_attention, reference.gather_attention),
    "scores-second-order": (scores, dispatch.span_scores, reference.span_scores),
    "scores-first-order": (first_order_scores, dispatch.span_scores, reference.span_scores),
    "coordinates-4-2": (
        coordinates([(6, 4), (28, 2)]),
        dispatch.coordinate_logits,
        reference_compressed.coordinate_logits,
    ),
    "coordinates-8": (coordinates([(37, 8)]), dispatch.coordinate_logits, reference_compressed.coordinate_logits),
    "plane-logits": (plane_logits, dispatch.plane_logits, reference_compressed.plane_logits),
    "plane-mix": (plane_mix, dispatch.plane_mix, reference_compressed.plane_mix),
    "lowrank": (lowrank, dispatch.lowrank_attention, reference_compressed.lowrank_attention),
    "depth-joint-8-4-3": (depth((8, 4, 3), True), dispatch.depth_attention, reference_compressed.depth_attention),
    "depth-heads-16-2": (depth((16, 2), False), dispatch.depth_attention, reference_compressed.depth_attention),
    "quantised-2": (quantised(2), dispatch.quantised_attention, reference_compressed.quantised_attention),
    "quantised-4": (quantised(4), dispatch.quantised_attention, reference_compressed.quantised_attention),
    "quantised-8": (quantised(8), dispatch.quantised_attention, reference_compressed.quantised_attention),
}
