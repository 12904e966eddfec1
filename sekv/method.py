"""SeKV as a method: options in, caches out.

cache = SeKV().new_cache(model, budget=0.1)
cache = SeKV.from_pretrained("router.safetensors").new_cache(model, budget=0.1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer
from kvcore.method import Method, register
from kvcore.transfer import HostLink
from sekv.cache import SeKVCache
from sekv.checkpoint import find_router, load_router, read_config, router_config
from sekv.layer import SeKVLayer
from sekv.options import SeKVOptions
from sekv.plan import Planner
from sekv.routing import Router
from sekv.shared import Shared

FORM_FIELDS = ("summary", "maps", "decision", "map_rank", "directions", "global_threshold", "gates")


@register
@dataclass(frozen=True, kw_only=True)
class SeKV(SeKVOptions, Method):
    __doc__ = SeKVOptions.__doc__

    name: ClassVar[str] = "sekv"
    cache_class: ClassVar[type[SeKVCache]] = SeKVCache

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: object) -> SeKV:
        """The method with the form and the trained parameters of a checkpoint; `options` override the rest.

        Raises:
            FileNotFoundError, ValueError: see `checkpoint.load_router`.
        """
        config = read_config(path)
        form = {field: getattr(config, field) for field in FORM_FIELDS}
        return cls(**{**form, "checkpoint": str(path), **options})  # type: ignore[arg-type]

    def checkpoint_path(self, spec: ModelSpec) -> Path | None:
        """The checkpoint in use; None when routing is untrained."""
        if self.checkpoint == "none":
            return None
        return (
            find_router(router_config(spec, **self.router_form()), spec)
            if self.checkpoint == "auto"
            else Path(self.checkpoint)
        )

    def note(self, spec: ModelSpec) -> str:
        path = self.checkpoint_path(spec)
        return "untrained routing" if path is None else f"router {path.name}"

    def router(self, spec: ModelSpec) -> Router:
        """The router that `checkpoint` asks for.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: a checkpoint of another backbone, shape or form.
        """
        wanted = router_config(spec, **self.router_form())
        path = self.checkpoint_path(spec)
        if path is None:
            # untied maps that were never trained add nothing: decoding leaves them out
            plain = replace(wanted, maps="none") if wanted.maps == "untied" else wanted
            return Router(plain).freeze()
        router = load_router(path, spec)
        wrong = [f for f in FORM_FIELDS if getattr(router.config, f) != getattr(wanted, f)]
        if wrong:
            found = {f: getattr(router.config, f) for f in wrong}
            raise ValueError(
                f"SeKV checkpoint {path} was trained for {found}; the options ask for "
                f"{ {f: getattr(wanted, f) for f in wrong} }. Use SeKV.from_pretrained, or set these options alike"
            )
        return router

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        shared = Shared(spec.num_layers, spec.num_heads, HostLink(self.pin))
        planner = Planner(spec, budget, self)
        router = self.router(spec).to(spec.device)
        return [SeKVLayer(spec, budget, index, self, planner, router, shared) for index in range(spec.num_layers)]

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        if not budget.is_full:
            self.router(spec)
