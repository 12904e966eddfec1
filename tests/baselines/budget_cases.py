"""What a byte budget allows at one moment, to the byte: no tolerance.

Legend: rows of one batch; tokens of the longest row (a batch is stored as a rectangle, as the full cache's is).
"""

import math

from kvcore.baselines.codec import SHORT_PROMPT, CodecLayer
from kvcore.baselines.eviction import EvictingLayer
from kvcore.baselines.retrieval import RetrievalLayer
from kvcore.budget import Budget
from kvcore.cache import CompressedCache
from sekv.layer import SeKVLayer

LEAST_WINDOW = 2  # SeKV: the newest token, and room for the one that leaves next


def least_bytes(cache: CompressedCache) -> int:
    """What a row keeps whatever the budget: one entry per layer and KV head, with what the method needs to have it."""
    spec, layer = cache.spec, cache.layers[0]
    heads = spec.num_layers * spec.num_kv_heads
    if isinstance(layer, EvictingLayer):  # its rank
        return heads * layer.entry_bytes
    if isinstance(layer, RetrievalLayer):  # one unit for everything older, and one fetched entry for all layers
        unit = layer.planner.unit_bytes + layer.planner.fixed_bytes
        return math.ceil(heads * (spec.entry_bytes + unit) + spec.num_kv_heads * spec.entry_bytes)
    if isinstance(layer, SeKVLayer):
        return math.ceil(heads * layer.planner.fixed_bytes(LEAST_WINDOW))
    return spec.token_bytes


def bound(cache: CompressedCache) -> bool:
    """Whether the budget binds: below `SHORT_PROMPT` tokens codecs serve any budget, and say what it came to."""
    return not isinstance(cache.layers[0], CodecLayer) or min(cache.row_tokens()) >= SHORT_PROMPT


def over(cache: CompressedCache) -> int:
    """Device bytes now, beyond what the budget allows (negative: within)."""
    lengths = cache.row_tokens()
    allowed = Budget(cache.budget.value).device_bytes(cache.spec, max(lengths))
    return cache.memory_bytes()[0] - len(lengths) * max(allowed, least_bytes(cache))
