"""The full cache: the yardstick of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer
from kvcore.method import Method, register


@register
@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Every key and value, exactly as transformers' `DynamicCache` keeps them. Any budget below 1.0 is ignored: the
    measured share says 1.0, and results carry it."""

    name: ClassVar[str] = "full"
    ignores_budget: ClassVar[bool] = True
    attends_all: ClassVar[bool] = True

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return ExactLayer(spec, budget, layer_idx)

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        """The full cache serves every model."""
