"""Products with planes: codes of one width whose bytes lie coefficient by coefficient, every field of a byte another
token.

One program takes neighbouring byte rows and every token that is packed in them, so that each byte is read once.

Legend: S streams, P rows of a stream, K coefficients, n byte rows, F = 8 / width fields of a byte: token f * n + i is
field f of byte row i; M = F * n tokens.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common

_BLOCK_TOKENS = 64
_BLOCK_K = 32


@triton.jit
def load_field(p_codes, o_byte, o_field, o_k, b_mask, num_coefficients, WIDTH: tl.constexpr):
    """Codes in the fields `o_field` of the byte rows `o_byte`, coefficients `o_k`."""
    b_byte = tl.load(p_codes + o_byte.to(tl.int64) * num_coefficients + o_k, mask=b_mask, other=0).to(tl.int32)
    return (b_byte >> (o_field * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def plane_logits_kernel(
    p_rows,
    p_codes,
    p_logits,
    num_rows,
    num_coefficients,
    num_bytes,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """rows [P, K] times codes [K, tokens of some byte rows]."""
    i_tile, i_stream, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_x = tl.arange(0, 8 // WIDTH * BLOCK_N)
    o_field, o_byte = o_x // BLOCK_N, i_tile * BLOCK_N + o_x % BLOCK_N
    b_live, b_inside = o_row < num_rows, o_byte < num_bytes
    p_stream = p_codes + i_stream * num_bytes * num_coefficients
    b_logits = tl.zeros([BLOCK_P, 8 // WIDTH * BLOCK_N], tl.float32)
    for first in range(0, num_coefficients, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        b_used = o_k < num_coefficients
        p_r = p_rows + (i_stream * num_rows + o_row)[:, None] * num_coefficients + o_k[None, :]
        b_rows = tl.load(p_r, mask=b_live[:, None] & b_used[None, :], other=0.0)
        b_mask = b_used[:, None] & b_inside[None, :]
        b_codes = load_field(p_stream, o_byte[None, :], o_field[None, :], o_k[:, None], b_mask, num_coefficients, WIDTH)
        b_logits += tl.dot(b_rows, b_codes.to(b_rows.dtype), input_precision="ieee")
    o_token = o_field.to(tl.int64) * num_bytes + o_byte
    p_l = p_logits + (i_stream * num_rows + o_row)[:, None] * (8 // WIDTH * num_bytes) + o_token[None, :]
    tl.store(p_l, b_logits, mask=b_live[:, None] & b_inside[None, :])


@triton.jit
def plane_mix_kernel(
    p_weights,
    p_codes,
    p_mixed,
    num_rows,
    num_coefficients,
    num_bytes,
    split_size,
    num_streams,
    num_row_blocks,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """weights [P, tokens] times codes [tokens, K] over one split of the byte rows."""
    i_split, i_column, i_both = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_stream, i_block = (i_both // num_row_blocks).to(tl.int64), i_both % num_row_blocks
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_k = i_column * BLOCK_K + tl.arange(0, BLOCK_K)
    o_x = tl.arange(0, 8 // WIDTH * BLOCK_N)
    o_field = o_x // BLOCK_N
    b_live, b_used = o_row < num_rows, o_k < num_coefficients
    p_stream = p_codes + i_stream * num_bytes * num_coefficients
    p_w = p_weights + (i_stream * num_rows + o_row)[:, None] * (8 // WIDTH * num_bytes)
    b_mixed = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    start = i_split * split_size
    for first in range(start, tl.minimum(start + split_size, num_bytes), BLOCK_N):
        o_byte = first + o_x % BLOCK_N
        b_inside = o_byte < num_bytes
        o_token = o_field.to(tl.int64) * num_bytes + o_byte
        b_weights = tl.load(p_w + o_token[None, :], mask=b_live[:, None] & b_inside[None, :], other=0.0)
        b_mask = b_inside[:, None] & b_used[None, :]
        b_codes = load_field(p_stream, o_byte[:, None], o_field[:, None], o_k[None, :], b_mask, num_coefficients, WIDTH)
        b_mixed += tl.dot(b_weights, b_codes.to(b_weights.dtype), input_precision="ieee")
    o_out = (i_split.to(tl.int64) * num_streams + i_stream) * num_rows + o_row
    p_m = p_mixed + o_out[:, None] * num_coefficients + o_k[None, :]
    tl.store(p_m, b_mixed, mask=b_live[:, None] & b_used[None, :])


def plane_logits(rows: Tensor, packed: Tensor, width: int) -> Tensor:
    """fp32 [S, P, M]: rows [S, P, K] times the codes of one plane, uint8 [S, n, K]."""
    streams, num_rows, num_coefficients = rows.shape
    num_bytes, fields = packed.shape[1], 8 // width
    logits = rows.new_empty(streams, num_rows, fields * num_bytes, dtype=torch.float32)
    if logits.numel() == 0:
        return logits
    block, tile = common.row_block(num_rows), _BLOCK_TOKENS // fields
    common.launch(
        plane_logits_kernel,
        (triton.cdiv(num_bytes, tile), streams, triton.cdiv(num_rows, block)),
        (rows.contiguous(), packed.contiguous(), logits, num_rows, num_coefficients, num_bytes),
        WIDTH=width,
        BLOCK_P=block,
        BLOCK_K=_BLOCK_K,
        BLOCK_N=tile,
        num_warps=4,
        num_stages=2,
    )
    return logits


def plane_mix(weights: Tensor, packed: Tensor, width: int) -> Tensor:
    """fp32 [S, P, K]: weights [S, P, M] times the codes of one plane, uint8 [S, n, K]."""
    streams, num_rows, _ = weights.shape
    num_bytes, num_coefficients = packed.shape[1:]
    block, tile = common.row_block(num_rows), _BLOCK_TOKENS // (8 // width)
    columns, row_blocks = triton.cdiv(num_coefficients, _BLOCK_K), triton.cdiv(num_rows, block)
    steps = max(1, triton.cdiv(num_bytes, tile))
    splits = common.num_splits(weights.device, streams * columns * row_blocks, steps)
    split_size = triton.cdiv(steps, splits) * tile
    splits = max(1, triton.cdiv(num_bytes, split_size))
    mixed = weights.new_empty(splits, streams, num_rows, num_coefficients, dtype=torch.float32)
    if mixed.numel() == 0:
        return mixed.sum(0)
    common.launch(
        plane_mix_kernel,
        (splits, columns, streams * row_blocks),
        (
            *(weights.contiguous(), packed.contiguous(), mixed, num_rows, num_coefficients, num_bytes, split_size),
            *(streams, row_blocks),
        ),
        WIDTH=width,
        BLOCK_P=block,
        BLOCK_K=_BLOCK_K,
        BLOCK_N=tile,
        num_warps=8,
        num_stages=2,
    )
    return mixed.sum(0)
