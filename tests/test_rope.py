"""Rotary positions: un-rotation and re-rotation agree with the model's own rotary module; positions stay logical.

Legend: n tokens, d head dimension.
"""

import pytest
import torch
from foundation_cases import SMALL, feed, greedy, left_padded, new_cache, stock_model, token_ids
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcore.attention import attach, cache_argument, prefill
from kvcore.rope import shift_positions
from kvcore.tiny import build_tiny

pytestmark = pytest.mark.versions
ROPE_TYPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
EXACT = {"atol": 1e-4, "rtol": 1e-4}
COMPUTE = "donot_use_mm_for_euclid_dist"


@pytest.fixture(scope="module", params=ROPE_TYPES)
def rotary(request):
    """A tiny model of one rope type: (model, attached shape)."""
    model = build_tiny(**SMALL, rope_parameters=ROPE_TYPES[request.param])[0]
    assert model.model.rotary_emb.rope_type == request.param
    return model, attach(model)


def rotated(model, raw, positions):
    """Keys [1, 1, n, d] at `positions` [n], through the model's own rotary module."""
    cos, sin = model.model.rotary_emb(raw, positions[None])
    return apply_rotary_pos_emb(raw, raw, cos, sin)[1]


def test_b3_moving_a_key_equals_the_models_own_rotation(rotary):
    model, spec = rotary
    raw, here = torch.randn(1, 1, 40, 16), torch.arange(40)
    there = here + torch.randint(-20, 1500, (40,)).clamp_min(-here)
    moved = shift_positions(rotated(model, raw, here), there - here, spec.inverse_frequencies)
    torch.testing.assert_close(moved, rotated(model, raw, there), **EXACT)


def test_b3_unrotate_then_rerotate_is_the_identity(rotary):
    model, spec = rotary
    raw, positions = torch.randn(1, 1, 64, 16), torch.arange(900, 964)
    keys = rotated(model, raw, positions)
    plain = shift_positions(keys, -positions, spec.inverse_frequencies)
    torch.testing.assert_close(plain, rotated(model, raw, torch.zeros(64, dtype=torch.long)), **EXACT)
    torch.testing.assert_close(shift_positions(plain, positions, spec.inverse_frequencies), keys, atol=1e-5, rtol=1e-5)


def test_b3_low_precision_keys_are_turned_in_full_precision():
    frequencies = torch.tensor([1.0, 0.1])
    key = torch.randn(3, 5, 4).bfloat16()
    moved = shift_positions(key, 1000, frequencies)
    assert moved.dtype == torch.bfloat16
    torch.testing.assert_close(moved, shift_positions(key.float(), 1000, frequencies).bfloat16())


def test_b3_channels_beyond_a_partial_rotation_stay():
    key = torch.randn(2, 3, 8)
    moved = shift_positions(key, 5, torch.tensor([1.0, 0.5]))
    assert torch.equal(moved[..., 4:], key[..., 4:])
    assert not torch.equal(moved[..., :4], key[..., :4])


def brute_force_logits(model, ids, steps, sinks, window):
    """In-cache StreamingLLM of the paper's section 3.2, literally: pre-RoPE keys kept, rotated to 0..n-1 each step.

    Args:
        model: an unattached Llama; its own modules are called one by one, one token at a time.
        ids: [1, n + steps].
        steps: decoded tokens; the rest is the prompt, read with full attention.
        sinks, window: kept tokens after the prefill and during decoding.

    Returns:
        Logits [steps, vocabulary].
    """
    decoder, prompt = model.model, ids.shape[1] - steps
    raw: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in decoder.layers]
    outputs = []
    hidden_of_prompt = decoder.embed_tokens(ids[:, :prompt])
    hidden_states = hidden_of_prompt
    for layer, kept in zip(decoder.layers, raw, strict=True):
        hidden_states, keys, values = _layer(decoder, layer, hidden_states, [], torch.arange(prompt))
        for position in range(prompt):
            kept[position] = (keys[:, position], values[:, position])
    for step in range(steps):
        token = prompt + step
        hidden_states = decoder.embed_tokens(ids[:, token : token + 1])
        for layer, kept in zip(decoder.layers, raw, strict=True):
            for position in [p for p in kept if sinks <= p < token - window]:
                del kept[position]
            old = [kept[position] for position in sorted(kept)]
            place = torch.tensor([len(old)])
            hidden_states, keys, values = _layer(decoder, layer, hidden_states, old, place)
            kept[token] = (keys[:, 0], values[:, 0])
        outputs.append(model.lm_head(decoder.norm(hidden_states))[0, 0])
    return torch.stack(outputs)


def _layer(decoder, layer, hidden_states, old, places):
    """One decoder layer over new tokens at `places`, old pre-RoPE keys at 0..len(old)-1; new raw keys and values."""
    attention, count = layer.self_attn, hidden_states.shape[1]
    normed = layer.input_layernorm(hidden_states)
    query, key, value = (
        project(normed).view(count, -1, 16).transpose(0, 1)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    keys = torch.cat([*(k[:, None] for k, _ in old), key], dim=1)
    values = torch.cat([*(v[:, None] for _, v in old), value], dim=1)
    positions = torch.cat([torch.arange(len(old)), places])
    cos, sin = decoder.rotary_emb(keys, positions[None])
    rotated_keys = apply_rotary_pos_emb(keys[None], keys[None], cos, sin)[1][0]
    cos, sin = decoder.rotary_emb(query, places[None])
    rotated_query = apply_rotary_pos_emb(query[None], query[None], cos, sin)[0][0]
    group = query.shape[0] // key.shape[0]
    logits = rotated_query @ rotated_keys.repeat_interleave(group, 0).transpose(-1, -2) * attention.scaling
    visible = positions[None] <= places[:, None]
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    mixed = (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).reshape(1, count, -1)
    hidden_states = hidden_states + attention.o_proj(mixed)
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states)), key, value


@torch.inference_mode()
def test_b2_in_cache_positions_equal_a_brute_force_reference(llama):
    ids, steps = token_ids(1, 60 + 36), 36
    cache = new_cache(llama, "streaming_llm", 20, num_sinks=4, positions="in_cache")
    prefill(llama, cache, ids[:, :60])
    kept = int(cache.layers[0].priority.isfinite().sum(-1).max())
    logits = feed(llama, cache, ids[:, 60:])[0]
    expected = brute_force_logits(stock_model(), ids, steps, sinks=4, window=kept - 4)
    for step in (1, 16, 35):
        torch.testing.assert_close(logits[step], expected[step], **EXACT)


def test_b2_absolute_positions_are_the_default_and_another_named_option(llama):
    ids = token_ids(1, 80)
    outputs = {}
    for positions in (None, "absolute", "in_cache"):
        options = {} if positions is None else {"positions": positions}
        cache = new_cache(llama, "streaming_llm", 20, **options)
        prefill(llama, cache, ids)
        outputs[positions] = feed(llama, cache, token_ids(1, 4, 1))
    assert torch.equal(outputs[None], outputs["absolute"])
    assert not torch.allclose(outputs["absolute"], outputs["in_cache"], atol=1e-2)
    with pytest.raises(ValueError, match="positions"):
        new_cache(llama, "streaming_llm", 20, positions="rotary")


@torch.inference_mode()
@pytest.mark.parametrize("padded", [False, True])
def test_b1_the_next_token_stands_at_its_true_position_after_eviction(llama, padded):
    ids, mask = left_padded([100, 90] if padded else [100])
    full, cache, seen = DynamicCache(), new_cache(llama, "streaming_llm", 25), []
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    llama(ids, attention_mask=mask, position_ids=positions, **cache_argument(full))
    prefill(llama, cache, ids, mask)
    for layer, exact in zip(cache.layers, full.layers, strict=True):
        live = layer.priority.isfinite()
        distance = torch.cdist(layer.keys, exact.keys, compute_mode=COMPUTE).amin(-1)
        assert float(distance[live].max()) < 1e-4
        assert int(live.sum(-1).max()) <= 25
    hook = llama.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids", args[-1]).tolist()), with_kwargs=True
    )
    more = torch.cat([ids, token_ids(len(ids), 1, 3)], dim=1)
    greedy(llama, more, cache, torch.cat([mask, mask[:, -1:]], dim=1), new=3)
    hook.remove()
    lengths = mask.sum(-1).tolist()
    assert seen == [[[length + step] for length in lengths] for step in range(3)]
    assert cache.logical_length == cache.get_seq_length() == 103
    assert cache.row_tokens() == [length + 3 for length in lengths]
