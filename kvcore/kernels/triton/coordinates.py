"""Logits of tokens that are kept as a few coordinates of low precision, several in a byte.

Legend: B batch, Hkv KV heads, P rows of a KV head, m coordinates, N tokens.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common

_BLOCK_TOKENS = 128
_BLOCK_COORDINATES = 32


@triton.jit
def coordinate_kernel(
    p_rows,
    p_codes,
    p_offset,
    p_table,
    p_logits,
    num_rows,
    num_coordinates,
    num_tokens,
    num_kv_heads,
    s_cb,
    s_ch,
    s_cj,
    s_cn,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of tokens for the rows of one KV head; the table says byte, shift and mask of every coordinate."""
    i_tile, i_pair, i_block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_batch, i_head = i_pair // num_kv_heads, i_pair % num_kv_heads
    o_row = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = (i_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    b_live, b_seen = o_row < num_rows, o_n < num_tokens
    p_c = p_codes + i_batch * s_cb + i_head * s_ch + o_n[None, :] * s_cn
    b_logits = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in range(0, num_coordinates, BLOCK_M):
        o_m = first + tl.arange(0, BLOCK_M)
        b_used = o_m < num_coordinates
        p_r = p_rows + (i_pair * num_rows + o_row)[:, None] * num_coordinates + o_m[None, :]
        b_rows = tl.load(p_r, mask=b_live[:, None] & b_used[None, :], other=0.0)
        b_line = tl.load(p_table + o_m, mask=b_used, other=0).to(tl.int64)
        b_shift = tl.load(p_table + num_coordinates + o_m, mask=b_used, other=0)
        b_mask = tl.load(p_table + 2 * num_coordinates + o_m, mask=b_used, other=0)
        p_cm = p_c + b_line[:, None] * s_cj
        b_byte = tl.load(p_cm, mask=b_used[:, None] & b_seen[None, :], other=0).to(tl.int32)
        b_code = (b_byte >> b_shift[:, None]) & b_mask[:, None]
        b_logits += tl.dot(b_rows, b_code.to(b_rows.dtype), input_precision="ieee")
    b_offset = tl.load(p_offset + i_pair * num_rows + o_row, mask=b_live, other=0.0)
    p_l = p_logits + (i_pair * num_rows + o_row)[:, None] * num_tokens + o_n[None, :]
    tl.store(p_l, b_logits + b_offset[:, None], mask=b_live[:, None] & b_seen[None, :])


def coordinate_logits(query: Tensor, codes: Tensor, dims: list[int], bits: list[int], offset: Tensor) -> Tensor:
    """See `reference_compressed.coordinate_logits`."""
    batch, num_heads, num_queries, num_coordinates = query.shape
    num_kv_heads, num_tokens = codes.shape[1], codes.shape[3]
    rows = num_heads // num_kv_heads * num_queries
    logits = query.new_empty(batch, num_heads, num_queries, num_tokens, dtype=torch.float32)
    if logits.numel() == 0:
        return logits
    block = common.row_block(rows)
    common.launch(
        coordinate_kernel,
        (triton.cdiv(num_tokens, _BLOCK_TOKENS), batch * num_kv_heads, triton.cdiv(rows, block)),
        (
            *(query.contiguous(), codes, offset.float().contiguous(), _table(tuple(dims), tuple(bits), query.device)),
            *(logits, rows, num_coordinates, num_tokens, num_kv_heads, *codes.stride()),
        ),
        BLOCK_P=block,
        BLOCK_M=_BLOCK_COORDINATES,
        BLOCK_N=_BLOCK_TOKENS,
        num_warps=4,
        num_stages=2,
    )
    return logits


@lru_cache(maxsize=64)
def _table(dims: tuple[int, ...], bits: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [3, m]: byte, shift and mask of every coordinate."""
    columns, first = [], 0
    for count, width in zip(dims, bits, strict=True):
        size = count * width // 8
        columns += [(first + k % size, 8 - width * (k // size + 1), 2**width - 1) for k in range(count)]
        first += size
    return torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous()
