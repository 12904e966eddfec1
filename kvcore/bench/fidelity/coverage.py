"""Attention-mass coverage: the share of true attention mass that lies on tokens a method really attended to.

True mass = softmax of the method's own queries over every context key of the full cache. A layer gives the
log-sum-exp over the context tokens that it attended to; codecs attend to all and have coverage 1 by construction.

Legend: Hq query heads, Hkv KV heads, G = Hq / Hkv, Q new tokens, T context tokens, d head dimension.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from kvcore.cache import CompressedCache
from kvcore.kernels import group_queries
from kvcore.layer import CacheLayer


class CoverageProbe:
    """Watches the decode steps of one cache (a context manager).

    Args:
        cache: a prefilled compressed cache of one row.
        context: per layer, the full cache's keys and values [1, Hkv, T, d] of the context.
        every: measure at every this many steps; 0 never measures.
        attends_all: the method leaves no token out.

    Attributes:
        coverage: mean over the measured steps, layers and heads; None when nothing could be measured.
    """

    def __init__(
        self,
        cache: CompressedCache,
        context: list[tuple[Tensor | None, Tensor | None]],
        every: int,
        attends_all: bool,
    ) -> None:
        self.cache, self.context, self.every, self.attends_all = cache, context, every, attends_all
        self._values: list[float] = [1.0] if attends_all else []
        self._calls = 0

    def __enter__(self) -> CoverageProbe:
        if self.every and not self.attends_all:
            self.cache.attend_observer = self._observe
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache.attend_observer = None

    @property
    def coverage(self) -> float | None:
        return sum(self._values) / len(self._values) if self._values else None

    def _observe(self, layer: CacheLayer, query: Tensor, scale: float) -> None:
        step = self._calls // len(self.cache.layers)
        self._calls += 1
        if step % self.every:
            return
        last, keys = query[:, :, -1:], self.context[layer.layer_idx][0]
        attended = layer.attended_lse(last, scale)
        if attended is None or keys is None:
            return
        logits = torch.matmul(group_queries(last, keys.shape[1]) * scale, keys.transpose(-1, -2)).float()
        total = torch.logsumexp(logits, dim=-1).view(attended.shape)
        self._values.append(float(torch.exp(attended - total).clamp(max=1.0).mean()))
