"""Depth transforms: orthonormal, invertible in every dtype (K2), and the KLT is the best basis of its rank.

Legend: J layers, H KV heads, T tokens, d head dimension.
"""

from __future__ import annotations

import pytest
import torch

from freqdepth.method import FreqDepth
from freqdepth.metric import Metric
from freqdepth.transform import (
    align_layers,
    dct_basis,
    depth_klt,
    depth_transform,
    gram_matrix,
    inverse_depth_transform,
    unstack_features,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def stack_features(x: torch.Tensor, joint: bool) -> torch.Tensor:
    """Layers (and with `joint` heads) side by side: [J, H, M, d] -> [S, M, D], features ordered (j, h, d)."""
    if joint:
        return x.float().permute(2, 0, 1, 3).flatten(1).unsqueeze(0)
    return x.float().permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 10, 15, 30])
def test_dct_is_orthonormal(size: int) -> None:
    basis = dct_basis(size)
    assert (basis @ basis.T - torch.eye(size)).abs().max() < 1e-5
    assert torch.allclose(basis[0], torch.full((size,), size**-0.5), atol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_k2_round_trip(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(size, 2, 9, 8).to(dtype)
    back = inverse_depth_transform(depth_transform(x))
    assert back.dtype == dtype
    assert (back.float() - x.float()).abs().max() <= TOLERANCE[dtype] * x.float().abs().max()


@pytest.mark.parametrize("num_layers", [22, 28, 30, 32])
@pytest.mark.parametrize("block_size", [2, 3, 5, 6, 7])
def test_k2_leftover_blocks_cover_every_layer(num_layers: int, block_size: int) -> None:
    blocks = FreqDepth(block_size=block_size).blocks(num_layers)
    assert [layer for block in blocks for layer in block] == list(range(num_layers))
    assert all(len(block) == block_size for block in blocks[:-1])
    assert len(blocks[-1]) == (num_layers % block_size or block_size)


@pytest.mark.parametrize(("rank", "iterations"), [(64, 0), (8, 4)], ids=["whole spectrum", "subspace"])
def test_klt_is_orthonormal_and_leading(rank: int, iterations: int) -> None:
    scales = torch.logspace(0, -3, 64)
    features = torch.randn(2, 500, 64) * scales
    basis, energy = depth_klt(features, rank, 500, iterations)
    assert (basis.mT @ basis - torch.eye(rank)).abs().max() < 1e-5
    exact = torch.linalg.eigvalsh(features.mT @ features / 500).flip(-1)[:, :rank]
    assert torch.allclose(energy, exact, rtol=2e-2, atol=1e-6)


def test_features_round_trip() -> None:
    x = torch.randn(3, 2, 7, 4)
    for joint in (True, False):
        assert torch.equal(unstack_features(stack_features(x, joint), 3, 4), x)


def test_alignment_finds_a_hidden_rotation() -> None:
    """Layers that are rotations of one another are brought together, and the DCT then puts all energy in one place."""
    base = torch.randn(1, 2, 200, 8)
    turns = torch.linalg.qr(torch.randn(4, 2, 8, 8)).Q
    x = base @ turns
    rotation = align_layers(x)
    assert (rotation.mT @ rotation - torch.eye(8)).abs().max() < 1e-4
    aligned = x @ rotation
    energy = depth_transform(aligned).square().sum((1, 2, 3))
    raw = depth_transform(x).square().sum((1, 2, 3))
    assert energy[0] / energy.sum() > 0.99
    assert raw[0] / raw.sum() < 0.6


@pytest.mark.parametrize("size", [1, 3, 4, 30])
def test_gram_matrix_of_strips_is_the_product(size: int) -> None:
    x = torch.randn(2, 50, size, generator=torch.Generator().manual_seed(0))
    gram = gram_matrix(x)
    assert torch.equal(gram, gram.mT)
    assert torch.allclose(gram, x.mT @ x, atol=1e-4)


@pytest.mark.parametrize(("streams", "heads"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("directions", [0, 2])
def test_features_are_what_is_felt_side_by_side(streams: int, heads: int, directions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, streams, heads, 20, 8, generator=generator)
    rows = torch.randn(2, streams, heads, 30, 8, generator=generator)
    metric = Metric.of_moments(rows.mT @ rows, directions, torch.float32)
    mean = x.mean(3, keepdim=True)
    felt = stack_features(metric.felt(x - mean).flatten(1, 2), joint=streams == 1)
    assert torch.allclose(metric.features(x, mean), felt, atol=1e-5, rtol=1e-5)


def test_directions_of_a_text_of_few_different_tokens() -> None:
    """The Gram matrix has fewer directions than there are columns: no factorisation may fail or leave its space."""
    features = torch.randn(1, 3, 64)[:, torch.arange(200) % 3]
    basis, energy = depth_klt(features, 20, 4096, 2)
    assert basis.isfinite().all() and energy.isfinite().all()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(20)[None], atol=1e-4, rtol=0)
    projected = features @ basis[..., :3] @ basis[..., :3].mT
    torch.testing.assert_close(projected, features, atol=1e-3, rtol=1e-3)
