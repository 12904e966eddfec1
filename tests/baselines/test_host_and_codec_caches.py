"""Whole caches of the retrieval and quantising methods: ledger, traffic, bf16."""

import pytest
import torch

from kvcore.attention import prefill
from kvcore.method import build_method
from kvcore.tiny import build_tiny

RETRIEVAL = ["quest", "retroinfer", "sentencekv"]
CODECS = ["kivi", "kvquant", "compose"]


@pytest.fixture(scope="module")
def model():
    return build_tiny(dtype=torch.bfloat16, num_hidden_layers=2)[0]


@pytest.mark.parametrize("name", RETRIEVAL + CODECS)
def test_bf16_cache_is_finite_and_on_budget(model, name):
    budget = 0.3 if name in RETRIEVAL else 0.6  # a scale and zero point weigh twice as much beside bf16
    cache = build_method(name).new_cache(model, budget=budget)
    ids = torch.randint(5, 300, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        prefill(model, cache, ids[:, :290])
        for step in range(290, 300, 2):
            logits = model(ids[:, step : step + 2], cache=cache).logits
            assert logits.isfinite().all()
    assert cache.ledger.device_share <= budget
    row = cache.ledger.as_row()
    if name in RETRIEVAL:
        assert row["h2d_bytes_per_token"] > 0 and row["h2d_stall_ms_per_token"] > 0
        assert row["host_bytes"] > 0.3 * cache.spec.full_bytes(2 * 290)
        assert row["attended_share"] < 1
    else:
        assert row["h2d_bytes_per_token"] == row["h2d_stall_ms_per_token"] == 0
        assert row["host_bytes"] <= 2 * 64 * cache.spec.num_layers  # lengths of the rows, no tokens
