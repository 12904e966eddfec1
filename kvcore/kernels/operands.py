"""Operands of the kernels that read compressed entries: shared coefficients and quantised tokens.

Legend: B batch, Hkv KV heads, Hc coefficient heads (Hkv, or 1 when all KV heads share their coefficients), N tokens,
R coefficients, r residual tokens, c residual components, d head dimension, P packed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcore.quant import bit_planes, unpack

# Bit width that stands for "not quantised".
DENSE_BITS = 16
# Packed lines hold a multiple of this many tokens, so that every bit plane is cut at the same places.
LINE_ALIGNMENT = 8


@dataclass
class Band:
    """Coefficients of one width: `value = (code + offset) * step`, one line of codes per coefficient.

    Attributes:
        codes: uint8 [B, Hc, R, P], each line packed by `kvcore.quant.pack` over its (padded) tokens; or floats
            [B, Hc, R, N] with bits=16.
        bits: 1..8, or 16 for floats.
        num_tokens: N, tokens that count; a packed line may be padded behind them.
        step: [B, Hc, R], or None for 1.
        offset: added to a code before its step, usually 0.5 - 2 ** (bits - 1).
    """

    codes: Tensor
    bits: int
    num_tokens: int
    step: Tensor | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.bits != DENSE_BITS and not 1 <= self.bits <= 8:
            raise ValueError(f"bits of a band must be 1 to 8, or {DENSE_BITS} for floats; received {self.bits}")
        if self.line_tokens < self.num_tokens:
            raise ValueError(
                f"a band of {self.bits} bits needs lines of at least {self.num_tokens} tokens; its codes of shape "
                f"{tuple(self.codes.shape)} hold {self.line_tokens}"
            )

    @property
    def num_coefficients(self) -> int:
        """R."""
        return self.codes.shape[2]

    @property
    def line_tokens(self) -> int:
        """Tokens of a line, padding included."""
        size = self.codes.shape[-1]
        return size if self.bits == DENSE_BITS else size * 8 // self.bits

    def values(self) -> Tensor:
        """[B, Hc, R, N] in fp32."""
        numbers = self.codes if self.bits == DENSE_BITS else unpack(self.codes, self.bits, self.line_tokens)
        numbers = numbers[..., : self.num_tokens].float() + self.offset
        return numbers if self.step is None else numbers * self.step.float().unsqueeze(-1)


@dataclass
class Coefficients:
    """Keys or values of one layer as shared coefficients times the layer's basis, plus residuals of the first tokens.

    `x[n] = mean + Σ_R coefficient[R, n] * basis[R] (+ Σ_c residual[n, c] * residual_basis[c] for n < r)`.

    Attributes:
        bands: coefficients, numbered through the bands; all over the same N tokens.
        basis: [B, Hkv, R, d] of this layer (B may be 1).
        mean: [B, Hkv, d], or None.
        residual: [B, Hkv, r, c] components of the first r tokens, or None.
        residual_basis: [B, Hkv, c, d]; None when the components are channels (c = d).
    """

    bands: list[Band]
    basis: Tensor
    mean: Tensor | None = None
    residual: Tensor | None = None
    residual_basis: Tensor | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = {band.num_tokens for band in self.bands}
        if len(lengths) != 1:
            raise ValueError(f"all bands must hold the same number of tokens; received {sorted(lengths)}")
        width = sum(band.num_coefficients for band in self.bands)
        if width != self.basis.shape[2]:
            raise ValueError(f"the basis must have one row per coefficient: {width}; received {self.basis.shape[2]}")
        self.num_tokens = lengths.pop()

    @property
    def num_streams(self) -> int:
        """Hc."""
        return self.bands[0].codes.shape[1]


def check_lines(band: Band) -> None:
    """The packed planes of a line are cut in eighths.

    Raises:
        ValueError: a packed line that does not hold a multiple of 8 tokens.
    """
    if band.bits != DENSE_BITS and band.codes.shape[-1] % band.bits:
        raise ValueError(
            f"packed lines must hold a multiple of {LINE_ALIGNMENT} tokens; received {band.codes.shape[-1]} bytes "
            f"of {band.bits}-bit codes. Pad the tokens before packing"
        )


def field_tables(bits: int) -> list[tuple[int, int]]:
    """(width, shift) of each bit plane, in the order in which they are stored."""
    shift, table = 0, []
    for width in bit_planes(bits):
        table.append((width, shift))
        shift += width
    return table


def grouped_logits_bias(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """One additive bias of a bias and a boolean mask (True is visible), both broadcastable to [B, Hkv, G, Q, N]."""
    if mask is None:
        return bias
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
    return hidden if bias is None else bias + hidden
