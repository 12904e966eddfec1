"""Shared by the tests of the evicting and merging methods: layers driven by hand, and slow literal attention.

Legend: Hq query heads, Hkv KV heads, n tokens of a row, d head dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.layer import LayerPrompt
from kvcore.method import build_method

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
GROUP = NUM_HEADS // NUM_KV_HEADS
SCALE = HEAD_DIM**-0.5


def spec(num_layers: int = 1, dtype: torch.dtype = torch.float32) -> ModelSpec:
    cpu = torch.device("cpu")
    windows = (None,) * num_layers
    return ModelSpec(num_layers, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, dtype, cpu, 4096, windows)


@dataclass
class Row:
    """Tokens of one row, the prompt and what follows: queries [Hq, n, d], keys and values [Hkv, n, d]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def make_row(length: int, seed: int = 0) -> Row:
    """Random tokens, with attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((NUM_HEADS, 2.0), (NUM_KV_HEADS, 1.5), (NUM_KV_HEADS, 1.0))
    return Row(*(factor * torch.randn(heads, length, HEAD_DIM, generator=generator) for heads, factor in shapes))


def make_layers(name: str, budget: float | int, num_layers: int = 1, scope: str = "bytes", **options):
    return build_method(name, **options).make_layers(spec(num_layers), Budget(budget, scope))


def prompt_of(rows: list[Row], prompt: list[int]) -> LayerPrompt:
    """The first `prompt[i]` tokens of each row, left-padded with values that would be noticed."""
    width = max(prompt)
    padding = [width - n for n in prompt]
    keys, values = (
        torch.stack(
            [
                F.pad(getattr(r, name)[:, :n], (0, 0, width - n, 0), value=50.0)
                for r, n in zip(rows, prompt, strict=True)
            ]
        )
        for name in ("keys", "values")
    )
    return LayerPrompt(keys, values, padding, SCALE)


def observe(layer, rows: list[Row], prompt: list[int], chunk: int | None = None) -> LayerPrompt:
    """Show the prompt to a layer, in chunks, as the cache does; returns what `build` gets."""
    whole, width = prompt_of(rows, prompt), max(prompt)
    queries = torch.stack(
        [F.pad(r.queries[:, :n], (0, 0, width - n, 0), value=50.0) for r, n in zip(rows, prompt, strict=True)]
    )
    for start in range(0, width, chunk or width):
        stop = min(width, start + (chunk or width))
        layer.observe(queries[:, :, start:stop], whole.keys[:, :, :stop], whole.padding, SCALE)
    return whole


def prefill_layer(layer, rows: list[Row], prompt: list[int], chunk: int | None = None) -> None:
    layer.build(observe(layer, rows, prompt, chunk))
    layer._length = max(prompt)


def step(layer, row: Row, position: int, count: int = 1) -> Tensor:
    """Feed tokens `position`.. of a single row; returns the output [Hq, count, d]."""
    new = slice(position, position + count)
    output = layer.attend(row.queries[None, :, new], row.keys[None, :, new], row.values[None, :, new], SCALE, new.stop)
    layer._length = new.stop
    return output[0]


def kept(layer, row_index: int, head: int, row: Row) -> set[int]:
    """Positions of the tokens that a layer holds for one row and KV head, found by their keys."""
    live = layer.priority[row_index, head].isfinite()
    same = (layer.keys[row_index, head][:, None] == row.keys[head][None]).all(-1)
    assert bool((same.sum(-1) == 1)[live].all())
    return set(same[live].int().argmax(-1).tolist())


def probabilities(row: Row, query_head: int, position: int, visible: list[int] | None = None) -> dict[int, float]:
    """Softmax attention of one token and query head over the tokens up to it (or over `visible`), one by one."""
    tokens = list(range(position + 1)) if visible is None else visible
    key = row.keys[query_head // GROUP]
    logits = torch.stack([row.queries[query_head, position] @ key[token] * SCALE for token in tokens])
    return dict(zip(tokens, torch.softmax(logits, dim=0).tolist(), strict=True))


def group_mean(row: Row, head: int, position: int, visible: list[int] | None = None) -> dict[int, float]:
    """`probabilities` averaged over the query heads of one KV head."""
    members = [probabilities(row, q, position, visible) for q in range(head * GROUP, (head + 1) * GROUP)]
    return {token: sum(m[token] for m in members) / GROUP for token in members[0]}


def literal_output(row: Row, query_head: int, position: int, visible: list[int]) -> Tensor:
    """Attention output of one token over `visible`, one by one."""
    weights = probabilities(row, query_head, position, visible)
    return sum(weight * row.values[query_head // GROUP, token] for token, weight in weights.items())
