"""How often each layer and head zooms in while it looks for a needle: the needle grid, with the cache's own counts.

A row gets `zoom` from methods whose caches count (`zoom_statistics`); the others are rows of the needle grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.base import MethodRun, Sample, register_bench
from kvcore.bench.niah import NeedleInAHaystack
from kvcore.cache import CompressedCache

DIGITS = 5  # of a frequency: a large model has a thousand of them per row


@dataclass(frozen=True)
class WatchedRun(MethodRun):
    """A run that remembers its caches, so that they can be asked after the answer."""

    caches: list[CompressedCache] = field(default_factory=list, compare=False)

    def new_cache(self, backbone: Backbone) -> CompressedCache:
        cache = super().new_cache(backbone)
        self.caches.append(cache)
        return cache


@register_bench
@dataclass(frozen=True, kw_only=True)
class Zoom(NeedleInAHaystack):
    """Options of the zoom benchmark; those of `NeedleInAHaystack` with other defaults."""

    name: ClassVar[str] = "zoom"

    contexts: tuple[int, ...] = (2048,)
    haystacks: tuple[str, ...] = ("essay",)

    def run_group(
        self, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
    ) -> list[list[dict[str, Any]]]:
        return [self._run_one(backbone, sample, runs) for sample in samples]

    def _run_one(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        """One sample at a time: a copied or shared cache would mix the counts of several."""
        watched = [WatchedRun(run.method, run.budget, run.budget_scope, run.label) for run in runs]
        rows = super().run_group(backbone, [sample], watched)[0]
        for row, run in zip(rows, watched, strict=True):
            zoom = zoom_columns(run.caches[-1])
            if zoom is not None:
                row["zoom"] = zoom
        return rows


def zoom_columns(cache: CompressedCache) -> dict[str, Any] | None:
    """The cache's zoom statistics as plain data; None where it does not zoom."""
    count = getattr(cache, "zoom_statistics", None)
    summary = None if count is None else count()
    if summary is None:
        return None
    columns = dataclasses.asdict(summary)
    columns["frequency"] = [[round(share, DIGITS) for share in layer] for layer in columns["frequency"]]
    return columns
