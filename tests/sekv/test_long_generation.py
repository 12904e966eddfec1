"""A long generation: device bytes stay at the budget from the first token to the last, and tokens do not get slower.

Run with `-s` to see the times.
"""

import time

import pytest
import torch
from embedded_cases import embedded_backbone

import sekv  # noqa: F401 - registers the method
from kvcore.attention import prefill
from kvcore.method import build_method
from kvcore.tiny import build_tiny

BUDGET = 0.1
TOKENS = 1024


def tiny_model():
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
    return build_tiny(eos_token_id=None, **small)[0]


def embedded_model():
    return embedded_backbone("bfloat16").model


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [tiny_model, embedded_model])
@torch.inference_mode()
def test_device_bytes_follow_the_budget_through_1024_tokens(make_model):
    model = make_model()
    words = model.config.vocab_size
    cache = build_method("sekv", checkpoint="none").new_cache(model, BUDGET)
    prompt = torch.randint(5, words, (1, 1000), generator=torch.Generator().manual_seed(0))
    token = prefill(model, cache, prompt).argmax(-1, keepdim=True)
    seconds = []
    for step in range(TOKENS):
        start = time.process_time()
        token = model(input_ids=token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.process_time() - start)
        share = cache.memory_bytes()[0] / cache.spec.full_bytes(cache.logical_length)
        assert BUDGET * 0.98 <= share <= BUDGET, step
    assert cache.ledger.device_share <= BUDGET
    assert cache.logical_length == prompt.shape[1] + TOKENS
    first, last = sum(seconds[: TOKENS // 2]), sum(seconds[TOKENS // 2 :])
    print(f"ms per token: first half {2e3 * first / TOKENS:.1f}, last half {2e3 * last / TOKENS:.1f}")
