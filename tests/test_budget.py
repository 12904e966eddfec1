"""What a budget is, what the ledger counts, and that streaming_llm keeps to its bytes at every length."""

import pytest
import torch
from foundation_cases import feed, new_cache, tiny_model, token_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.attention import attach, prefill
from kvcore.budget import Budget, Ledger, ModelSpec, UnreachableBudgetError
from kvcore.fanout import FanOutCache
from kvcore.method import build_method
from kvcore.state import BatchedState, HostState, storage_bytes

CPU = torch.device("cpu")
UNDER = 0.02  # of the nominal bytes: what a whole number of entries may leave over


@pytest.fixture(scope="module")
def long_model():
    """Two layers, 16K positions."""
    return tiny_model("llama", num_hidden_layers=2, max_position_embeddings=16384)


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.5, -3, float("nan"), float("inf"), True, "0.1", None, [0.1]])
def test_a_budget_out_of_bounds_or_not_a_number_is_refused(value):
    with pytest.raises(ValueError, match=r"0 < budget <= 1\.0.*received"):
        Budget(value)


def test_the_integer_one_is_refused_as_ambiguous():
    with pytest.raises(ValueError, match=r"ambiguous: write 1\.0"):
        Budget(1)


def test_an_unknown_scope_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="must be one of bytes, layer; received 'tokens'"):
        Budget(0.1, "tokens")


def test_an_integer_budget_is_tokens_per_layer_and_head():
    assert Budget(128).entries(1000) == 128
    assert Budget(128).entries(100) == 100
    assert Budget(128).share(512) == 0.25
    assert not Budget(128).is_full


def test_an_unreachable_budget_names_the_smallest_one_and_the_levers():
    error = UnreachableBudgetError("kivi", 0.05, 0.1391, "bits=2")
    assert isinstance(error, ValueError) and error.smallest == 0.1391
    assert str(error) == (
        "method 'kivi' cannot meet budget=0.05: the smallest it can reach here is 0.1391. Levers: bits=2"
    )


@given(tokens=st.integers(1, 20_000), share=st.floats(0.0001, 1.0))
def test_entries_never_exceed_the_share_and_never_fall_to_zero(tokens, share):
    entries = Budget(share).entries(tokens)
    assert 1 <= entries <= tokens
    assert entries == 1 or entries <= share * tokens + 1e-6
    assert entries > share * tokens - 1


@given(tokens=st.integers(1, 20_000), share=st.floats(0.001, 0.999), extra=st.integers(0, 64))
def test_entries_with_side_data_fit_the_same_bytes(tokens, share, extra):
    spec = ModelSpec(2, 8, 2, 16, torch.float32, CPU, 32768, (None, None))
    size = spec.entry_bytes + extra
    entries = Budget(share).entries(tokens, size, spec)
    assert entries == 1 or entries * size * spec.num_layers * spec.num_kv_heads <= share * spec.full_bytes(tokens) + 1


@given(tokens=st.integers(1, 100_000))
def test_the_full_budget_keeps_every_token(tokens):
    assert Budget(1.0).entries(tokens) == tokens


def test_the_full_cache_has_the_bytes_of_the_definition(llama):
    spec = attach(llama)
    assert spec.full_bytes(100) == 2 * 4 * 2 * 16 * 4 * 100
    cache = new_cache(llama)
    prefill(llama, cache, token_ids(1, 100))
    feed(llama, cache, token_ids(1, 7))
    assert cache.ledger.device_bytes == spec.full_bytes(107)
    assert cache.ledger.device_share == 1.0
    padding = 4 * 8  # one count per layer and row, in host memory
    assert (cache.ledger.host_bytes, cache.ledger.decode_tokens, cache.ledger.attended_share) == (padding, 7, 1.0)


class _Holder(BatchedState):
    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


class _Bookkeeping(_Holder):
    host_fields = frozenset({"lengths"})


def test_f1_a_view_counts_its_whole_storage():
    whole = torch.zeros(1, 100, 16)
    assert storage_bytes([_Holder(part=whole[:, :10])], CPU) == (whole.nbytes, 0)


def test_f1_a_shared_storage_counts_once_and_nesting_is_followed():
    whole = torch.zeros(1, 100, 16)
    states = [_Holder(a=whole, b=[whole[:, 5:]], c={"x": _Holder(d=whole)}), _Holder(e=(torch.zeros(1, 4),))]
    assert storage_bytes(states, CPU) == (whole.nbytes + 16, 0)


def test_f1_host_state_counts_as_host_even_on_a_cpu():
    class Host(_Holder, HostState):
        pass

    tensor = torch.zeros(1, 10)
    assert storage_bytes([_Holder(near=torch.zeros(1, 5), far=Host(rows=[tensor]))], CPU) == (20, 40)
    near = _Bookkeeping(keys=torch.zeros(1, 5), lengths=torch.zeros(1, dtype=torch.long))
    assert storage_bytes([near], CPU) == (20, 8)
    # on an accelerator every tensor in main memory is host
    assert storage_bytes([_Holder(near=tensor)], torch.device("cuda")) == (0, 40)


def test_the_ledger_keeps_the_worst_moment_and_mean_attention():
    ledger = Ledger(rows=2)
    for device_bytes, full in ((100, 1000), (120, 1100), (90, 600)):
        ledger.record_memory(device_bytes, 7, full)
    for share in (0.1, 0.3):
        ledger.record_attended(share)
    ledger.h2d_bytes, ledger.decode_tokens = 640, 4
    assert ledger.device_bytes == 120 and ledger.host_bytes == 7
    assert ledger.device_share == pytest.approx(0.15)
    assert ledger.attended_share == pytest.approx(0.2)
    assert ledger.h2d_bytes_per_token == 80
    assert set(ledger.as_row()) >= {"device_share", "device_bytes", "host_bytes", "attended_share"}


@pytest.mark.parametrize("context", [512, 1024, 2048, 4096, 8192])
def test_f2_streaming_llm_uses_its_bytes_and_never_more(long_model, context):
    caches = {budget: new_cache(long_model, "streaming_llm", budget) for budget in (0.05, 0.1, 0.2, 0.5)}
    prefill(long_model, FanOutCache(list(caches.values())), token_ids(1, context), chunk_size=1024)
    for budget, cache in caches.items():
        for start in range(0, 200, 20):
            feed(long_model, cache, token_ids(1, 20, start), step=5)
            device_bytes, host_bytes = cache.memory_bytes()
            nominal = budget * cache.spec.full_bytes(cache.logical_length)
            entry = cache.spec.token_bytes  # a share of few tokens is a whole number of entries
            assert host_bytes == 8 * cache.spec.num_layers  # the row's length
            assert nominal * (1 - UNDER) - entry <= device_bytes <= nominal
        assert cache.ledger.device_share <= budget


def test_f3_an_integer_budget_bounds_the_cache_through_a_long_generation(long_model):
    cache = new_cache(long_model, "streaming_llm", 128)
    prefill(long_model, cache, token_ids(1, 64))
    for step in range(128):
        feed(long_model, cache, token_ids(1, 4, step), step=4)
        assert cache.memory_bytes()[0] <= cache.spec.full_bytes(128)
    assert cache.logical_length == cache.get_seq_length() == 576


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(1, 150), budget=st.one_of(st.floats(0.01, 1.0), st.integers(2, 200)), steps=st.integers(1, 9))
def test_any_length_and_budget_gives_finite_logits_within_the_bytes(long_model, length, budget, steps):
    cache = new_cache(long_model, "streaming_llm", budget)
    logits = prefill(long_model, cache, token_ids(1, length))
    more = feed(long_model, cache, token_ids(1, steps, 1))
    assert logits.isfinite().all() and more.isfinite().all()
    assert cache.logical_length == length + steps
    one = 1 + 4 / cache.spec.entry_bytes  # entry of every layer and head, and its rank, stay whatever the budget
    allowed = max(Budget(budget).device_bytes(cache.spec, length + steps), one * cache.spec.token_bytes)
    assert cache.memory_bytes()[0] <= allowed


def test_the_layer_scope_counts_entries_of_every_layer(long_model):
    cache = build_method("streaming_llm").new_cache(long_model, 0.1, "layer")
    prefill(long_model, cache, token_ids(1, 1000))
    assert all(int(layer.priority.isfinite().sum(-1).max()) == 100 for layer in cache.layers)
