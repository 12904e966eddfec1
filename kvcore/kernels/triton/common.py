"""What the kernels share: launching, block sizes from shapes, tuning on a GPU, the online softmax step.

Legend: P rows (G * Q) of a KV head, N entries, d head dimension.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs per multiprocessor that a split aims at, and the processors assumed where there is no GPU (interpreter).
_WAVES = 2
_PROCESSORS_WITHOUT_GPU = 4
MAX_SPLITS = 64
# Rows of one program: tl.dot needs 16.
MIN_ROWS, MAX_ROWS = 16, 64


@dataclass(frozen=True)
class Config:
    """How one launch is cut: entries per step, programs along the entries, warps and pipeline stages."""

    block: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **meta: Any) -> None:
    """Start a kernel; the one place where kernels are started."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def row_block(rows: int) -> int:
    """Rows of one program, a power of two."""
    return min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(rows)))


def padded_dim(size: int) -> int:
    """A dimension of a dot product, padded to a power of two of at least 16."""
    return max(16, triton.next_power_of_2(size))


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(device: torch.device, programs: int, steps: int) -> int:
    """Programs along the entries, so that the GPU is full: at most one per step."""
    wanted = triton.cdiv(_WAVES * num_processors(device), max(programs, 1))
    return max(1, min(wanted, steps, MAX_SPLITS))


def attention_configs(device: torch.device, programs: int, entries: int, dim: int, itemsize: int) -> list[Config]:
    """Launches worth trying for attention over `entries`; the first is the choice where nothing is measured."""
    row_bytes = dim * itemsize
    if row_bytes > 512:  # fp32 with d 256: four warps spill registers
        tried = (32, 8, 2), (16, 4, 2), (64, 8, 2)
    elif row_bytes > 256:
        tried = (32, 4, 2), (64, 4, 2), (64, 8, 2)
    else:
        tried = (64, 4, 2), (128, 4, 2), (64, 4, 3)
    configs = []
    for block, warps, stages in tried:
        splits = num_splits(device, programs, triton.cdiv(entries, block))
        configs.append(Config(block, splits, warps, stages))
    return configs


_chosen: dict[Hashable, Config] = {}


def tuned(key: Hashable, configs: list[Config], run: Callable[[Config], Any], device: torch.device) -> Config:
    """The fastest of several launches, measured once per key at its first use on a GPU.

    Nothing is measured at import, without a GPU, while a graph is captured, or with KVCORE_AUTOTUNE=0: then it is the
    first, which the shapes chose.
    """
    if key in _chosen:
        return _chosen[key]
    off = os.environ.get("KVCORE_AUTOTUNE", "1") == "0"
    if off or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return configs[0]
    timings = {config: triton.testing.do_bench(lambda c=config: run(c), warmup=5, rep=20) for config in configs}
    _chosen[key] = min(timings, key=lambda config: timings[config])
    return _chosen[key]


def length_class(entries: int) -> int:
    """Lengths that share one tuned launch: the power of two above."""
    return triton.next_power_of_2(max(entries, 1))


def expanded_bias(bias: Tensor | None, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A bias as a view of the full shape and its strides (0 where it repeats); a dummy and zeros without one."""
    if bias is None:
        return like, (0,) * len(shape)
    view = bias.float().expand(shape)
    return view, view.stride()


@triton.jit
def softmax_step(b_logits, b_value, b_top, b_sum, b_out):
    """One step of the online softmax: logits [P, n], values [n, d] into the running maximum, sum and output."""
    b_next = tl.maximum(b_top, tl.max(b_logits, 1))
    b_safe = tl.where(b_next == float("-inf"), 0.0, b_next)
    b_weight = tl.exp(b_logits - b_safe[:, None])
    b_keep = tl.exp(b_top - b_safe)
    b_sum = b_sum * b_keep + tl.sum(b_weight, 1)
    b_out = b_out * b_keep[:, None] + tl.dot(b_weight.to(b_value.dtype), b_value, input_precision="ieee")
    return b_next, b_sum, b_out


@triton.jit
def store_state(p_out, p_lse, o_row, b_live, b_top, b_sum, b_out, num_columns, BLOCK_V: tl.constexpr):  # noqa: N803
    """Write normalised outputs [rows, columns] and log-sum-exps (natural log; 0 and -inf where nothing is visible)."""
    o_v = tl.arange(0, BLOCK_V)
    b_total = tl.where(b_sum > 0, b_sum, 1.0)
    p_row = p_out + o_row[:, None] * num_columns + o_v[None, :]
    tl.store(p_row, b_out / b_total[:, None], mask=b_live[:, None] & (o_v[None, :] < num_columns))
    tl.store(p_lse + o_row, tl.where(b_sum > 0, b_top + tl.log(b_total), float("-inf")), mask=b_live)
