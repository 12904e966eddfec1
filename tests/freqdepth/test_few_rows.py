"""Products of a few rows with bases and corrections in C equal those in torch.

Legend: J layers, S streams, Hs heads per stream, P rows, d head dimension, R columns, r residual tokens.
"""

from __future__ import annotations

import pytest
import torch

from freqdepth import planes
from freqdepth.basis import KltBasis
from freqdepth.metric import Metric
from freqdepth.residual import Corrections, ResidualStore
from kvcore.kernels import native

pytestmark = pytest.mark.skipif(native.off_reason() is not None, reason=f"native products: {native.off_reason()}")


def both_forms(monkeypatch, function) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function returns in C and in torch."""
    found = function()
    monkeypatch.setattr(planes, "MOST_FLOAT_ROWS", 0)
    expected = function()
    monkeypatch.undo()
    return found, expected


@pytest.mark.parametrize("widths", [((16, 3), (8, 2), (6, 5), (3, 20), (2, 9)), ((4, 17),), ((16, 5),)], ids=str)
@pytest.mark.parametrize(("streams", "heads", "head_dim"), [(1, 3, 20), (2, 1, 64), (2, 2, 5)])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 17, 20])
def test_a_basis(monkeypatch, widths, streams: int, heads: int, head_dim: int, num_rows: int) -> None:
    num_layers, rank = 3, sum(count for _, count in widths)
    metric = Metric(torch.rand(num_layers, streams, heads, head_dim) + 0.5, None)
    basis = KltBasis(
        torch.randn(streams, num_layers * heads * head_dim, rank) / 8, list(widths), metric, torch.bfloat16
    )
    rows, mixed = torch.randn(streams, heads, num_rows, head_dim), torch.randn(streams, heads * num_rows, rank)
    for layer in (0, 2):
        for function in (lambda at=layer: basis.absorb(rows, at), lambda at=layer: basis.expand(mixed, at, heads)):
            found, expected = both_forms(monkeypatch, function)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(("head_dim", "num_tokens"), [(64, 40), (20, 3), (128, 131), (6, 17)])
@pytest.mark.parametrize(("members", "num_rows"), [([0, 1, 2], 3), ([0, 2], 1), ([1], 20)])
def test_corrections(monkeypatch, bits: int, head_dim: int, num_tokens: int, members, num_rows: int) -> None:
    layers, shared, layer = 2, 3, 1
    components = Corrections(torch.randn(layers * len(members), num_tokens, head_dim), bits, torch.bfloat16)
    store = ResidualStore(members, members, components, None, None)
    rows, logits = torch.randn(shared, num_rows, head_dim), torch.randn(shared, num_rows, num_tokens + 9)
    weights, output = torch.rand(shared, num_rows, num_tokens + 30), torch.randn(shared, num_rows, head_dim)
    weights = weights[..., : num_tokens + 9]  # as a step has them: the window's follow

    def added_logits() -> torch.Tensor:
        store.add_logits(total := logits.clone(), rows, layer)
        return total

    def added_output() -> torch.Tensor:
        store.add_output(total := output.clone(), weights, layer)
        return total

    for function in (added_logits, added_output):
        found, expected = both_forms(monkeypatch, function)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
