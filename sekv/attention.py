"""Mixed-resolution attention: one softmax over exact entries, coarse entries and zoomed tokens. arXiv 2606.31145, 3.3.

`mixed_attention` is the differentiable form, from logits; a decode step adds up masses that it has anyway (`Blend`).

Legend: B batch rows, Hq query heads, Hkv KV heads, Q query tokens, n entries of a part, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of an entry of weight 0 relative to the largest that counts: bounds the gradient of the weight.
LARGEST_EXPONENT = 10.0


@dataclass
class Part:
    """Some entries of the one softmax.

    Attributes:
        logits: [B, Hq, Q, n], fp32; -inf hides an entry.
        values: [B, Hkv, n, d], or [B, Hkv, S, d] with `row_of_entry`.
        weight: factor on each entry's unnormalised mass, broadcastable to [B, Hq, Q, n]; None is 1. It enters the
            output linearly, so its gradient exists at 0 as well as at 1.
        row_of_entry: [B, n] int64, the row of `values` that stands for each entry (S: none; such entries must be
            hidden); None when entries and values go together one by one.
    """

    logits: Tensor
    values: Tensor
    weight: Tensor | None = None
    row_of_entry: Tensor | None = None


def mixed_attention(parts: list[Part]) -> Tensor:
    """Σ_parts w·exp(logit)·v / Σ_parts w·exp(logit).

    With z as the weight of a span's tokens and 1 - z as the weight of its coarse entry this is
    `(Σ_s z_s a_s o_s + (1 - z_s) b_s v̄_s + resident) / (Σ_s z_s a_s + (1 - z_s) b_s + resident)`.

    Returns:
        [B, Hq, Q, d] in the dtype of the first part's values.
    """
    top = torch.stack([_largest(part) for part in parts]).amax(dim=0).unsqueeze(-1)
    numerator: Tensor | None = None
    denominator: Tensor | None = None
    for part in parts:
        if part.weight is None:
            mass = torch.exp(part.logits - top)
        else:
            # an entry of weight 0 may lie far above the rest; its mass still shapes the gradient of the weight
            mass = torch.exp((part.logits - top).clamp_max(LARGEST_EXPONENT)) * part.weight
        if part.row_of_entry is not None:
            mass = _gathered(mass, part.row_of_entry, part.values.shape[2])
        batch, num_heads, num_queries, _ = mass.shape
        grouped = mass.reshape(batch, part.values.shape[1], -1, mass.shape[-1]).to(part.values.dtype)
        output = (grouped @ part.values).view(batch, num_heads, num_queries, -1).float()
        total = mass.sum(dim=-1, keepdim=True)
        numerator = output if numerator is None else numerator + output
        denominator = total if denominator is None else denominator + total
    assert numerator is not None and denominator is not None
    return (numerator / denominator).to(parts[0].values.dtype)


def _largest(part: Part) -> Tensor:
    """Largest logit [B, Hq, Q] among the entries that count, without gradient."""
    logits = part.logits.detach()
    if part.weight is not None:
        logits = logits.masked_fill(part.weight.detach() <= 0, float("-inf"))
    return logits.amax(dim=-1)


def _gathered(mass: Tensor, row_of_entry: Tensor, rows: int) -> Tensor:
    """Masses [B, Hq, Q, n] summed over the entries that share a row: [B, Hq, Q, rows]."""
    index = row_of_entry[:, None, None].expand(*mass.shape)
    return mass.new_zeros(*mass.shape[:3], rows + 1).scatter_add(-1, index, mass)[..., :rows]


def softmax_and_unit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of [..., n] and the log-sum-exp [..., 1] that it divides by.

    The largest share tells the latter, which spares a second pass of exponentials.
    """
    shares = logits.softmax(dim=-1)
    return shares, logits.amax(dim=-1, keepdim=True) - shares.amax(dim=-1, keepdim=True).log()


@dataclass
class Entries:
    """Tokens or spans as one decode step multiplies with them.

    Attributes:
        values: [B, Hkv, n, d] fp32, still to be multiplied by `scale`.
        scale: [B, Hkv, 1, n] of the values, or None; it goes into the masses, which are far fewer than the values.
    """

    values: Tensor
    scale: Tensor | None = None


@dataclass
class Blend:
    """Σ mass · value and Σ mass of some entries, in units of exp(unit).

    Attributes:
        numerator: [B, Hq, 1, d].
        mass: [B, Hq, 1, 1].
        unit: [B, Hq, 1, 1], natural log.
    """

    numerator: Tensor
    mass: Tensor
    unit: Tensor

    @classmethod
    def of(cls, unit: Tensor, mass: Tensor, parts: list[tuple[Tensor, Entries]]) -> Blend:
        """Entries by their masses [B, Hq, 1, n], which sum to `mass`."""
        products = [_weighted(masses, entries) for masses, entries in parts]
        return cls(sum(products[1:], products[0]), mass, unit)

    def with_logits(self, logits: Tensor, entries: Entries) -> Blend:
        """More entries in the same softmax, by their logits [B, Hq, 1, n]."""
        unit = torch.maximum(self.unit, logits.amax(dim=-1, keepdim=True))
        factor, masses = torch.exp(self.unit - unit), torch.exp(logits - unit)
        numerator = torch.addcmul(_weighted(masses, entries), self.numerator, factor)
        return Blend(numerator, torch.addcmul(masses.sum(dim=-1, keepdim=True), self.mass, factor), unit)

    def output(self) -> Tensor:
        """[B, Hq, 1, d]."""
        return self.numerator / self.mass


def _weighted(mass: Tensor, entries: Entries) -> Tensor:
    """Σ mass · value [B, Hq, 1, d]."""
    batch, num_heads, num_queries, count = mass.shape
    num_kv_heads = entries.values.shape[1]
    grouped = mass.reshape(batch, num_kv_heads, num_heads // num_kv_heads * num_queries, count)
    if entries.scale is not None:
        grouped = grouped * entries.scale
    return (grouped @ entries.values).view(batch, num_heads, num_queries, -1)


def span_parts(
    token_logits: Tensor,
    values: Tensor,
    coarse_logits: Tensor,
    coarse_values: Tensor,
    zoom: Tensor,
    span_of_token: Tensor,
) -> list[Part]:
    """Whole spans as zoom units, every token at hand (training): tokens weighted by z, coarse entries by 1 - z.

    Args:
        token_logits: [B, Hq, Q, N] exact logits of the spans' tokens (from the gated reconstruction or the raw keys).
        values: [B, Hkv, N, d].
        coarse_logits: [B, Hq, Q, S], span length (or estimated mass) included.
        coarse_values: [B, Hkv, S, d].
        zoom: [B, Hq, Q, S] from `Router.zoom`.
        span_of_token: [B, N], S for padding tokens (whose logits must be -inf).
    """
    index = span_of_token[:, None, None].expand(*token_logits.shape)
    padded = torch.nn.functional.pad(zoom, (0, 1))
    return [
        Part(token_logits, values, padded.gather(-1, index)),
        Part(coarse_logits, coarse_values, 1.0 - zoom),
    ]


def token_parts(
    token_logits: Tensor,
    values: Tensor,
    estimates: Tensor,
    coarse_values: Tensor,
    zoom: Tensor,
    span_of_token: Tensor,
) -> list[Part]:
    """Tokens as zoom units (training): each is exact with weight z; with 1 - z its estimated mass goes to the coarse
    value of its span.

    Args:
        token_logits: [B, Hq, Q, N] exact logits.
        values: [B, Hkv, N, d].
        estimates: [B, Hq, Q, N] estimated logits (`routing.token_logits`).
        coarse_values: [B, Hkv, S, d].
        zoom: [B, Hq, Q, N].
        span_of_token: [B, N], S for padding tokens (hidden in both logits).
    """
    return [
        Part(token_logits, values, zoom),
        Part(estimates, coarse_values, 1.0 - zoom, span_of_token),
    ]
