"""budget=1.0 is stock transformers, token for token: families, head ratios, padding, generation features."""

import pytest
import torch
from foundation_cases import (
    FAMILIES,
    METHODS,
    RATIOS,
    feed,
    greedy,
    left_padded,
    new_cache,
    stock_model,
    tiny_model,
    token_ids,
)
from transformers import DynamicCache

from kvcore.attention import attach, cache_argument, prefill
from kvcore.method import build_method

pytestmark = pytest.mark.versions
BATCHES = {"single": [40], "left_padded": [9, 40, 23]}
COMPRESSING = ("streaming_llm", "oracle_topk")


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_budget_gives_the_tokens_of_stock_generate(family, ratio):
    model, stock = tiny_model(family, *RATIOS[ratio]), stock_model(family, *RATIOS[ratio])
    for lengths in BATCHES.values():
        ids, mask = left_padded(lengths)
        expected = greedy(stock, ids, DynamicCache(config=stock.config), mask, new=8)
        for method in METHODS:
            assert torch.equal(greedy(model, ids, new_cache(model, method), mask, new=8), expected), (method, lengths)


@pytest.mark.parametrize("length", [31, 32, 33, 100])
def test_e2_mistral_with_a_window_of_32_equals_stock(mistral_window, length):
    stock = stock_model("mistral_window")
    for lengths, methods in (([length], ("full",)), ([length - 11, length], METHODS)):
        ids, mask = left_padded(lengths)
        expected = greedy(stock, ids, None, mask, new=40)
        for method in methods:
            cache = new_cache(mistral_window, method)
            assert torch.equal(greedy(mistral_window, ids, cache, mask, new=40), expected)
            assert all(layer.keys.shape[2] == min(31, length + 39) for layer in cache.layers)


@pytest.mark.parametrize("method", ["streaming_llm", "oracle_topk", "snapkv", "kivi", "quest"])
def test_e2_compression_of_sliding_layers_is_refused_by_name(mistral_window, method):
    with pytest.raises(NotImplementedError, match=rf"'{method}'.*sliding-window.*32.*budget=1\.0"):
        new_cache(mistral_window, method, 0.25)


def test_e2_qwen2_with_the_window_switched_off_has_full_attention():
    options = {"sliding_window": 16, "use_sliding_window": False}
    model = tiny_model("qwen2", **options)
    assert attach(model).sliding_windows == (None,) * 4
    ids = token_ids(1, 50)
    assert torch.equal(greedy(model, ids, new_cache(model)), greedy(stock_model("qwen2", **options), ids))
    assert new_cache(model, "streaming_llm", 0.25).budget.value == 0.25


def test_e2_qwen2_with_windows_in_some_layers_equals_stock():
    options = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}
    model = tiny_model("qwen2", **options)
    assert attach(model).sliding_windows == (None, None, 16, 16)
    ids, mask = left_padded([50, 13])
    expected = greedy(stock_model("qwen2", **options), ids, None, mask, new=20)
    assert torch.equal(greedy(model, ids, new_cache(model), mask, new=20), expected)


@pytest.mark.parametrize("chunk", [1, 7, 32, 60])
@pytest.mark.parametrize("method", METHODS)
def test_chunked_prefill_equals_whole_prefill(llama, method, chunk):
    ids, mask = left_padded([60, 41])
    whole, chunked = (new_cache(llama, method, 0.25) for _ in range(2))
    logits = prefill(llama, whole, ids, mask)
    torch.testing.assert_close(prefill(llama, chunked, ids, mask, chunk), logits, atol=1e-4, rtol=1e-4)
    assert chunked.memory_bytes() == whole.memory_bytes()
    for one, other in zip(whole.layers, chunked.layers, strict=True):
        torch.testing.assert_close(other.keys, one.keys, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_of_a_sliding_window_model_equals_stock(mistral_window):
    ids = token_ids(1, 100)
    cache = new_cache(mistral_window)
    logits = prefill(mistral_window, cache, ids, chunk_size=13)
    torch.testing.assert_close(logits, stock_model("mistral_window")(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_chunked_prefill_by_generate_is_announced_with_prefill_tokens(llama):
    ids = token_ids(1, 50)
    cache = build_method("streaming_llm").new_cache(llama, 0.25, prefill_tokens=50)
    chunked = greedy(llama, ids, cache, prefill_chunk_size=16)
    assert torch.equal(chunked, greedy(llama, ids, new_cache(llama, "streaming_llm", 0.25)))


@pytest.mark.parametrize("budget", [1.0, 0.25])
@pytest.mark.parametrize("method", METHODS)
def test_a5_sixteen_tokens_equal_eight_and_eight_more(llama, method, budget):
    ids = token_ids(1, 40)
    whole = greedy(llama, ids, new_cache(llama, method, budget), new=16)
    cache = new_cache(llama, method, budget)
    half = greedy(llama, ids, cache, new=8)
    assert torch.equal(greedy(llama, half, cache, new=8), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_several_tokens_equal_one_forward(family):
    model, ids = tiny_model(family), token_ids(2, 80)
    expected = stock_model(family)(ids).logits[:, 48:]
    for step in (1, 2, 16, 32):
        cache = new_cache(model)
        prefill(model, cache, ids[:, :48])
        torch.testing.assert_close(feed(model, cache, ids[:, 48:], step), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("feature", ["prompt_lookup", "assistant_model"])
@pytest.mark.parametrize("method", METHODS)
def test_d2_speculative_decoding_is_equal_or_refused_by_name(llama, method, feature):
    ids = token_ids(1, 12).repeat(1, 4)
    options = {"prompt_lookup_num_tokens": 3}
    if feature == "assistant_model":
        options = {"assistant_model": tiny_model("llama", num_hidden_layers=1)}
    if method == "full":
        assert torch.equal(greedy(llama, ids, new_cache(llama), **options), greedy(stock_model(), ids))
        return
    with pytest.raises(NotImplementedError, match=rf"'{method}'.*assisted or prompt-lookup"):
        greedy(llama, ids, new_cache(llama, method, 0.25), **options)


@pytest.mark.parametrize("method", METHODS)
def test_d1_beam_search_equals_stock(llama, method):
    ids, mask = left_padded([33, 20])
    beams = {"num_beams": 3, "num_return_sequences": 3}
    expected = greedy(stock_model(), ids, None, mask, **beams)
    assert torch.equal(greedy(llama, ids, new_cache(llama, method), mask, **beams), expected)


@pytest.mark.parametrize("method", METHODS)
def test_d1_several_samples_a_prompt_equal_stock_at_the_same_seed(llama, method):
    ids, sampling = token_ids(2, 20), {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
    torch.manual_seed(1)
    expected = greedy(stock_model(), ids, **sampling)
    torch.manual_seed(1)
    assert torch.equal(greedy(llama, ids, new_cache(llama, method), **sampling), expected)
    assert greedy(llama, ids, new_cache(llama, method, 0.25), **sampling).shape == (6, 32)


def test_d1_rows_are_repeated_and_selected_as_stock_does(llama):
    ids, more = token_ids(3, 20), token_ids(1, 2, 9)
    ours, theirs = new_cache(llama), DynamicCache()
    prefill(llama, ours, ids)
    stock_model()(ids, **cache_argument(theirs))
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 2, 2]))
    logits = feed(llama, ours, more.expand(4, -1))
    torch.testing.assert_close(logits, feed(stock_model(), theirs, more.expand(4, -1)), atol=1e-4, rtol=1e-4)


def test_d2_crop_takes_the_newest_tokens_back_exactly(llama):
    ids = token_ids(1, 40)
    cache, fresh = new_cache(llama), new_cache(llama)
    prefill(llama, cache, ids)
    feed(llama, cache, token_ids(1, 5, 1))
    cache.crop(-5)
    prefill(llama, fresh, ids)
    assert cache.logical_length == cache.get_seq_length(2) == 40
    assert cache.memory_bytes() == fresh.memory_bytes()
    more = token_ids(1, 4, 2)
    assert torch.equal(feed(llama, cache, more), feed(llama, fresh, more))


@pytest.mark.parametrize("method", COMPRESSING)
def test_d2_crop_of_a_compressed_cache_is_refused_by_name(llama, method):
    cache = new_cache(llama, method, 0.25)
    prefill(llama, cache, token_ids(1, 40))
    with pytest.raises(NotImplementedError, match=rf"'{method}' does not support crop"):
        cache.crop(-2)
    cache.crop(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_caches_still_work_on_an_attached_model(family):
    model, stock = tiny_model(family), stock_model(family)
    attach(model)
    ids, mask = left_padded([40, 17])
    assert torch.equal(greedy(model, ids, DynamicCache(config=model.config), mask), greedy(stock, ids, None, mask))
    assert torch.equal(model(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits)
