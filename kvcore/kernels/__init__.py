"""Shared attention kernels: one public function each, the path chosen in `dispatch.py` and nowhere else.

reference.py, reference_compressed.py    the specification: plain fp32 torch, same signatures
torch_path.py, torch_compressed.py,
torch_coordinates.py, torch_planes.py    the vectorised path, for CPUs and for anything Triton does not cover
unpacking.py                             bit planes into numbers, a tile at a time
operands.py, plane_operands.py           shared coefficients, bands, planes
triton/                                  one Triton kernel per file
native/                                  products with packed codes in C, built where a compiler is found
ops.py                                   the Triton kernels as torch custom operators
backend.py                               which path is on, and why

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N entries, d head dimension.
"""

from kvcore.kernels.backend import backend_report
from kvcore.kernels.dispatch import (
    coordinate_logits,
    decode_attention,
    depth_attention,
    gather_attention,
    lowrank_attention,
    merge_states,
    plane_logits,
    plane_mix,
    quantised_attention,
    segment_sums,
    span_scores,
)
from kvcore.kernels.operands import Band, Coefficients
from kvcore.kernels.torch_path import attend_parts, causal_bias, group_queries, prefill_attention

__all__ = [
    "Band",
    "Coefficients",
    "attend_parts",
    "backend_report",
    "causal_bias",
    "coordinate_logits",
    "decode_attention",
    "depth_attention",
    "gather_attention",
    "group_queries",
    "lowrank_attention",
    "merge_states",
    "plane_logits",
    "plane_mix",
    "prefill_attention",
    "quantised_attention",
    "segment_sums",
    "span_scores",
]
