"""Attention over factorised spans in factor space.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, P = G * Q rows, M spans, n tokens of a
span, R key components, W value components, d head dimension.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common
from kvcore.kernels.triton.common import softmax_step, store_state
from kvcore.kernels.triton.decode import empty_state
from kvcore.kernels.triton.merge import merge_stacked

_BLOCK_TOKENS = 32


@triton.jit
def lowrank_kernel(
    p_query,
    p_key_factor,
    p_key_basis,
    p_value_factor,
    p_value_basis,
    p_length,
    p_key_gain,
    p_value_gain,
    p_bias,
    p_out,
    p_lse,
    scale,
    num_rows,
    num_queries,
    num_spans,
    longest,
    split_size,
    num_kv_heads,
    s_bb,
    s_bh,
    s_bg,
    s_bq,
    s_bm,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RANK: tl.constexpr,
    RANK_V: tl.constexpr,
    HAS_KEY_GAIN: tl.constexpr,
    HAS_VALUE_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The rows of one KV head over a run of spans; all operands but the bias are contiguous."""
    i_split, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_batch, i_head = i_pair // num_kv_heads, i_pair % num_kv_heads
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    o_r, o_w = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_W)
    b_live = o_row < num_rows
    p_q = p_query + (i_pair * num_rows + o_row)[:, None] * DIM + o_d[None, :]
    b_query = tl.load(p_q, mask=b_live[:, None] & (o_d[None, :] < DIM), other=0.0)
    o_group, o_query = (o_row // num_queries).to(tl.int64), (o_row % num_queries).to(tl.int64)
    p_b = p_bias + i_batch * s_bb + i_head * s_bh + o_group * s_bg + o_query * s_bq

    b_top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    b_out = tl.zeros([BLOCK_P, BLOCK_V], tl.float32)
    start = i_split * split_size
    for i_step in range(start, tl.minimum(start + split_size, num_spans)):
        i_span = i_pair * num_spans + i_step
        length = tl.load(p_length + i_span).to(tl.int32)
        p_kb = p_key_basis + (i_span * RANK + o_r[None, :]) * DIM + o_d[:, None]
        b_basis = tl.load(p_kb, mask=(o_r[None, :] < RANK) & (o_d[:, None] < DIM), other=0.0).to(b_query.dtype)
        b_turned = tl.dot(b_query, b_basis, input_precision="ieee") * scale
        if HAS_KEY_GAIN:
            p_kg = p_key_gain + i_span * RANK + o_r
            b_turned *= tl.load(p_kg, mask=o_r < RANK, other=0.0).to(tl.float32)[None, :]
        b_turned = b_turned.to(b_query.dtype)

        b_span_top = tl.full([BLOCK_P], float("-inf"), tl.float32)
        b_span_sum = tl.zeros([BLOCK_P], tl.float32)
        b_mixed = tl.zeros([BLOCK_P, BLOCK_W], tl.float32)
        for first in range(0, length, BLOCK_N):
            o_n = first + tl.arange(0, BLOCK_N)
            b_seen = o_n < length
            o_token = i_span * longest + o_n
            p_kf = p_key_factor + o_token[None, :] * RANK + o_r[:, None]
            b_factor = tl.load(p_kf, mask=b_seen[None, :] & (o_r[:, None] < RANK), other=0.0).to(b_query.dtype)
            b_logits = tl.dot(b_turned, b_factor, input_precision="ieee")
            b_logits = tl.where(b_seen[None, :], b_logits, float("-inf"))
            p_vf = p_value_factor + o_token[:, None] * RANK_V + o_w[None, :]
            b_value = tl.load(p_vf, mask=b_seen[:, None] & (o_w[None, :] < RANK_V), other=0.0)
            b_span_top, b_span_sum, b_mixed = softmax_step(b_logits, b_value, b_span_top, b_span_sum, b_mixed)

        # normalised before the product with the basis, so that half precision cannot overflow
        b_mixed = b_mixed / tl.where(b_span_sum > 0, b_span_sum, 1.0)[:, None]
        if HAS_VALUE_GAIN:
            p_vg = p_value_gain + i_span * RANK_V + o_w
            b_mixed *= tl.load(p_vg, mask=o_w < RANK_V, other=0.0).to(tl.float32)[None, :]
        p_vb = p_value_basis + (i_span * RANK_V + o_w[:, None]) * DIM_V + o_v[None, :]
        b_basis_v = tl.load(p_vb, mask=(o_w[:, None] < RANK_V) & (o_v[None, :] < DIM_V), other=0.0)
        b_span_out = tl.dot(b_mixed.to(b_basis_v.dtype), b_basis_v, input_precision="ieee")
        if HAS_BIAS:
            b_span_top += tl.load(p_b + (i_span - i_pair * num_spans) * s_bm, mask=b_live, other=0.0)
        b_next = tl.maximum(b_top, b_span_top)
        b_safe = tl.where(b_next == float("-inf"), 0.0, b_next)
        b_keep, b_weight = tl.exp(b_top - b_safe), tl.exp(b_span_top - b_safe) * b_span_sum
        b_sum = b_sum * b_keep + b_weight
        b_out = b_out * b_keep[:, None] + b_span_out * b_weight[:, None]
        b_top = b_next

    o_state = (i_split.to(tl.int64) * tl.num_programs(1) + i_pair) * num_rows + o_row
    store_state(p_out, p_lse, o_state, b_live, b_top, b_sum, b_out, DIM_V, BLOCK_V)


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
    """See `reference_compressed.lowrank_attention`."""
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, num_spans, longest, rank = key_factors.shape[1:]
    rank_v, dim_v = value_basis.shape[3], value_basis.shape[4]
    if num_spans == 0 or longest == 0:
        return empty_state(query, dim_v)
    rows = num_heads // num_kv_heads * num_queries
    pairs, block = batch * num_kv_heads, common.row_block(rows)
    splits = common.num_splits(query.device, pairs * triton.cdiv(rows, block), num_spans)
    split_size = triton.cdiv(num_spans, splits)
    splits = triton.cdiv(num_spans, split_size)
    outputs = query.new_empty(splits, batch, num_heads, num_queries, dim_v, dtype=torch.float32)
    lses = query.new_empty(splits, batch, num_heads, num_queries, dtype=torch.float32)
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, num_spans)
    bias, bias_strides = common.expanded_bias(span_bias, shape, query)
    operands = [query, key_factors, key_basis, value_factors, value_basis, lengths]
    gains = [query if gain is None else gain for gain in (key_gain, value_gain)]
    common.launch(
        lowrank_kernel,
        (splits, pairs, triton.cdiv(rows, block)),
        (
            *(operand.contiguous() for operand in operands + gains),
            *(bias, outputs, lses, scale, rows, num_queries, num_spans, longest, split_size, num_kv_heads),
            *bias_strides,
        ),
        DIM=dim,
        DIM_V=dim_v,
        RANK=rank,
        RANK_V=rank_v,
        HAS_KEY_GAIN=key_gain is not None,
        HAS_VALUE_GAIN=value_gain is not None,
        HAS_BIAS=span_bias is not None,
        BLOCK_P=block,
        BLOCK_N=_BLOCK_TOKENS,
        BLOCK_D=common.padded_dim(dim),
        BLOCK_V=common.padded_dim(dim_v),
        BLOCK_R=common.padded_dim(rank),
        BLOCK_W=common.padded_dim(rank_v),
        num_warps=4,
        num_stages=2,
    )
    return merge_stacked(outputs, lses, query.dtype)
