"""The one attention function, through which every cache sees queries, keys and values.

It is registered with transformers under the name `kvcore`, together with a mask function. `attach(model)` selects it
and puts one forward hook pair on the decoder, which announces each forward to the cache in use. No `forward` is
replaced and nothing is patched at import. Queries and keys arrive after QK-norm and RoPE, so Llama, Mistral, Qwen2,
Qwen3 and SmolLM need no code of their own.

Legend: B batch rows, Hq query heads, Hkv KV heads, Q tokens of this forward, d head dimension.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcore.budget import ModelSpec
from kvcore.cache import CompressedCache
from kvcore.log import get_logger
from kvcore.memory import PromptMemoryError, is_out_of_memory

NAME = "kvcore"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# from, below; scripts/check_versions.sh tests the ends
TESTED = {"transformers": ("5.14.0", "5.25.0"), "torch": ("2.13.0", "2.14.0")}
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"

_active = threading.local()
_attached: weakref.WeakKeyDictionary[PreTrainedModel, ModelSpec] = weakref.WeakKeyDictionary()
log = get_logger(__name__)


def cache_argument(cache: Any) -> dict[str, Any]:
    """A cache as a keyword of `model(...)` and `model.generate(...)`: transformers 5.24 renamed it."""
    return {CACHE_ARGUMENT: cache}


def active_cache() -> CompressedCache | None:
    """The compressed cache of the forward under way in this thread, if any."""
    stack: list[tuple[CompressedCache | None, Tensor | None]] = getattr(_active, "stack", [])
    return stack[-1][0] if stack else None


def active_input_ids() -> Tensor | None:
    """Token ids [B, Q] of the forward under way in this thread; None outside one or when it was given embeddings.

    For methods that compress along the text (sentences, delimiters): their layers see it while the prefill runs.
    """
    stack: list[tuple[CompressedCache | None, Tensor | None]] = getattr(_active, "stack", [])
    return stack[-1][1] if stack else None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: [B, Hq, Q, d] queries in, [B, Q, Hq, d] out.

    With a compressed cache in use the cache computes the attention; otherwise this is transformers' own SDPA.
    """
    cache = active_cache()
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    output = cache.attend(layer_idx, query, key, value, scale, cache.spec.sliding_windows[layer_idx])
    return output.transpose(1, 2).contiguous(), None


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask interface: no mask for a compressed cache, which handles padding itself; else SDPA's."""
    return None if active_cache() is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)


def attach(model: PreTrainedModel) -> ModelSpec:
    """Route a causal LM's attention through the shared attention function. Idempotent.

    Args:
        model: a causal LM of a supported architecture. Stock caches keep working on it.

    Returns:
        The shape of its KV cache.

    Raises:
        NotImplementedError: an architecture that is not supported, named.
    """
    if model in _attached:
        return _attached[model]
    spec = model_spec(model)
    _warn_version()
    model.set_attn_implementation(NAME)
    decoder = model.get_decoder()
    _remove_copied_hooks(decoder)
    decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
    owner = weakref.ref(model)

    def after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _after_forward(owner(), args, kwargs, output)

    after_forward.kvcore_hook = True  # type: ignore[attr-defined]
    decoder.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
    _attached[model] = spec
    return spec


def _remove_copied_hooks(decoder: nn.Module) -> None:
    """Take off the hooks that a copy of an attached model carries: they announce forwards to the original's owner."""
    for hook_id, hook in list(decoder._forward_pre_hooks.items()):
        if hook is _before_forward:
            decoder._forward_pre_hooks.pop(hook_id)
            decoder._forward_pre_hooks_with_kwargs.pop(hook_id, None)
    for hook_id, hook in list(decoder._forward_hooks.items()):
        if getattr(hook, "kvcore_hook", False):
            decoder._forward_hooks.pop(hook_id)
            decoder._forward_hooks_with_kwargs.pop(hook_id, None)
            decoder._forward_hooks_always_called.pop(hook_id, None)


def model_spec(model: PreTrainedModel) -> ModelSpec:
    """The shape of a model's KV cache.

    Raises:
        NotImplementedError: an architecture that is not supported, named.
    """
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise NotImplementedError(
            f"architecture '{config.model_type}' is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)} "
            "(SmolLM2 is 'llama')"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    decoder = model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    key_weight = decoder.layers[0].self_attn.k_proj.weight
    return ModelSpec(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        dtype=key_weight.dtype,
        device=key_weight.device,
        max_positions=config.max_position_embeddings,
        sliding_windows=_sliding_windows(config),
        inverse_frequencies=None if rotary is None else rotary.inv_freq.detach().float(),
        backbone_id=str(getattr(config, "backbone_id", None) or config._name_or_path),
    )


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, the attention window in tokens; None where attention is full (in llama whatever its config says)."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "llama" or window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _cache_of(kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def _push(cache: CompressedCache | None, input_ids: Tensor | None = None) -> None:
    if not hasattr(_active, "stack"):
        _active.stack = []
    _active.stack.append((cache, input_ids))


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(kwargs)
    if not isinstance(cache, CompressedCache):
        _push(None)
        return
    tokens = _input_tokens(args, kwargs)
    try:
        cache.begin_forward(tokens.shape[0], tokens.shape[1], kwargs.get("attention_mask"))
    except BaseException:
        _push(None)  # the after-hook runs in any case and takes it off again
        raise
    _push(cache, kwargs.get("input_ids", args[0] if args else None))


def _after_forward(model: PreTrainedModel | None, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache, _ = _active.stack.pop()
    if cache is None:
        return
    if output is None or model is None:
        cache.fail_forward()
        return
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    try:
        cache.end_forward(model, input_ids, output.last_hidden_state)
    except BaseException:
        cache.fail_forward()
        raise


def _input_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for candidate in (kwargs.get("input_ids"), args[0] if args else None, kwargs.get("inputs_embeds")):
        if isinstance(candidate, Tensor):
            return candidate
    raise ValueError("the model was called with neither input_ids nor inputs_embeds")


def _warn_version() -> None:
    for package in (transformers, torch):
        name, version = package.__name__, Version(package.__version__)
        low, high = map(Version, TESTED[name])
        if not low <= Version(version.base_version) < high:
            log.warning(
                "%s %s is outside the tested range %s <= version < %s; a bypassed attention call raises an error",
                name,
                version,
                low,
                high,
            )


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Read a context into an empty cache, whole or in chunks, and compress it.

    Args:
        model: the attached causal LM.
        cache: an empty compressed cache.
        input_ids: [B, T], left-padded.
        attention_mask: [B, T], 0 at padding.
        chunk_size: tokens per forward; None reads the context in one.

    Returns:
        Logits [B, V] after the last token.

    Raises:
        ValueError: no token, or a cache that is not empty.
        PromptMemoryError: memory ran out; names what would need less.
    """
    total = input_ids.shape[1]
    if cache.logical_length:
        raise ValueError(f"prefill needs an empty cache; this one holds {cache.logical_length} tokens (call reset())")
    cache.prefill_tokens = total
    position_ids = None
    if attention_mask is not None:
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    logits: Tensor | None = None
    for start in range(0, total, chunk_size or max(total, 1)):
        stop = min(total, start + (chunk_size or total))
        try:
            logits = model(
                input_ids=input_ids[:, start:stop],
                attention_mask=None if attention_mask is None else attention_mask[:, :stop],
                position_ids=None if position_ids is None else position_ids[:, start:stop],
                **cache_argument(cache),
                logits_to_keep=1,
            ).logits
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise PromptMemoryError(cache.method, input_ids.shape[0], total, chunk_size) from error
    if logits is None:
        raise ValueError("the prompt must hold at least one token; received 0 tokens")
    return logits[:, -1]
