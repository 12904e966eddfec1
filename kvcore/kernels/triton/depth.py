"""Products with packed coefficient lines: logits of rows, and lines mixed by attention weights.

One program takes runs of neighbouring bytes and every token that is packed in them (eight runs of tokens), so that each
byte is read once.

Legend: B batch, S streams (coefficient heads), P rows of a stream, R coefficients, L tokens of a line, J bytes of one
eighth of a line.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common

_BLOCK_J = 8  # bytes of each eighth per step: 64 tokens
_BLOCK_R = 32


@triton.jit
def load_lines(p_line, o_j, o_eighth, eighth, b_mask, BITS: tl.constexpr):
    """Codes of the tokens `o_eighth * eighth + o_j` of packed lines.

    Bit plane w is w pieces of `eighth` bytes; piece o % w holds, in field o // w, the codes of eighth o.
    """
    b_code = tl.zeros(b_mask.shape, tl.int32)
    if BITS & 8:
        b_code = tl.load(p_line + o_eighth.to(tl.int64) * eighth + o_j, mask=b_mask, other=0).to(tl.int32)
    if BITS & 4:
        o_byte = (o_eighth % 4).to(tl.int64) * eighth + o_j
        b_code = (tl.load(p_line + o_byte, mask=b_mask, other=0).to(tl.int32) >> (o_eighth // 4 * 4)) & 15
    if BITS & 2:
        o_byte = ((BITS & 4) + o_eighth % 2).to(tl.int64) * eighth + o_j
        b_field = (tl.load(p_line + o_byte, mask=b_mask, other=0).to(tl.int32) >> (o_eighth // 2 * 2)) & 3
        b_code |= b_field << (BITS & 4)
    if BITS & 1:
        o_byte = ((BITS & 6) + o_eighth * 0).to(tl.int64) * eighth + o_j
        b_field = (tl.load(p_line + o_byte, mask=b_mask, other=0).to(tl.int32) >> o_eighth) & 1
        b_code |= b_field << (BITS & 6)
    return b_code


@triton.jit
def packed_logits_kernel(
    p_rows,
    p_codes,
    p_logits,
    num_rows,
    num_coefficients,
    num_tokens,
    eighth,
    num_streams,
    s_cb,
    s_cs,
    s_cr,
    BITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """rows [P, R] times raw codes [R, tokens of one byte run]."""
    i_tile, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_x = tl.arange(0, 8 * BLOCK_J)
    o_eighth, o_j = o_x // BLOCK_J, i_tile * BLOCK_J + o_x % BLOCK_J
    b_inside = o_j < eighth
    o_j = o_j.to(tl.int64)
    b_live = o_row < num_rows
    p_line = p_codes + (i_pair // num_streams) * s_cb + (i_pair % num_streams) * s_cs
    b_logits = tl.zeros([BLOCK_P, 8 * BLOCK_J], tl.float32)
    for first in range(0, num_coefficients, BLOCK_R):
        o_r = first + tl.arange(0, BLOCK_R)
        b_used = o_r < num_coefficients
        p_r = p_rows + (i_pair * num_rows + o_row)[:, None] * num_coefficients + o_r[None, :]
        b_rows = tl.load(p_r, mask=b_live[:, None] & b_used[None, :], other=0.0)
        b_mask = b_used[:, None] & b_inside[None, :]
        p_l = p_line + o_r.to(tl.int64)[:, None] * s_cr
        b_codes = load_lines(p_l, o_j[None, :], o_eighth[None, :], eighth, b_mask, BITS)
        b_logits += tl.dot(b_rows, b_codes.to(b_rows.dtype), input_precision="ieee")
    o_token = o_eighth.to(tl.int64) * eighth + o_j
    b_store = b_live[:, None] & (b_inside & (o_token < num_tokens))[None, :]
    tl.store(p_logits + (i_pair * num_rows + o_row)[:, None] * num_tokens + o_token[None, :], b_logits, mask=b_store)


@triton.jit
def packed_mix_kernel(
    p_weights,
    p_codes,
    p_mixed,
    num_rows,
    num_coefficients,
    num_tokens,
    eighth,
    split_size,
    num_streams,
    num_pairs,
    num_row_blocks,
    s_cb,
    s_cs,
    s_cr,
    BITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """weights [P, tokens] times raw codes [tokens, R] over one split of the byte runs."""
    i_split, i_column, i_both = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_pair, i_block = (i_both // num_row_blocks).to(tl.int64), i_both % num_row_blocks
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_r = i_column * BLOCK_R + tl.arange(0, BLOCK_R)
    o_x = tl.arange(0, 8 * BLOCK_J)
    o_eighth = o_x // BLOCK_J
    b_live, b_used = o_row < num_rows, o_r < num_coefficients
    p_line = p_codes + (i_pair // num_streams) * s_cb + (i_pair % num_streams) * s_cs
    p_line = p_line + o_r.to(tl.int64)[None, :] * s_cr
    p_w = p_weights + (i_pair * num_rows + o_row)[:, None] * num_tokens
    b_mixed = tl.zeros([BLOCK_P, BLOCK_R], tl.float32)
    start = i_split * split_size
    for first in range(start, tl.minimum(start + split_size, eighth), BLOCK_J):
        o_j = (first + o_x % BLOCK_J).to(tl.int64)
        o_token = o_eighth.to(tl.int64) * eighth + o_j
        b_inside = (o_j < eighth) & (o_token < num_tokens)
        b_weights = tl.load(p_w + o_token[None, :], mask=b_live[:, None] & b_inside[None, :], other=0.0)
        b_mask = b_inside[:, None] & b_used[None, :]
        b_codes = load_lines(p_line, o_j[:, None], o_eighth[:, None], eighth, b_mask, BITS)
        b_mixed += tl.dot(b_weights, b_codes.to(b_weights.dtype), input_precision="ieee")
    o_out = (i_split.to(tl.int64) * num_pairs + i_pair) * num_rows + o_row
    p_m = p_mixed + o_out[:, None] * num_coefficients + o_r[None, :]
    tl.store(p_m, b_mixed, mask=b_live[:, None] & b_used[None, :])


def packed_logits(rows: Tensor, codes: Tensor, bits: int, num_tokens: int) -> Tensor:
    """fp32 [B, S, P, N]: rows [B, S, P, R] times raw codes, packed lines uint8 [B, S, R, bytes]."""
    batch, streams, num_rows, num_coefficients = rows.shape
    logits = rows.new_empty(batch, streams, num_rows, num_tokens, dtype=torch.float32)
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    eighth, block = codes.shape[-1] // bits, common.row_block(num_rows)
    if logits.numel() == 0:
        return logits
    common.launch(
        packed_logits_kernel,
        (triton.cdiv(eighth, _BLOCK_J), batch * streams, triton.cdiv(num_rows, block)),
        (
            *(rows.contiguous(), codes, logits, num_rows, num_coefficients, num_tokens, eighth, streams),
            *codes.stride()[:3],
        ),
        BITS=bits,
        BLOCK_P=block,
        BLOCK_R=_BLOCK_R,
        BLOCK_J=_BLOCK_J,
        num_warps=4,
        num_stages=2,
    )
    return logits


def packed_mix(weights: Tensor, codes: Tensor, bits: int) -> Tensor:
    """fp32 [B, S, P, R]: weights [B, S, P, N] times raw codes, packed lines uint8 [B, S, R, bytes]."""
    batch, streams, num_rows, num_tokens = weights.shape
    num_coefficients = codes.shape[2]
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    eighth, block = codes.shape[-1] // bits, common.row_block(num_rows)
    columns, row_blocks = triton.cdiv(num_coefficients, _BLOCK_R), triton.cdiv(num_rows, block)
    steps = max(1, triton.cdiv(eighth, _BLOCK_J))
    splits = common.num_splits(weights.device, batch * streams * columns * row_blocks, steps)
    split_size = triton.cdiv(steps, splits) * _BLOCK_J
    splits = max(1, triton.cdiv(eighth, split_size))
    mixed = weights.new_empty(splits, batch, streams, num_rows, num_coefficients, dtype=torch.float32)
    common.launch(
        packed_mix_kernel,
        (splits, columns, batch * streams * row_blocks),
        (
            *(weights.contiguous(), codes, mixed, num_rows, num_coefficients, num_tokens, eighth, split_size),
            *(streams, batch * streams, row_blocks, *codes.stride()[:3]),
        ),
        BITS=bits,
        BLOCK_P=block,
        BLOCK_R=_BLOCK_R,
        BLOCK_J=_BLOCK_J,
        num_warps=8 if weights.dtype == torch.float32 else 4,
        num_stages=2,
    )
    return mixed.sum(0)
