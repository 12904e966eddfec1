"""Attention over pages or tokens chosen per KV head: keys and values are read where they are, nothing is copied.

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, P = G * Q rows, N entries, I pages of the
index, d head dimension.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common
from kvcore.kernels.triton.common import Config, softmax_step, store_state
from kvcore.kernels.triton.decode import empty_state
from kvcore.kernels.triton.merge import merge_stacked


@triton.jit
def gather_kernel(
    p_query,
    p_key,
    p_value,
    p_index,
    p_bias,
    p_out,
    p_lse,
    scale,
    num_rows,
    num_queries,
    num_keys,
    num_places,
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
    s_ib,
    s_ih,
    s_ip,
    s_bb,
    s_bh,
    s_bg,
    s_bq,
    s_bn,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attention of the rows of one KV head over one split of the listed places (page, offset in the page)."""
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
    p_i = p_index + i_batch * s_ib + i_head * s_ih
    p_b = p_bias + i_batch * s_bb + i_head * s_bh + o_group * s_bg + o_query * s_bq

    b_top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    b_out = tl.zeros([BLOCK_P, BLOCK_V], tl.float32)
    start = i_split * split_size
    stop = tl.minimum(start + split_size, num_places)
    for first in range(start, stop, BLOCK_N):
        o_place = first + tl.arange(0, BLOCK_N)
        b_listed = o_place < stop
        b_page = tl.load(p_i + (o_place // PAGE).to(tl.int64) * s_ip, mask=b_listed, other=-1).to(tl.int64)
        o_n = b_page * PAGE + o_place % PAGE
        b_seen = b_listed & (b_page >= 0) & (o_n < num_keys)
        p_kn = p_k + o_n[None, :] * s_kn + o_d[:, None] * s_kd
        b_key = tl.load(p_kn, mask=b_seen[None, :] & (o_d[:, None] < DIM), other=0.0).to(b_query.dtype)
        b_logits = tl.dot(b_query, b_key, input_precision="ieee") * scale
        if HAS_BIAS:
            b_seen_row = b_live[:, None] & b_seen[None, :]
            b_logits += tl.load(p_b[:, None] + o_place[None, :].to(tl.int64) * s_bn, mask=b_seen_row, other=0.0)
        b_logits = tl.where(b_seen[None, :], b_logits, float("-inf"))
        p_vn = p_v + o_n[:, None] * s_vn + o_v[None, :] * s_vd
        b_value = tl.load(p_vn, mask=b_seen[:, None] & (o_v[None, :] < DIM_V), other=0.0)
        b_top, b_sum, b_out = softmax_step(b_logits, b_value, b_top, b_sum, b_out)

    o_state = (i_split.to(tl.int64) * tl.num_programs(1) + i_pair) * num_rows + o_row
    store_state(p_out, p_lse, o_state, b_live, b_top, b_sum, b_out, DIM_V, BLOCK_V)


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    page_size: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.gather_attention`."""
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, num_keys, dim_v = key.shape[1], key.shape[2], value.shape[3]
    rows = num_heads // num_kv_heads * num_queries
    places = index.shape[2] * page_size
    if places == 0 or num_keys == 0:
        return empty_state(query, dim_v)
    pairs, blocks = batch * num_kv_heads, triton.cdiv(rows, common.row_block(rows))
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, places)
    bias_view, bias_strides = common.expanded_bias(bias, shape, query)

    def run(config: Config) -> tuple[Tensor, Tensor]:
        split_size = triton.cdiv(triton.cdiv(places, config.splits), config.block) * config.block
        splits = triton.cdiv(places, split_size)
        outputs = query.new_empty(splits, batch, num_heads, num_queries, dim_v, dtype=torch.float32)
        lses = query.new_empty(splits, batch, num_heads, num_queries, dtype=torch.float32)
        args = (query, key, value, index, bias_view, outputs, lses, scale, rows, num_queries, num_keys, places)
        strides = (*query.stride(), *key.stride(), *value.stride(), *index.stride(), *bias_strides)
        common.launch(
            gather_kernel,
            (splits, pairs, blocks),
            (*args, split_size, num_kv_heads, *strides),
            PAGE=page_size,
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

    configs = common.attention_configs(query.device, pairs * blocks, places, dim, query.element_size())
    key_of_shape = ("gather", query.dtype, dim, dim_v, rows, pairs, page_size, common.length_class(places))
    return run(common.tuned(key_of_shape, configs, run, query.device))
