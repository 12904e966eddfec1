"""What the shared form of a block's heads is chosen from: their coefficients in a basis, and the metric of the errors.

Legend: J layers of the block, H KV heads, S streams, Hs heads per stream, M middle tokens, d head dimension,
D = J * Hs * d features, R coefficients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freqdepth.basis import DctBasis
from freqdepth.codes import UNQUANTIZED
from freqdepth.drafts import BlockInput, Candidate
from freqdepth.metric import Metric
from freqdepth.transform import align_layers, depth_klt

if TYPE_CHECKING:
    from freqdepth.method import FreqDepth

# Width of the basis column of a coefficient by the coefficient's: a column is felt by every token. Measured over three
# windows at 10% of a bf16 cache, KL in nats: this 0.023; 4, 4, 6, 8, 8 bits 0.025; 4 bits for coefficients of 4, 0.06.
_BASIS_BITS = {2: 3, 3: 4, 4: 5, 6: 7, 8: 8, UNQUANTIZED: UNQUANTIZED}
# Most of a block's bytes that the metric's directions may take.
_DIRECTION_SHARE = 0.04
# Candidate columns for every one that is worth its bytes when coefficients take three bits on average. Spare ones
# also make the leading ones exact: at 4,096 tokens 1.0 leaves 1.5% more energy outside of them than the best, 1.2 0.3%.
_SPARE_COLUMNS = 1.1
# Fewest tokens on which a first draft is judged, an even sample of the prompt: all are projected once only, onto
# the basis as it will be stored.
_ROUGH_TOKENS = 1024


def column_width(options: FreqDepth, bits: int) -> int:
    """Width of the basis column of a coefficient of `bits`."""
    return _BASIS_BITS[bits] if options.basis_bits is None else options.basis_bits


class CandidateMaker:
    """Transforms a set of heads; arguments as of `SharedFitter`."""

    def __init__(self, block: BlockInput, options: FreqDepth, heads: list[int], expected_bytes: float) -> None:
        self.block, self.options, self.heads, self.expected_bytes = block, options, heads, expected_bytes
        self.joint = options.heads == "joint"

    def side(self, which: int) -> Candidate:
        """Every candidate coefficient of the keys (0) or values (1)."""
        x, rank = ((self.block.keys, self.options.key_rank), (self.block.values, self.options.value_rank))[which]
        mine = x if self.heads == list(range(x.shape[1])) else x[:, self.heads]
        fixed = rank if rank is None or isinstance(rank, int) else rank[self.block.index]
        return self._candidate(mine, self._metric(which), fixed)

    def _metric(self, which: int) -> Metric:
        """How errors of the keys (0) or values (1) are felt, rounded as it will be stored."""
        probes, heads, count = self.block.probes, self.heads, 0
        if which == 1:
            channels = torch.stack([probe.value_weight[heads] for probe in probes]).square().unsqueeze(-1)
            moment = torch.diag_embed(channels.expand(-1, -1, self.block.values.shape[-1]))
        else:
            joint = [probe.key_moment for probe in probes if probe.key_moment is not None]
            if self.options.basis == "klt" and len(joint) == len(probes):
                moment = torch.stack(joint)[:, heads]
                # few on short prompts, where they would eat the budget
                one = moment.shape[0] * moment.shape[1] * moment.shape[2] * self.block.dtype.itemsize
                count = min(self.options.key_directions, int(_DIRECTION_SHARE * self.expected_bytes / one))
            else:
                moment = torch.diag_embed(torch.stack([probe.key_weight[heads] for probe in probes]).square())
            moment = moment * self.options.key_emphasis
        return Metric.of_moments(self._streams(moment), count, self.block.dtype)

    def _streams(self, x: Tensor) -> Tensor:
        """[J, H', ...] -> [J, S, Hs, ...]."""
        return x.unsqueeze(1) if self.joint else x.unsqueeze(2)

    def _candidate(self, x: Tensor, metric: Metric, rank: int | None) -> Candidate:
        mean = torch.stack([layer.float().mean(1, keepdim=True) for layer in x]).to(self.block.dtype)
        if self.options.basis != "klt":
            return self._dct_candidate(x.float() - mean.float(), metric, mean)
        features = metric.features(self._streams(x), self._streams(mean))
        size = features.shape[-1]
        most = min(size, self._most_columns(size) if rank is None else rank)
        columns, energy = depth_klt(features, most, self.options.gram_tokens, self.options.subspace_iterations)
        token_energy = torch.linalg.vector_norm(features, dim=-1).square()
        stride = max(1, features.shape[1] // _ROUGH_TOKENS)
        return Candidate(
            features, token_energy, self._streams(mean), metric, columns, None, features[:, ::stride] @ columns, stride,
            energy[0].cumsum(0) / token_energy[0].mean().clamp_min(1e-30),
        )  # fmt: skip

    def _most_columns(self, size: int) -> int:
        """Candidate columns: a fifth more than are worth their bytes when coefficients take three bits on average."""
        plan = self.options.coefficient_plan
        if plan is not None:
            return sum(count for count, _ in plan)
        streams = 1 if self.joint else len(self.heads)
        tokens = self.block.keys.shape[2]
        narrow = min(self.options.coefficient_bits)
        bits = 8 * self.block.dtype.itemsize if narrow == UNQUANTIZED else max(narrow, 3)
        column = (bits * tokens + column_width(self.options, narrow) * size) / 8
        return max(1, math.ceil(_SPARE_COLUMNS * self.expected_bytes / (2 * streams * column)))

    def _dct_candidate(self, centred: Tensor, metric: Metric, mean: Tensor) -> Candidate:
        num_layers, num_heads, _, head_dim = centred.shape
        rotation = None
        if self.options.basis == "aligned_dct":
            rotation = align_layers(centred).to(self.block.dtype)
        count = min(self.options.low_frequencies, num_layers) * head_dim
        basis = DctBasis(num_layers, num_heads, head_dim, rotation, torch.arange(count))
        coefficients = basis.project(centred.unsqueeze(2), basis.whole())
        energy = coefficients[0].square().sum(0).unflatten(0, (-1, head_dim)).sum(-1).cumsum(0)
        # a column mixes all layers: its weight is their mean
        token_energy = centred.square().sum((0, 3))
        return Candidate(
            centred, token_energy, self._streams(mean), metric, None, rotation, coefficients, 1,
            energy / token_energy[0].sum().clamp_min(1e-30),
        )  # fmt: skip
