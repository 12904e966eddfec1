"""What errors in the keys and values of a layer do to the rows of its probe.

Legend: H KV heads, G query heads per KV head, P probe queries, n tokens of one row, d head dimension, k rows or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Probe rows per query head that are looked at together.
_STRIP_ROWS = 16
# The tokens that a strip sees are rounded up to this many: odd row lengths make slow products.
_ALIGNMENT = 32

# what errors do: the keys' moment [H, d, d], the values' weight [H], the tokens' weights [H, n]
Felt = tuple[Tensor, Tensor, Tensor]


def attention_rows(queries: Tensor, positions: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Causal attention [H, G, P, n] of probe queries [H, G, P, d] at `positions` [P] over keys [H, n, d]."""
    logits = torch.matmul(queries.flatten(1, 2) * scale, keys.float().mT).unflatten(1, queries.shape[1:3])
    first = int(positions.min()) + 1  # what every row sees needs no mask
    later = torch.arange(first, keys.shape[1], device=keys.device) > positions.to(keys.device)[:, None]
    logits[..., first:].masked_fill_(later, float("-inf"))
    return logits.softmax(-1)


def in_strips(positions: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """`size` rows each of similar `positions` [P], and the tokens that they see (rounded up).

    What is masked anyway is not computed, and what is computed stays in the processor's cache.
    """
    for rows in positions.argsort().split(size):
        if rows.numel():
            yield rows, -(-(int(positions[rows].max()) + 1) // _ALIGNMENT) * _ALIGNMENT


def felt_evenly(rows: Tensor, keys: Tensor, values: Tensor) -> Felt:
    """Of eq. 2 as printed, for rows [H, G * P, d] (scaled), relative to the energy of the logits and values."""
    moment = torch.matmul(rows.mT, rows) / rows.shape[1]
    channel = moment.diagonal(dim1=1, dim2=2)
    energy = (channel * torch.linalg.vector_norm(keys, dim=1).square()).sum(1).clamp_min(1e-20)
    value_weight = torch.linalg.vector_norm(values, dim=(1, 2)).clamp_min(1e-10).reciprocal()
    token_weight = energy.reciprocal()[:, None].expand(-1, keys.shape[1])
    return moment / energy[:, None, None], value_weight, token_weight


def felt_in_output(queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float) -> Felt:
    """Of the rows' outputs, for the probe [H, G, P, d] at `positions` [P].

    With squared attention `s = p²`, what a row and a token feel are sums of `s |v - o|²` over tokens and over rows.
    Written out, `|v|² - 2 v·o + |o|²` turns both into products of `s` with `[v, |v|², 1]` and `[o, |o|², 1]`.
    """
    num_tokens = values.shape[1]
    of_tokens = _with_energy(values)
    token_loss = values.new_zeros(values.shape[:2])
    moment = values.new_zeros(values.shape[0], values.shape[2], values.shape[2])
    total, value_mass = values.new_zeros(2, values.shape[0])
    for rows, seen in in_strips(positions, _STRIP_ROWS):
        probe = queries[:, :, rows]
        weights = attention_rows(probe, positions[rows], keys[:, :seen], scale).flatten(1, 2)
        of_rows = _with_energy(torch.matmul(weights, values[:, :seen]))
        squared = weights.square_()
        row_loss, mass = _distances(torch.matmul(squared, of_tokens[:, :seen]), of_rows)
        token_loss[:, :seen] += _distances(torch.matmul(squared.mT, of_rows), of_tokens[:, :seen])[0]
        scaled = probe.flatten(1, 2) * scale
        moment += torch.matmul((row_loss.unsqueeze(-1) * scaled).mT, scaled)
        total += of_rows[..., -2].sum(1)
        value_mass += mass.sum(1)
    total = total.clamp_min(1e-20)
    value_weight = (value_mass / (total * num_tokens)).clamp_min(1e-20).sqrt()
    return moment / (total * num_tokens)[:, None, None], value_weight, token_loss / total[:, None]


def _with_energy(x: Tensor) -> Tensor:
    """`[x, |x|², 1]`: [H, k, d] -> [H, k, d + 2]."""
    energy = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    return torch.cat([x, energy, torch.ones_like(energy)], dim=-1)


def _distances(sums: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of squared distances [H, k] and of weights [H, k].

    Args:
        sums: [H, k, d + 2], the weighted sums of the others' `_with_energy`.
        mine: [H, k, d + 2], own `_with_energy`.
    """
    inner = (sums[..., :-2] * mine[..., :-2]).sum(-1)
    return (sums[..., -2] - 2 * inner + mine[..., -2] * sums[..., -1]).clamp_min_(0), sums[..., -1]


def between(even: Felt, output: Felt) -> Felt:
    """Heads and tokens by the geometric mean of their levels, directions by the mean of their shapes."""
    (first, first_value, first_token), (second, second_value, second_token) = even, output
    levels = [moment.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(1e-20)[:, None, None] for moment in (first, second)]
    shape = (first / levels[0] + second / levels[1]) / 2
    token_weight = (first_token * second_token.clamp_min(1e-12)).sqrt()
    return shape * (levels[0] * levels[1]).sqrt(), (first_value * second_value).sqrt(), token_weight
