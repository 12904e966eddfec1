"""Memory that runs out: how it is recognised, and what to tell the user."""

from __future__ import annotations

import torch

LEVERS = (
    "Needs less: a chunked prefill (backbone.prefill_chunk=2048, or prefill(..., chunk_size=2048)), a smaller batch "
    "(bench.<name>.batch_size=1), weights on several devices or partly on the host (backbone.device_map=auto), "
    "backbone.dtype=bfloat16, a method that keeps its store on the host (sekv, quest, retroinfer), or a shorter context"
)
# torch raises RuntimeError on a CPU, OutOfMemoryError on an accelerator
PHRASES = ("not enough memory", "out of memory", "can't allocate memory", "cannot allocate memory")


class PromptMemoryError(MemoryError):
    """Memory ran out while a prompt was read; the message names the prompt and the levers.

    Args:
        method: name of the cache's method.
        rows, tokens: shape of the prompt.
        chunk_size: tokens per forward; None when the prompt was read in one.
    """

    def __init__(self, method: str, rows: int, tokens: int, chunk_size: int | None) -> None:
        how = "in one forward" if chunk_size is None else f"in chunks of {chunk_size}"
        super().__init__(
            f"out of memory while '{method}' read a prompt of {rows} x {tokens} tokens {how}. {LEVERS}. "
            "The cache is unusable until reset()"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in PHRASES)
