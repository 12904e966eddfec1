"""The shared rank gate g_phi: which components of a span's factors survive. arXiv 2606.31145, section 3.2.

Legend: R components, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 64
OPEN_BIAS = 4.0  # sigmoid(4) = 0.98: a new gate lets every component through


class RankGate(nn.Module):
    """One small predictor for all layers and heads: (σ / σ_1, k̄ / ‖k̄‖) -> gates in (0, 1)."""

    def __init__(self, head_dim: int, max_rank: int) -> None:
        super().__init__()
        self.max_rank = max_rank
        self.hidden = nn.Linear(max_rank + head_dim, HIDDEN)
        self.output = nn.Linear(HIDDEN, max_rank)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in (self.hidden, self.output):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * layer.in_features**-0.5)
                layer.bias.zero_()
            self.output.weight.mul_(0.1)
            self.output.bias.fill_(OPEN_BIAS)

    def forward(self, sigma: Tensor, mean_key: Tensor) -> Tensor:
        """Gates [..., R] of singular values [..., R] (descending, >= 0) and mean key [..., d]."""
        missing = self.max_rank - sigma.shape[-1]
        spectrum = torch.nn.functional.pad(sigma.float(), (0, missing))
        spectrum = spectrum / spectrum[..., :1].clamp_min(1e-12)
        direction = mean_key.float() / mean_key.float().norm(dim=-1, keepdim=True).clamp_min(1e-12)
        features = torch.cat([spectrum, direction], dim=-1)
        gates = self.output(torch.nn.functional.silu(self.hidden(features))).sigmoid()
        return gates[..., : sigma.shape[-1]]
