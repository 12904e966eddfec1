"""Log-sum-exp merge of partial attentions.

Legend: S states, B batch, Hq query heads, Q query tokens, R = B * Hq * Q rows, dv value dimension.
"""

# ruff: noqa: N803 - constants of a kernel are upper case
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.kernels.triton import common

_ROWS_PER_PROGRAM = 4


@triton.jit
def merge_kernel(
    p_outputs,
    p_lses,
    p_out,
    p_lse,
    num_states,
    num_rows,
    num_columns,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows of the merged output: a running maximum over the states, then one division."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_v = tl.arange(0, BLOCK_V)
    b_live = o_row < num_rows
    b_shown = b_live[:, None] & (o_v[None, :] < num_columns)
    b_top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_out = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    o_state = o_row
    for _ in range(0, num_states):
        b_lse = tl.load(p_lses + o_state, mask=b_live, other=float("-inf"))
        b_part = tl.load(p_outputs + o_state[:, None] * num_columns + o_v[None, :], mask=b_shown, other=0.0)
        b_next = tl.maximum(b_top, b_lse)
        b_safe = tl.where(b_next == float("-inf"), 0.0, b_next)
        b_keep, b_weight = tl.exp(b_top - b_safe), tl.exp(b_lse - b_safe)
        b_sum = b_sum * b_keep + b_weight
        b_out = b_out * b_keep[:, None] + b_weight[:, None] * b_part.to(tl.float32)
        b_top = b_next
        o_state += num_rows
    b_total = tl.where(b_sum > 0, b_sum, 1.0)
    b_out = b_out / b_total[:, None]
    tl.store(p_out + o_row[:, None] * num_columns + o_v[None, :], b_out.to(p_out.dtype.element_ty), mask=b_shown)
    tl.store(p_lse + o_row, tl.where(b_sum > 0, b_top + tl.log(b_total), float("-inf")), mask=b_live)


def merge_stacked(outputs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge stacked states.

    Args:
        outputs: [S, B, Hq, Q, dv], contiguous.
        lses: [S, B, Hq, Q] in fp32, contiguous, natural log.
        dtype: of the merged output.

    Returns:
        Output [B, Hq, Q, dv] and log-sum-exp [B, Hq, Q].
    """
    num_states, num_columns = outputs.shape[0], outputs.shape[-1]
    if num_states == 1:
        return outputs[0].to(dtype), lses[0]
    output = outputs.new_empty(outputs.shape[1:], dtype=dtype)
    lse = torch.empty_like(lses[0])
    common.launch(
        merge_kernel,
        (triton.cdiv(lse.numel(), _ROWS_PER_PROGRAM),),
        (outputs, lses, output, lse, num_states, lse.numel(), num_columns),
        BLOCK_R=_ROWS_PER_PROGRAM,
        BLOCK_V=triton.next_power_of_2(num_columns),
        num_warps=4,
    )
    return output, lse
