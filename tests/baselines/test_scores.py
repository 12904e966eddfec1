"""Scores come from the model's own queries and keys, in blocks that never hold all pairs of tokens."""

import copy

import pytest
import torch
from evicting_cases import NUM_HEADS, NUM_KV_HEADS, SCALE, make_row

from kvcore.attention import prefill
from kvcore.baselines.scores import QUERY_BLOCK, attention_blocks, low_counts, received_mass
from kvcore.method import build_method
from kvcore.tiny import build_tiny


def test_blocks_are_bounded_and_equal_one_softmax():
    row, length = make_row(300, 1), 300
    logits = torch.einsum("hqd,hkd->hqk", row.queries, row.keys.repeat_interleave(2, dim=0)) * SCALE
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    whole = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
    whole = whole.view(NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, length, length).mean(dim=1)
    seen = 0
    for block, positions in attention_blocks(row.queries, row.keys, SCALE):
        assert block.shape[1] <= QUERY_BLOCK
        assert block.shape[2] == int(positions[-1]) + 1  # nothing is computed for tokens that are not there yet
        torch.testing.assert_close(block, whole[:, positions, : block.shape[2]], atol=1e-6, rtol=1e-5)
        seen += block.shape[1]
    assert seen == length
    torch.testing.assert_close(received_mass(row.queries, row.keys, SCALE), whole.sum(dim=1), atol=1e-4, rtol=1e-5)
    low = (whole < 1 / torch.arange(1, length + 1)[:, None]) & ~hidden
    assert torch.equal(low_counts(row.queries, row.keys, SCALE), low.sum(dim=1).float())
    window = received_mass(row.queries[:, -32:], row.keys, SCALE)
    torch.testing.assert_close(window, whole[:, -32:].sum(dim=1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_kept_sets_equal_those_of_eager_attention_weights(model_type, name):
    """Report E1: selection sees queries and keys after QK-norm and RoPE."""
    model, _ = build_tiny(model_type=model_type, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = torch.randint(5, 300, (1, 90), generator=torch.Generator().manual_seed(2))
    options = {"window": 8, "kernel": 1} if name == "snapkv" else {}
    with torch.inference_mode():
        stock = eager(ids, output_attentions=True, use_cache=True)
        cache = build_method(name, **options).new_cache(model, 0.3)
        prefill(model, cache, ids)
    full = build_method("full").new_cache(model)
    with torch.inference_mode():
        prefill(model, full, ids)
    for layer, exact, weights in zip(cache.layers, full.layers, stock.attentions, strict=True):
        mean = weights[0].view(2, 4, 90, 90).mean(dim=1)  # [Hkv, n, n]
        scores = mean[:, -8:].sum(dim=1) if name == "snapkv" else mean.sum(dim=1)
        newest = 8 if name == "snapkv" else layer.capacity(90) // 2
        scores[:, -newest:] = float("inf")
        for head in range(2):
            expected = set(scores[head].topk(layer.capacity(90)).indices.tolist())
            same = torch.cdist(
                layer.keys[0, head], exact.keys[0, head], compute_mode="donot_use_mm_for_euclid_dist"
            ).argmin(dim=-1)
            assert set(same.tolist()) == expected


METHODS = ["h2o", "scissorhands", "snapkv", "pyramidkv", "chunkkv", "semanticache", "minicache", "streaming_llm"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(4, 4, "float32"), (9, 1, "float32"), (6, 2, "bfloat16")])
def test_head_layouts_and_dtypes(name, heads, kv_heads, dtype):
    model, _ = build_tiny(
        dtype=getattr(torch, dtype),
        hidden_size=16 * heads,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    ids = torch.randint(5, 300, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    cache = build_method(name).new_cache(model, 0.2)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None
        )
        assert out.shape == (2, 94)
        solo = build_method(name).new_cache(model, 0.2)
        prefill(model, solo, ids[1:])
        assert model(ids[1:, :3], cache=solo).logits.isfinite().all()
    assert solo.ledger.device_share <= 0.2
    assert {t.dtype for state in solo.stored_states() for t in (state.keys, state.values)} == {getattr(torch, dtype)}
