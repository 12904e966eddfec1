"""Which path the kernels take, and why: asked once per process, logged once, shown by `scripts/env.py`."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from kvcore.kernels import native
from kvcore.log import get_logger, warn_once

log = get_logger(__name__)

# Query tokens of a decode step that the Triton kernels take; longer ones are prefill chunks.
MAX_QUERY_TOKENS = 16
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter (TRITON_INTERPRET=1), which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=1)
def triton_off_reason() -> str | None:
    """Why the Triton kernels cannot run in this process; None when they can. Triton itself is not imported."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}; the kernels are built for 8.0 and later"
    return None


def use_triton(query: Tensor) -> bool:
    """Whether attention of this query [B, Hq, Q, d] goes to a Triton kernel.

    Says once why not, when a GPU tensor has to take the torch path.
    """
    return _use_triton(query, _call_off_reason(query))


def use_triton_products(rows: Tensor) -> bool:
    """The same for products with any number of rows."""
    return _use_triton(rows, None)


def _use_triton(operand: Tensor, call_off_reason: str | None) -> bool:
    if operand.device.type != "cuda" and not interpreted():
        return False
    if interpreted() and operand.dtype == torch.bfloat16:
        return False  # the interpreter has no bf16 arithmetic
    reason = triton_off_reason() or call_off_reason
    if reason is not None:
        warn_once(log, f"Triton kernels are off, attention takes the torch path: {reason}")
    return reason is None


def use_native(*inputs: Tensor) -> bool:
    """Whether products with packed codes go to C: on CPUs, where it is built, and where no input wants a gradient."""
    if native.off_reason() is not None or any(x.device.type != "cpu" for x in inputs):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _call_off_reason(query: Tensor) -> str | None:
    if query.dtype not in TRITON_DTYPES:
        return f"dtype {query.dtype} is none of float16, bfloat16, float32"
    if query.shape[2] > MAX_QUERY_TOKENS:
        return f"{query.shape[2]} query tokens are more than {MAX_QUERY_TOKENS}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"head dimension {query.shape[3]} is more than {MAX_HEAD_DIM}"
    return None


def backend_report() -> dict[str, str]:
    """Each path, and whether it is on: `on`, or `off: reason`."""
    reason = triton_off_reason()
    bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return {
        "triton": "on (interpreter)" if reason is None and interpreted() else _state(reason),
        "cpu products in C": _state(native.off_reason()),
        "threads in C": _state(native.off_reason() or native.one_thread_reason()),
        "cpu bf16 matrix units": _state(None if bf16 else "the processor has neither AMX nor AVX512-BF16"),
    }


def _state(reason: str | None) -> str:
    return "on" if reason is None else f"off: {reason}"
