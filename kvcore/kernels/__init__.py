"""Shared attention kernels: one public function each, the path chosen here and nowhere else.

`reference.py` is the specification (plain fp32), `torch_path.py` the vectorised path for CPUs.
Legend: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, Q query tokens, N entries, d head dimension.
"""

from kvcore.kernels.torch_path import attend_parts, decode_attention, group_queries, merge_states, prefill_attention

__all__ = ["attend_parts", "causal_bias", "decode_attention", "group_queries", "merge_states", "prefill_attention"]

import torch
from torch import Tensor


def causal_bias(num_queries: int, device: torch.device) -> Tensor | None:
    """Additive causal bias [Q, Q] of the new tokens among themselves; None for a single token."""
    if num_queries == 1:
        return None
    return torch.full((num_queries, num_queries), float("-inf"), device=device).triu_(1)
