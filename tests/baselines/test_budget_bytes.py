"""Device bytes never above the budget: every budgeted method, every step, to the byte."""

import importlib

import pytest
import torch
from budget_cases import bound, over
from contract_cases import attempt, fed, left_padded, token_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcore.baselines  # noqa: F401 - registers the methods
from kvcore.method import method_class, method_names
from kvcore.tiny import build_tiny

for _package in ("sekv", "freqdepth"):
    importlib.import_module(f"{_package}.cache")

pytestmark = pytest.mark.versions
BUDGETED = [n for n in method_names() if not (method_class(n).reference_only or method_class(n).ignores_budget)]
# their rows follow one plan, longer ones with more of everything. Where rows may differ in kind (bits, page size, map
# or no map), each part is as wide as the row with most of it, and batches of unequal lengths can hold more
ONE_PLAN = ("chunkkv", "freqdepth", "h2o", "minicache", "pyramidkv", "scissorhands", "semanticache", "snapkv")
ONE_PLAN += ("streaming_llm",)
CHEAP = sorted(set(BUDGETED) - {"freqdepth", "kivi", "kvquant", "minicache"})
# codecs have a smallest budget, which their refusal names
BUDGETS = (0.1, 0.25, 0.6)
DTYPES = (torch.float32, torch.bfloat16)
STEPS = 20
SMALL = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def models():
    """Tiny models of four layers by their dtype."""
    return {dtype: build_tiny(num_hidden_layers=4, dtype=dtype, **SMALL)[0] for dtype in DTYPES}


def run(model, name, budget, lengths, steps):
    """Most bytes over the budget in any of `steps` steps after a prompt of these rows; None where it does not bind."""
    done = attempt(model, name, budget, *left_padded([token_ids(1, n, n)[0] for n in lengths]))
    if done is None or not bound(done[0]):
        return None
    cache, most = done[0], over(done[0])
    for step in range(steps):
        fed(model, cache, token_ids(len(lengths), 1, step))
        most = max(most, over(cache))
    return most


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", BUDGETED)
def test_device_bytes_stay_within_the_budget_at_every_step(models, name, rows):
    bound_somewhere = 0
    for length in (1, 3, 17, 60, 300) if rows == 1 else (3, 300):
        for budget in BUDGETS:
            most = run(models[torch.float32], name, budget, [length] * rows, STEPS)
            bound_somewhere += most is not None
            assert most is None or most <= 0, f"{length} tokens at {budget}: {most} bytes over"
    assert bound_somewhere


@pytest.mark.parametrize("name", ONE_PLAN)
@pytest.mark.parametrize("lengths", [(300, 297, 295), (60, 33, 17), (3, 130, 40)], ids=str)
def test_left_padded_rows_stay_within_the_budget_of_the_longest(models, name, lengths):
    for budget in BUDGETS:
        most = run(models[torch.float32], name, budget, lengths, STEPS)
        assert most is not None and most <= 0, f"{most} bytes over at {budget}"


@pytest.mark.parametrize("name", CHEAP)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    length=st.integers(1, 400),
    budget=st.floats(0.01, 0.99),
    dtype=st.sampled_from(DTYPES),
    steps=st.integers(1, 20),
)
def test_any_length_and_budget_stays_within_the_bytes(models, name, length, budget, dtype, steps):
    most = run(models[dtype], name, budget, [length], steps)
    assert most is None or most <= 0
