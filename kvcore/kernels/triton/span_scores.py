"""Coarse logits and routing scores of spans from one pass over the mean keys.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, P = G * Q rows, S spans, r directions,
d head dimension.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common

_BLOCK_SPANS = 32
# channels of one step: fp32 products are no matter of tensor cores, and wide ones spill registers
_FP32_CHANNELS = 32


@triton.jit
def span_scores_kernel(
    p_query,
    p_routing,
    p_mean,
    p_length,
    p_gain,
    p_direction,
    p_curvature,
    p_coarse,
    p_score,
    scale,
    num_rows,
    num_queries,
    num_spans,
    num_kv_heads,
    s_mb,
    s_mh,
    s_ms,
    s_md,
    s_lb,
    s_ls,
    s_gb,
    s_gh,
    s_gs,
    s_db,
    s_dh,
    s_ds,
    s_dr,
    s_dd,
    DIM: tl.constexpr,
    NUM_DIRECTIONS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_CURVATURE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of spans for the rows of one KV head; queries are contiguous [B, Hkv, P, d]."""
    i_tile, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_batch, i_head = i_pair // num_kv_heads, i_pair % num_kv_heads
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_s = (i_tile * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    b_live, b_seen = o_row < num_rows, o_s < num_spans
    b_shown = b_live[:, None] & b_seen[None, :]
    o_q = (i_pair * num_rows + o_row)[:, None] * DIM
    p_m = p_mean + i_batch * s_mb + i_head * s_mh + o_s[None, :] * s_ms
    b_length = tl.load(p_length + i_batch * s_lb + o_s * s_ls, mask=b_seen, other=0.0).to(tl.float32)
    b_log = tl.where(b_length > 0, tl.log(tl.where(b_length > 0, b_length, 1.0)), float("-inf"))

    b_coarse = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    b_score = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    for first in range(0, DIM, BLOCK_D):
        o_d = first + tl.arange(0, BLOCK_D)
        b_query_mask, b_key_mask = b_live[:, None] & (o_d[None, :] < DIM), b_seen[None, :] & (o_d[:, None] < DIM)
        b_query = tl.load(p_query + o_q + o_d[None, :], mask=b_query_mask, other=0.0)
        b_routing = tl.load(p_routing + o_q + o_d[None, :], mask=b_query_mask, other=0.0)
        b_mean = tl.load(p_m + o_d[:, None] * s_md, mask=b_key_mask, other=0.0).to(b_query.dtype)
        b_coarse += tl.dot(b_query, b_mean, input_precision="ieee") * scale
        b_score += tl.dot(b_routing, b_mean, input_precision="ieee") * scale
    o_qhead = i_head * (num_rows // num_queries) + (o_row // num_queries)
    if HAS_GAIN:
        p_g = p_gain + i_batch * s_gb + o_qhead[:, None] * s_gh + o_s[None, :] * s_gs
        b_score *= tl.load(p_g, mask=b_shown, other=0.0).to(tl.float32)
    if NUM_DIRECTIONS > 0:
        b_second = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
        p_d = p_direction + i_batch * s_db + i_head * s_dh + o_s[None, :] * s_ds
        for i_direction in range(NUM_DIRECTIONS):
            b_along = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
            for first in range(0, DIM, BLOCK_D):
                o_d = first + tl.arange(0, BLOCK_D)
                b_query_mask, b_key_mask = (
                    b_live[:, None] & (o_d[None, :] < DIM),
                    b_seen[None, :] & (o_d[:, None] < DIM),
                )
                b_routing = tl.load(p_routing + o_q + o_d[None, :], mask=b_query_mask, other=0.0)
                p_dd = p_d + i_direction * s_dr + o_d[:, None] * s_dd
                b_direction = tl.load(p_dd, mask=b_key_mask, other=0.0).to(b_routing.dtype)
                b_along += tl.dot(b_routing, b_direction, input_precision="ieee") * scale
            b_second += b_along * b_along
        if HAS_CURVATURE:
            b_second *= tl.load(p_curvature + o_qhead, mask=b_live, other=0.0).to(tl.float32)[:, None]
        b_score += 0.5 * b_second
    o_out = (i_pair * num_rows + o_row)[:, None] * num_spans + o_s[None, :]
    tl.store(p_coarse + o_out, b_coarse + b_log[None, :], mask=b_shown)
    tl.store(p_score + o_out, b_score + b_log[None, :], mask=b_shown)


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
    """See `reference.span_scores`."""
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, num_spans = mean_key.shape[1:3]
    rows = num_heads // num_kv_heads * num_queries
    coarse = query.new_empty(batch, num_heads, num_queries, num_spans, dtype=torch.float32)
    score = torch.empty_like(coarse)
    if num_spans == 0:
        return coarse, score
    block = common.row_block(rows)
    query = query.contiguous()
    routing = query if routing_query is None else routing_query.contiguous()
    gain = query if routing_gain is None else routing_gain
    direction = query if directions is None else directions
    args = (query, routing, mean_key, lengths, gain, direction, query if curvature is None else curvature.contiguous())
    strides = (
        *mean_key.stride(),
        *lengths.stride(),
        *((0,) * 3 if routing_gain is None else routing_gain.stride()),
        *((0,) * 5 if directions is None else directions.stride()),
    )
    common.launch(
        span_scores_kernel,
        (triton.cdiv(num_spans, _BLOCK_SPANS), batch * num_kv_heads, triton.cdiv(rows, block)),
        (*args, coarse, score, scale, rows, num_queries, num_spans, num_kv_heads, *strides),
        DIM=dim,
        NUM_DIRECTIONS=0 if directions is None else directions.shape[3],
        HAS_GAIN=routing_gain is not None,
        HAS_CURVATURE=curvature is not None,
        BLOCK_P=block,
        BLOCK_S=_BLOCK_SPANS,
        BLOCK_D=min(common.padded_dim(dim), _FP32_CHANNELS) if query.dtype == torch.float32 else common.padded_dim(dim),
        num_warps=4,
    )
    return coarse, score
