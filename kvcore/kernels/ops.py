"""The Triton kernels as torch custom operators, so that `torch.compile` and graph capture see through them.

Each has a fake implementation (shapes and dtypes only) and, where training may use it, a gradient: the backward pass
repeats the operator on the differentiable torch path. Triton is imported at an operator's first call.

Legend: B batch, Hq query heads, Hkv KV heads, Q query tokens, N entries, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcore.kernels import torch_compressed, torch_path

_NAMESPACE = "kvcore"


def _state_like(query: Tensor, dim_v: int) -> tuple[Tensor, Tensor]:
    """Empty output [B, Hq, Q, dv] and log-sum-exp [B, Hq, Q]."""
    output = query.new_empty(*query.shape[:3], dim_v)
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::decode_attention", mutates_args=())
def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`."""
    from kvcore.kernels.triton import decode

    return decode.decode_attention(query, key, value, scale, bias)


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _state_like(query, value.shape[3])


@torch.library.custom_op(f"{_NAMESPACE}::merge_states", mutates_args=())
def merge_states(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge stacked outputs [S, B, Hq, Q, dv] and log-sum-exps [S, B, Hq, Q]."""
    from kvcore.kernels.triton import merge

    output, lse = merge.merge_stacked(outputs.contiguous(), lses.float().contiguous(), outputs.dtype)
    # an operator must not return a view of its input
    return (output.clone(), lse.clone()) if outputs.shape[0] == 1 else (output, lse)


@merge_states.register_fake
def _(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outputs[0]), torch.empty_like(lses[0], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::span_scores", mutates_args=())
def span_scores(
    query: Tensor,
    mean_key: Tensor,
    lengths: Tensor,
    scale: float,
    routing_query: Tensor | None,
    routing_gain: Tensor | None,
    directions: Tensor | None,
    curvature: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `reference.span_scores`."""
    from kvcore.kernels.triton import span_scores as kernel

    return kernel.span_scores(query, mean_key, lengths, scale, routing_query, routing_gain, directions, curvature)


@span_scores.register_fake
def _(
    query: Tensor,
    mean_key: Tensor,
    lengths: Tensor,
    scale: float,
    routing_query: Tensor | None,
    routing_gain: Tensor | None,
    directions: Tensor | None,
    curvature: Tensor | None,
) -> tuple[Tensor, Tensor]:
    coarse = query.new_empty(*query.shape[:3], mean_key.shape[2], dtype=torch.float32)
    return coarse, torch.empty_like(coarse)


@torch.library.custom_op(f"{_NAMESPACE}::gather_attention", mutates_args=())
def gather_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, scale: float, page_size: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `reference.gather_attention`."""
    from kvcore.kernels.triton import gather

    return gather.gather_attention(query, key, value, index, scale, page_size, bias)


@gather_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, scale: float, page_size: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _state_like(query, value.shape[3])


@torch.library.custom_op(f"{_NAMESPACE}::lowrank_attention", mutates_args=())
def lowrank_attention(
    query: Tensor,
    key_factors: Tensor,
    key_basis: Tensor,
    value_factors: Tensor,
    value_basis: Tensor,
    lengths: Tensor,
    scale: float,
    key_gain: Tensor | None,
    value_gain: Tensor | None,
    span_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `reference_compressed.lowrank_attention`."""
    from kvcore.kernels.triton import lowrank

    return lowrank.lowrank_attention(
        query, key_factors, key_basis, value_factors, value_basis, lengths, scale, key_gain, value_gain, span_bias
    )


@lowrank_attention.register_fake
def _(
    query: Tensor,
    key_factors: Tensor,
    key_basis: Tensor,
    value_factors: Tensor,
    value_basis: Tensor,
    lengths: Tensor,
    scale: float,
    key_gain: Tensor | None,
    value_gain: Tensor | None,
    span_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _state_like(query, value_basis.shape[4])


@torch.library.custom_op(f"{_NAMESPACE}::packed_logits", mutates_args=())
def packed_logits(rows: Tensor, codes: Tensor, bits: int, num_tokens: int) -> Tensor:
    """Rows [B, S, P, R] times raw packed codes: fp32 [B, S, P, N]. See `torch_compressed.packed_logits`."""
    from kvcore.kernels.triton import depth

    return depth.packed_logits(rows, codes, bits, num_tokens)


@packed_logits.register_fake
def _(rows: Tensor, codes: Tensor, bits: int, num_tokens: int) -> Tensor:
    return rows.new_empty(*rows.shape[:3], num_tokens, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::packed_mix", mutates_args=())
def packed_mix(weights: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Weights [B, S, P, N] times raw packed codes: fp32 [B, S, P, R]. See `torch_compressed.packed_mix`."""
    from kvcore.kernels.triton import depth

    return depth.packed_mix(weights, codes, bits)


@packed_mix.register_fake
def _(weights: Tensor, codes: Tensor, bits: int) -> Tensor:
    return weights.new_empty(*weights.shape[:3], codes.shape[2], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::coordinate_logits", mutates_args=())
def coordinate_logits(query: Tensor, codes: Tensor, dims: list[int], bits: list[int], offset: Tensor) -> Tensor:
    """Parts of `dims` coordinates of `bits` bits. See `reference_compressed.coordinate_logits`."""
    from kvcore.kernels.triton import coordinates

    return coordinates.coordinate_logits(query, codes, dims, bits, offset)


@coordinate_logits.register_fake
def _(query: Tensor, codes: Tensor, dims: list[int], bits: list[int], offset: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], codes.shape[3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::plane_logits", mutates_args=())
def plane_logits(rows: Tensor, packed: Tensor, width: int) -> Tensor:
    """Rows [S, P, K] times the codes of one plane uint8 [S, n, K]. See `triton.planes`."""
    from kvcore.kernels.triton import planes

    return planes.plane_logits(rows, packed, width)


@plane_logits.register_fake
def _(rows: Tensor, packed: Tensor, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:2], packed.shape[1] * (8 // width), dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::plane_mix", mutates_args=())
def plane_mix(weights: Tensor, packed: Tensor, width: int) -> Tensor:
    """Weights [S, P, M] times the codes of one plane uint8 [S, n, K]. See `triton.planes`."""
    from kvcore.kernels.triton import planes

    return planes.plane_mix(weights, packed, width)


@plane_mix.register_fake
def _(weights: Tensor, packed: Tensor, width: int) -> Tensor:
    return weights.new_empty(*weights.shape[:2], packed.shape[2], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::quantised_attention", mutates_args=())
def quantised_attention(
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    key_form: list[int],
    value_form: list[int],
    num_tokens: int,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Codes, steps and zero points of keys and values; forms are (bits, group size)."""
    from kvcore.kernels.triton import quantised

    forms = (key_form[0], key_form[1]), (value_form[0], value_form[1])
    operands = (key[0], key[1], key[2]), (value[0], value[1], value[2])
    return quantised.quantised_attention(query, *operands, *forms, num_tokens, scale, bias)


@quantised_attention.register_fake
def _(
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    key_form: list[int],
    value_form: list[int],
    num_tokens: int,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _state_like(query, query.shape[3])


def _recomputed(operator: Any, path: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Give an operator the gradient of its twin on the torch path, computed anew in the backward pass."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if tensor else x for tensor, x in zip(ctx.is_tensor, ctx.constants, strict=True)]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        for i in wanted:
            inputs[i] = inputs[i].detach().requires_grad_()
        with torch.enable_grad():
            outputs = path(*inputs)
        found = torch.autograd.grad(outputs, [inputs[i] for i in wanted], gradients, allow_unused=True)
        result: list[Tensor | None] = [None] * len(inputs)
        for i, gradient in zip(wanted, found, strict=True):
            result[i] = gradient
        return tuple(result)

    operator.register_autograd(backward, setup_context=setup)


def _merge_stacked(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return torch_path.merge_states(list(outputs.unbind(0)), list(lses.unbind(0)))


_recomputed(decode_attention, torch_path.decode_attention)
_recomputed(merge_states, _merge_stacked)
_recomputed(span_scores, torch_path.span_scores)
_recomputed(gather_attention, torch_path.gather_attention)
_recomputed(lowrank_attention, torch_compressed.lowrank_attention)
