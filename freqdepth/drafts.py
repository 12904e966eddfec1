"""What passes between the steps of compressing a block: its input, candidate coefficients, and decided drafts.

Legend: J layers of the block, H KV heads, S streams, Hs heads per stream, M middle tokens, d head dimension,
D = J * Hs * d features, R coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freqdepth.basis import DepthBasis
from freqdepth.metric import Metric
from freqdepth.probe import LayerProbe


@dataclass
class BlockInput:
    """What a block of one row is compressed from.

    Attributes:
        keys, values: middle tokens [J, H, M, d], any dtype; keys as the shared form stores them (pre- or post-RoPE).
        exact_keys: the keys post-RoPE.
        probes: per layer.
        token_weight: [J, H, M] of the middle tokens (see `LayerProbe`).
        dtype: of the cache.
        index: the block's number.
        num_hidden: newest of the tokens that stand in the window as well (see `RowBlock.hidden`).
        positions, frequencies: int32 [M] and inverse frequencies, when `keys` are pre-RoPE.
    """

    keys: Tensor
    values: Tensor
    exact_keys: Tensor
    probes: list[LayerProbe]
    token_weight: Tensor
    dtype: torch.dtype
    index: int
    num_hidden: int = 0
    positions: Tensor | None = None
    frequencies: Tensor | None = None


@dataclass
class Candidate:
    """One side before quantisation: coefficients of every candidate column."""

    features: Tensor  # [S, M, D], centred and in the metric's domain; [J, H', M, d] centred with a DCT
    token_energy: Tensor  # [S, M], squared length of each token's features
    mean: Tensor  # [J, S, Hs, 1, d]
    metric: Metric
    columns: Tensor | None  # KLT basis [S, D, R]
    rotation: Tensor | None
    coefficients: Tensor  # [S, m, R] of every `stride`-th token
    stride: int
    energy: Tensor  # cumulative energy shares of stream 0, [R]


@dataclass
class DraftSide:
    """One side after quantisation, not yet packed.

    Attributes:
        columns: indices of the kept coefficients, widest first.
        widths: (bits, coefficients) in that order.
        raw: per width, codes or coefficients [S, m, R_w] of every `stride`-th token.
        step: [S, R].
        token_error: [S, m], squared error of each of them in the candidate's domain (basis columns taken as exact).
        basis: as stored.
        stride: 1 once the coefficients are fitted: all tokens.
    """

    columns: Tensor
    widths: list[tuple[int, int]]
    raw: list[Tensor]
    step: Tensor
    token_error: Tensor
    basis: DepthBasis
    stride: int


@dataclass
class Draft:
    """A shared form that has been decided but not stored.

    Attributes:
        keys, values: the two sides.
        num_bytes: what storing takes.
        price: λ, loss per byte.
        levels: chosen level of every candidate coefficient, keys first.
        fitted: the coefficients make up for the rounding of the basis; False in a first, cheaper draft, which may
            describe a part of the tokens only.
    """

    keys: DraftSide
    values: DraftSide
    num_bytes: int
    price: float
    levels: Tensor
    fitted: bool
