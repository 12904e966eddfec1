"""Attention over tokens quantised in groups: keys per channel, values per token (KIVI's layout, `kvcore.quant`).

Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, P = G * Q rows, N tokens, E key groups
(along tokens), C value groups (along channels), d head dimension.
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
from kvcore.quant import bit_planes

# Entries (tokens times channels) of a step that registers hold without spilling; fp32, and each further plane of the
# codes, halve them.
_ENTRIES = 8192


@triton.jit
def load_codes(p_line, o_entry, b_mask, LINE: tl.constexpr, BITS: tl.constexpr):
    """Codes of the entries `o_entry` of packed lines of LINE codes: every plane's bits, shifted into place.

    Entry i of the plane of width w is field i // n of byte i % n, n = LINE * w / 8.
    """
    b_code = tl.zeros(o_entry.shape, tl.int32)
    piece = LINE // 8
    if BITS & 8:
        b_code = tl.load(p_line + o_entry, mask=b_mask, other=0).to(tl.int32)
    if BITS & 4:
        b_byte = tl.load(p_line + o_entry % (4 * piece), mask=b_mask, other=0).to(tl.int32)
        b_code = (b_byte >> ((o_entry // (4 * piece)) * 4).to(tl.int32)) & 15
    if BITS & 2:
        p_plane = p_line + (BITS & 4) * piece
        b_byte = tl.load(p_plane + o_entry % (2 * piece), mask=b_mask, other=0).to(tl.int32)
        b_code |= ((b_byte >> ((o_entry // (2 * piece)) * 2).to(tl.int32)) & 3) << (BITS & 4)
    if BITS & 1:
        p_plane = p_line + (BITS & 6) * piece
        b_byte = tl.load(p_plane + o_entry % piece, mask=b_mask, other=0).to(tl.int32)
        b_code |= ((b_byte >> (o_entry // piece).to(tl.int32)) & 1) << (BITS & 6)
    return b_code


@triton.jit
def quantised_kernel(
    p_query,
    p_key,
    p_key_step,
    p_key_zero,
    p_value,
    p_value_step,
    p_value_zero,
    p_bias,
    p_out,
    p_lse,
    scale,
    num_rows,
    num_queries,
    num_tokens,
    num_groups,
    split_size,
    num_kv_heads,
    s_kb,
    s_kh,
    s_kd,
    s_ke,
    s_sb,
    s_sh,
    s_sd,
    s_vb,
    s_vh,
    s_vn,
    s_vc,
    s_tb,
    s_th,
    s_tn,
    s_bb,
    s_bh,
    s_bg,
    s_bq,
    s_bn,
    DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The rows of one KV head over a run of key groups, each in a few steps: scales are one per channel and group."""
    i_split, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_batch, i_head = i_pair // num_kv_heads, i_pair % num_kv_heads
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    b_live, b_channel = o_row < num_rows, o_d < DIM
    p_q = p_query + (i_pair * num_rows + o_row)[:, None] * DIM + o_d[None, :]
    b_query = tl.load(p_q, mask=b_live[:, None] & b_channel[None, :], other=0.0)
    o_group, o_query = (o_row // num_queries).to(tl.int64), (o_row % num_queries).to(tl.int64)
    p_b = p_bias + i_batch * s_bb + i_head * s_bh + o_group * s_bg + o_query * s_bq
    o_scale_k = i_batch * s_sb + i_head * s_sh + o_d.to(tl.int64) * s_sd
    p_k = p_key + i_batch * s_kb + i_head * s_kh + o_d.to(tl.int64)[:, None] * s_kd
    o_c = o_d // VALUE_GROUP
    p_v = p_value + i_batch * s_vb + i_head * s_vh + o_c[None, :] * s_vc
    o_scale_v = i_batch * s_tb + i_head * s_th + o_c[None, :]

    b_top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    b_out = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    start = i_split * split_size
    for i_step in range(start * STEPS, tl.minimum(start + split_size, num_groups) * STEPS):
        o_t = (i_step % STEPS) * BLOCK_N + tl.arange(0, BLOCK_N)
        i_wide = i_pair * 0 + i_step // STEPS  # 64 bits
        o_n = i_wide * KEY_GROUP + o_t
        b_seen = (o_t < KEY_GROUP) & (o_n < num_tokens)
        b_mask_k = b_channel[:, None] & (o_t[None, :] < KEY_GROUP)
        p_group = p_k + i_wide * s_ke
        b_codes = load_codes(p_group, o_t[None, :] + o_d[:, None] * 0, b_mask_k, KEY_GROUP, KEY_BITS)
        b_step = tl.load(p_key_step + o_scale_k + i_wide, mask=b_channel, other=0.0).to(tl.float32)
        b_zero = tl.load(p_key_zero + o_scale_k + i_wide, mask=b_channel, other=0.0).to(tl.float32)
        b_key = (b_codes.to(tl.float32) * b_step[:, None] + b_zero[:, None]).to(b_query.dtype)
        b_logits = tl.dot(b_query, b_key, input_precision="ieee") * scale
        if HAS_BIAS:
            b_seen_row = b_live[:, None] & b_seen[None, :]
            b_logits += tl.load(p_b[:, None] + o_n[None, :] * s_bn, mask=b_seen_row, other=0.0)
        b_logits = tl.where(b_seen[None, :], b_logits, float("-inf"))

        b_mask_v = b_seen[:, None] & b_channel[None, :]
        o_entry = (o_d % VALUE_GROUP)[None, :] + o_t[:, None] * 0
        b_codes_v = load_codes(p_v + o_n[:, None] * s_vn, o_entry, b_mask_v, VALUE_GROUP, VALUE_BITS)
        o_scale = o_scale_v + o_n[:, None] * s_tn
        b_step_v = tl.load(p_value_step + o_scale, mask=b_mask_v, other=0.0).to(tl.float32)
        b_zero_v = tl.load(p_value_zero + o_scale, mask=b_mask_v, other=0.0).to(tl.float32)
        b_value = (b_codes_v.to(tl.float32) * b_step_v + b_zero_v).to(b_query.dtype)
        b_top, b_sum, b_out = softmax_step(b_logits, b_value, b_top, b_sum, b_out)

    o_state = (i_split.to(tl.int64) * tl.num_programs(1) + i_pair) * num_rows + o_row
    store_state(p_out, p_lse, o_state, b_live, b_top, b_sum, b_out, DIM, BLOCK_D)


def quantised_attention(
    query: Tensor,
    key: tuple[Tensor, Tensor, Tensor],
    value: tuple[Tensor, Tensor, Tensor],
    key_form: tuple[int, int],
    value_form: tuple[int, int],
    num_tokens: int,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The quantised part of `reference_compressed.quantised_attention`.

    Args:
        query: [B, Hq, Q, d].
        key: codes uint8 [B, Hkv, d, E, bytes], steps and zero points [B, Hkv, d, E] as floats.
        value: codes uint8 [B, Hkv, N, C, bytes], steps and zero points [B, Hkv, N, C] as floats.
        key_form, value_form: (bits, group size).
        num_tokens: N.
        scale: factor on the logits.
        bias: broadcastable to [B, Hkv, G, Q, N].
    """
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, num_groups = key[0].shape[1], key[0].shape[3]
    if num_tokens == 0:
        return empty_state(query, dim)
    rows = num_heads // num_kv_heads * num_queries
    pairs, block = batch * num_kv_heads, common.row_block(rows)
    splits = common.num_splits(query.device, pairs * triton.cdiv(rows, block), num_groups)
    split_size = triton.cdiv(num_groups, splits)
    splits = triton.cdiv(num_groups, split_size)
    outputs = query.new_empty(splits, batch, num_heads, num_queries, dim, dtype=torch.float32)
    lses = query.new_empty(splits, batch, num_heads, num_queries, dtype=torch.float32)
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, num_tokens)
    bias_view, bias_strides = common.expanded_bias(bias, shape, query)
    # bytes of a group and scales of a line are neighbours; everything else is strided
    codes = [x[0] if x[0].stride(-1) == 1 else x[0].contiguous() for x in (key, value)]
    scales = [[side.contiguous() for side in x[1:]] for x in (key, value)]
    channels, planes = common.padded_dim(dim), max(len(bit_planes(bits)) for bits, _ in (key_form, value_form))
    halvings = planes - 1 + (query.dtype == torch.float32)
    tokens = max(16, min(common.padded_dim(key_form[1]), (_ENTRIES >> halvings) // channels))
    common.launch(
        quantised_kernel,
        (splits, pairs, triton.cdiv(rows, block)),
        (
            *(query.contiguous(), codes[0], *scales[0], codes[1], *scales[1], bias_view, outputs, lses),
            *(scale, rows, num_queries, num_tokens, num_groups, split_size, num_kv_heads),
            *(*codes[0].stride()[:4], *scales[0][0].stride()[:3]),
            *(*codes[1].stride()[:4], *scales[1][0].stride()[:3], *bias_strides),
        ),
        DIM=dim,
        KEY_BITS=key_form[0],
        KEY_GROUP=key_form[1],
        VALUE_BITS=value_form[0],
        VALUE_GROUP=value_form[1],
        HAS_BIAS=bias is not None,
        BLOCK_P=block,
        BLOCK_N=tokens,
        BLOCK_D=channels,
        STEPS=common.padded_dim(key_form[1]) // tokens,
        num_warps=16 if halvings and dim > 128 else 8 if halvings or dim > 64 or key_form[1] > 64 else 4,
        num_stages=1,
    )
    return merge_stacked(outputs, lses, query.dtype)
