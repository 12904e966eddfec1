"""The public functions: one each, the backend chosen here, callers never branch. Signatures as in the reference.

Legend: see `reference.py` and `reference_compressed.py`, which hold the shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.kernels import native, ops, torch_compressed, torch_coordinates, torch_path, torch_planes
from kvcore.kernels.backend import use_native, use_triton, use_triton_products
from kvcore.kernels.operands import Coefficients, grouped_logits_bias
from kvcore.kernels.plane_operands import CoefficientPlanes, add_planes, to_planes
from kvcore.kernels.torch_compressed import PackedProducts
from kvcore.quant import QuantizedTensor, decode_scales

_TRITON_PRODUCTS = PackedProducts(
    ops.packed_logits, lambda weights, codes, bits, dtype: ops.packed_mix(weights.to(dtype), codes, bits)
)
_NATIVE_PRODUCTS = PackedProducts(
    native.packed_logits, lambda weights, codes, bits, dtype: native.packed_mix(weights, codes, bits)
)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a few tokens over N entries: output [B, Hq, Q, dv], log-sum-exp [B, Hq, Q] (natural log).

    See `reference.decode_attention`.
    """
    if use_triton(query):
        return ops.decode_attention(query, key, value, scale, grouped_logits_bias(bias, mask))
    return torch_path.decode_attention(query, key, value, scale, bias, mask)


def merge_states(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attentions over disjoint entries. See `reference.merge_states`."""
    if use_triton(outputs[0]):
        return ops.merge_states(torch.stack(outputs), torch.stack(lses))
    return torch_path.merge_states(outputs, lses)


def span_scores(
    query: Tensor,
    mean_key: Tensor,
    lengths: Tensor,
    scale: float,
    routing_query: Tensor | None = None,
    routing_gain: Tensor | None = None,
    directions: Tensor | None = None,
    curvature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Coarse logits and routing scores [B, Hq, Q, S] of every span. See `reference.span_scores`."""
    options = (routing_query, routing_gain, directions, curvature)
    path = ops.span_scores if use_triton(query) else torch_path.span_scores
    return path(query, mean_key, lengths, scale, *options)


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    page_size: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages or tokens chosen per KV head. See `reference.gather_attention`."""
    path = ops.gather_attention if use_triton(query) else torch_path.gather_attention
    return path(query, key, value, index, scale, page_size, bias)


def lowrank_attention(
    query: Tensor,
    key_factors: Tensor,
    key_basis: Tensor,
    value_factors: Tensor,
    value_basis: Tensor,
    lengths: Tensor,
    scale: float,
    key_gain: Tensor | None = None,
    value_gain: Tensor | None = None,
    span_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over factorised spans, in factor space. See `reference_compressed.lowrank_attention`."""
    path = ops.lowrank_attention if use_triton(query) else torch_compressed.lowrank_attention
    return path(
        query, key_factors, key_basis, value_factors, value_basis, lengths, scale, key_gain, value_gain, span_bias
    )


def depth_attention(
    query: Tensor, key: Coefficients, value: Coefficients, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over shared depth coefficients. See `reference_compressed.depth_attention`."""
    if use_triton(query):
        products = _TRITON_PRODUCTS
    elif use_native(query, key.basis, value.basis):
        products = _NATIVE_PRODUCTS
    else:
        products = torch_compressed.TORCH_PRODUCTS
    return torch_compressed.depth_attention(query, key, value, scale, products, bias)


def coordinate_logits(
    query: Tensor, codes: Tensor, parts: list[tuple[int, int]], offset: Tensor, out: Tensor | None = None
) -> Tensor:
    """Estimated logits fp32 [B, Hq, Q, N] of tokens kept as coordinates of 2, 4 or 8 bits.

    See `reference_compressed.coordinate_logits`. They go into `out` where it is given: fp32 lines of a larger tensor.
    """
    triton = use_triton(query)
    if not triton and use_native(query, codes, offset):
        return native.coordinate_logits(query, codes, parts, offset, out)
    if triton:
        dims, bits = [dims for dims, _ in parts], [bits for _, bits in parts]
        logits = ops.coordinate_logits(query, codes, dims, bits, offset)
    else:
        logits = torch_coordinates.coordinate_logits(query, codes, parts, offset)
    return logits if out is None else out.copy_(logits)


def plane_logits(rows: Tensor, codes: CoefficientPlanes) -> Tensor:
    """Products fp32 [S, P, M] of rows with codes kept as planes. See `reference_compressed.plane_logits`."""
    if not use_triton_products(rows):
        return torch_planes.plane_logits(rows, codes)
    parts = to_planes(rows.float(), codes.layout).split(codes.counts, dim=-1)
    products = [ops.plane_logits(part, *plane) for part, plane in zip(parts, codes.planes(), strict=True)]
    return codes.lines.to_tokens(sum(products[1:], products[0]))


def plane_mix(weights: Tensor, codes: CoefficientPlanes) -> Tensor:
    """Weights times codes kept as planes, fp32 [S, P, R]. See `reference_compressed.plane_mix`."""
    if not use_triton_products(weights):
        return torch_planes.plane_mix(weights, codes)
    lines = codes.lines.to_lines(weights.float())
    mixed = lines.new_zeros(*lines.shape[:2], codes.num_coefficients)
    add_planes(mixed, torch.cat([ops.plane_mix(lines, *plane) for plane in codes.planes()], dim=-1), codes.layout)
    return mixed


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """Sums fp32 [B, Hq, Q, S] over runs of neighbouring entries. See `reference.segment_sums`."""
    path = native if use_native(values, starts) else torch_path
    return path.segment_sums(values, starts)


def quantised_attention(
    query: Tensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    scale: float,
    bias: Tensor | None = None,
    window_key: Tensor | None = None,
    window_value: Tensor | None = None,
    window_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over quantised tokens and an exact window. See `reference_compressed.quantised_attention`."""
    if not use_triton(query):
        window = (window_key, window_value, window_bias)
        return torch_compressed.quantised_attention(query, key, value, scale, bias, *window)
    output, lse = ops.quantised_attention(
        query,
        [key.codes, *decode_scales(key.scale, key.zero, torch.float32)],
        [value.codes, *decode_scales(value.scale, value.zero, torch.float32)],
        [key.bits, key.group_size],
        [value.bits, value.group_size],
        key.length,
        scale,
        bias,
    )
    if window_key is None or window_value is None:
        return output, lse
    near = decode_attention(query, window_key, window_value, scale, window_bias)
    return merge_states([output, near[0]], [lse, near[1]])
