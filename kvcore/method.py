"""A method is one dataclass of options, found by name in one registry, that builds caches.

cache = build_method("streaming_llm", num_sinks=4).new_cache(model, budget=0.1)
model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvcore.attention import attach
from kvcore.budget import Budget, ModelSpec, Scope
from kvcore.cache import CompressedCache
from kvcore.exact import SlidingLayer
from kvcore.layer import CacheLayer
from kvcore.options import did_you_mean, typed_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MethodType = TypeVar("MethodType", bound="type[Method]")
_registry: dict[str, type[Method]] = {}


@dataclass(frozen=True, kw_only=True)
class Method:
    """Options of one compression method; subclasses add fields and say how a layer is made.

    Class attributes:
        name: the registered name.
        reference_only: an upper reference that looks at what it claims to have dropped; flagged in results.
        ignores_budget: the method is the same at every budget (the full cache); run once in a comparison.
        attends_all: no entry is left out of the attention (codecs), so coverage is 1 by construction.
    """

    name: ClassVar[str]
    reference_only: ClassVar[bool] = False
    ignores_budget: ClassVar[bool] = False
    attends_all: ClassVar[bool] = False
    cache_class: ClassVar[type[CompressedCache]] = CompressedCache

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        """An empty layer of this method."""
        raise NotImplementedError

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        """The empty layers of a cache; override where layers share state."""
        return [self.make_layer(spec, budget, index) for index in range(spec.num_layers)]

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse, before anything slow, a model or budget that the method cannot serve.

        Raises:
            NotImplementedError: sliding-window layers under compression.
            ValueError: a budget that cannot be reached (in subclasses).
        """
        if any(spec.sliding_windows) and not budget.is_full:
            window = max(filter(None, spec.sliding_windows))
            raise NotImplementedError(
                f"method '{self.name}' does not support sliding-window layers (window {window} in "
                f"{spec.backbone_id or 'this model'}) with budget={budget.value}: the model bounds them itself. "
                "Use budget=1.0, or a checkpoint with full attention"
            )

    def note(self, spec: ModelSpec) -> str:
        """What a reader of a result must know beyond the options, such as which trained weights; often nothing."""
        return ""

    def new_cache(
        self,
        model: PreTrainedModel,
        budget: float | int = 1.0,
        budget_scope: Scope = "bytes",
        prefill_tokens: int | None = None,
    ) -> CompressedCache:
        """An empty cache for `model.generate(..., past_key_values=cache)`; attaches the model.

        Args:
            model: a causal LM of a supported architecture.
            budget: share of the full cache's bytes (0 < b <= 1.0), or tokens per layer and KV head (int >= 2).
            budget_scope: `bytes` or `layer` (see `kvcore.budget`).
            prefill_tokens: tokens of the whole prompt when it arrives in several forwards.
        """
        spec, parsed = attach(model), Budget(budget, budget_scope)
        self.validate(spec, parsed)

        def fresh_layers() -> list[CacheLayer]:
            layers = self.make_layers(spec, parsed)
            return [
                layer if window is None else SlidingLayer(spec, parsed, layer.layer_idx, window)
                for layer, window in zip(layers, spec.sliding_windows, strict=True)
            ]

        return self.cache_class(spec, parsed, fresh_layers, self.name, prefill_tokens)


def register(cls: MethodType) -> MethodType:
    """Class decorator: put a method into the registry under its `name`."""
    if _registry.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise ValueError(f"two methods are named '{cls.name}': {_registry[cls.name]} and {cls}")
    _registry[cls.name] = cls
    return cls


def method_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_registry)


def method_class(name: str) -> type[Method]:
    """The method registered as `name`.

    Raises:
        ValueError: unknown name, with close matches.
    """
    if name not in _registry:
        raise ValueError(f"unknown method '{name}'. {did_you_mean(name, method_names())}")
    return _registry[name]


def build_method(name: str, **options: Any) -> Method:
    """A method with options; the rest keep their defaults.

    Raises:
        ValueError: unknown method or option (close matches named), a wrong type, a value out of range.
    """
    return typed_options(method_class(name), options, f"method '{name}'")
