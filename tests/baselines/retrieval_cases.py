"""Shared by the tests of the retrieval methods: one layer driven by hand, and a slow literal softmax.

Legend: B batch rows, Hq query heads, Hkv KV heads, n prompt tokens, t new tokens, d head dimension.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.attention import attach
from kvcore.budget import Budget
from kvcore.layer import LayerPrompt
from kvcore.method import build_method
from kvcore.tiny import build_tiny

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 16
GROUP = NUM_HEADS // NUM_KV_HEADS
SCALE = HEAD_DIM**-0.5


@dataclass
class Case:
    """One row: prompt and new tokens side by side, keys and values [Hkv, n + t, d], queries [Hq, n + t, d]."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    prompt: int

    @property
    def steps(self) -> range:
        return range(self.prompt, self.keys.shape[1])


def make_case(prompt: int, steps: int, seed: int = 0) -> Case:
    """Random keys with a few strong directions, so that choices between tokens are clear-cut."""
    generator = torch.Generator().manual_seed(seed)
    total = prompt + steps
    topics = torch.randn(6, HEAD_DIM, generator=generator) * 2
    topic = torch.randint(0, 6, (total // 5 + 1,), generator=generator).repeat_interleave(5)[:total]
    keys = torch.randn(NUM_KV_HEADS, total, HEAD_DIM, generator=generator) + topics[topic]
    values = torch.randn(NUM_KV_HEADS, total, HEAD_DIM, generator=generator)
    queries = torch.randn(NUM_HEADS, total, HEAD_DIM, generator=generator) + topics[topic.roll(7)]
    return Case(keys, values, queries, prompt)


def build_layers(name: str, budget: float, cases: list[Case], layer: int = -1, **options):
    """One layer of a method, with the prompts of `cases` (left-padded into one batch) compressed."""
    model, _ = build_tiny()
    method = build_method(name, **options)
    layer_list = method.make_layers(attach(model), Budget(budget))
    widest = max(case.prompt for case in cases)
    padding = [widest - case.prompt for case in cases]

    def batch(pick) -> Tensor:
        rows = [torch.cat([t.new_full((t.shape[0], pad, HEAD_DIM), 99.0), t], 1) for t, pad in pick]
        return torch.stack(rows)

    keys, values, queries = (
        batch([(getattr(case, what)[:, : case.prompt], pad) for case, pad in zip(cases, padding, strict=True)])
        for what in ("keys", "values", "queries")
    )
    for one in layer_list:  # earlier layers may prepare what all share
        one.observe(queries, keys, padding, SCALE)
        one.build(LayerPrompt(keys, values, padding, SCALE))
    return layer_list[layer]


def feed(layer, cases: list[Case], offset: int, count: int = 1) -> Tensor:
    """Attention output [B, Hq, count, d] of the tokens `offset`.. after each row's prompt."""
    slices = [slice(case.prompt + offset, case.prompt + offset + count) for case in cases]
    query, key, value = (
        torch.stack([getattr(case, what)[:, part] for case, part in zip(cases, slices, strict=True)])
        for what in ("queries", "keys", "values")
    )
    return layer.attend(query, key, value, SCALE, max(part.stop for part in slices))


def literal_attention(case: Case, token: int, entries: list[list[tuple[Tensor, Tensor, float]]]) -> Tensor:
    """Output [Hq, d] of one query: per KV head a list of (key, value, weight), exp(q k) weighted by `weight`."""
    output = torch.zeros(NUM_HEADS, HEAD_DIM)
    for head in range(NUM_HEADS):
        query, total = case.queries[head, token], 0.0
        for key, value, weight in entries[head // GROUP]:
            mass = weight * math.exp(float(query @ key) * SCALE)
            output[head] += mass * value
            total += mass
        output[head] /= total
    return output


def exact_entries(case: Case, head: int, tokens: list[int]) -> list[tuple[Tensor, Tensor, float]]:
    return [(case.keys[head, token], case.values[head, token], 1.0) for token in tokens]


def generate(method: str, budget: float, ids: Tensor, mask: Tensor | None = None, new: int = 12, **options):
    """Greedy tokens [B, new] of the tiny model and the cache that was used."""
    model, _ = build_tiny()
    cache = build_method(method, **options).new_cache(model, budget=budget)
    output = model.generate(
        ids, attention_mask=mask, cache=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return output[:, ids.shape[1] :], cache
