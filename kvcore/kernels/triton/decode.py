"""Split-KV attention of a few query tokens over exact entries.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, P = G * Q rows, N entries, d head
dimension, S splits.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common
from kvcore.kernels.triton.common import Config, softmax_step, store_state
from kvcore.kernels.triton.merge import merge_stacked


@triton.jit
def decode_kernel(
    p_query,
    p_key,
    p_value,
    p_bias,
    p_out,
    p_lse,
    scale,
    num_rows,
    num_queries,
    num_keys,
    split_size,
    num_kv_heads,
    s_qb,
    s_qh,
    s_qq,
    s_qd,
    s_kb,
    s_kh,
    s_kn,
    s_kd,
    s_vb,
    s_vh,
    s_vn,
    s_vd,
    s_bb,
    s_bh,
    s_bg,
    s_bq,
    s_bn,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attention of the rows of one KV head over one split: normalised output and log-sum-exp."""
    i_split, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_batch, i_head = i_pair // num_kv_heads, i_pair % num_kv_heads
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    b_live = o_row < num_rows
    o_group, o_query = (o_row // num_queries).to(tl.int64), (o_row % num_queries).to(tl.int64)
    o_qhead = i_head * (num_rows // num_queries) + o_group
    p_q = p_query + i_batch * s_qb + o_qhead[:, None] * s_qh + o_query[:, None] * s_qq + o_d[None, :] * s_qd
    b_query = tl.load(p_q, mask=b_live[:, None] & (o_d[None, :] < DIM), other=0.0)
    p_k = p_key + i_batch * s_kb + i_head * s_kh
    p_v = p_value + i_batch * s_vb + i_head * s_vh
    p_b = p_bias + i_batch * s_bb + i_head * s_bh + o_group * s_bg + o_query * s_bq

    b_top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    b_out = tl.zeros([BLOCK_P, BLOCK_V], tl.float32)
    start = i_split * split_size
    stop = tl.minimum(start + split_size, num_keys)
    for first in range(start, stop, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_seen = o_n < stop
        o_n = o_n.to(tl.int64)
        p_kn = p_k + o_n[None, :] * s_kn + o_d[:, None] * s_kd
        b_key = tl.load(p_kn, mask=b_seen[None, :] & (o_d[:, None] < DIM), other=0.0).to(b_query.dtype)
        b_logits = tl.dot(b_query, b_key, input_precision="ieee") * scale
        if HAS_BIAS:
            b_seen_row = b_live[:, None] & b_seen[None, :]
            b_logits += tl.load(p_b[:, None] + o_n[None, :] * s_bn, mask=b_seen_row, other=0.0)
        b_logits = tl.where(b_seen[None, :], b_logits, float("-inf"))
        p_vn = p_v + o_n[:, None] * s_vn + o_v[None, :] * s_vd
        b_value = tl.load(p_vn, mask=b_seen[:, None] & (o_v[None, :] < DIM_V), other=0.0)
        b_top, b_sum, b_out = softmax_step(b_logits, b_value, b_top, b_sum, b_out)

    o_state = (i_split.to(tl.int64) * tl.num_programs(1) + i_pair) * num_rows + o_row
    store_state(p_out, p_lse, o_state, b_live, b_top, b_sum, b_out, DIM_V, BLOCK_V)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`; a mask arrives as part of the bias."""
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, num_keys, dim_v = key.shape[1], key.shape[2], value.shape[3]
    rows = num_heads // num_kv_heads * num_queries
    if num_keys == 0:
        return empty_state(query, dim_v)
    pairs, blocks = batch * num_kv_heads, triton.cdiv(rows, common.row_block(rows))
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, num_keys)
    bias_view, bias_strides = common.expanded_bias(bias, shape, query)

    def run(config: Config) -> tuple[Tensor, Tensor]:
        split_size = triton.cdiv(triton.cdiv(num_keys, config.splits), config.block) * config.block
        splits = triton.cdiv(num_keys, split_size)
        outputs = query.new_empty(splits, batch, num_heads, num_queries, dim_v, dtype=torch.float32)
        lses = query.new_empty(splits, batch, num_heads, num_queries, dtype=torch.float32)
        args = (query, key, value, bias_view, outputs, lses, scale, rows, num_queries, num_keys, split_size)
        strides = (*query.stride(), *key.stride(), *value.stride(), *bias_strides)
        common.launch(
            decode_kernel,
            (splits, pairs, blocks),
            (*args, num_kv_heads, *strides),
            DIM=dim,
            DIM_V=dim_v,
            HAS_BIAS=bias is not None,
            BLOCK_P=common.row_block(rows),
            BLOCK_N=config.block,
            BLOCK_D=common.padded_dim(dim),
            BLOCK_V=common.padded_dim(dim_v),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return merge_stacked(outputs, lses, query.dtype)

    configs = common.attention_configs(query.device, pairs * blocks, num_keys, dim, query.element_size())
    key_of_shape = ("decode", query.dtype, dim, dim_v, rows, pairs, common.length_class(num_keys), bias is not None)
    return run(common.tuned(key_of_shape, configs, run, query.device))


def empty_state(query: Tensor, dim_v: int) -> tuple[Tensor, Tensor]:
    """Attention over no entry: zeros, and a log-sum-exp of -inf."""
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    return query.new_zeros(*query.shape[:3], dim_v), lse
