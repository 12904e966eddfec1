"""Long generations at a 10% budget: bytes and memory at every step, for every method.

Times are printed by `scripts/long_generation.py` and are no assertion: they belong to the machine.
"""

from __future__ import annotations

import functools

import pytest
from script_cases import load_script

from kvcore.method import method_names

long_generation = load_script("long_generation")
METHODS = method_names()
MIB = 1 << 20
LENGTHS = [
    # below 256 tokens codecs serve whatever budget is asked for, and say what it came to
    pytest.param(288, 128, id="128 tokens"),
    pytest.param(1024, 4096, id="4096 tokens", marks=pytest.mark.slow),
]


@functools.cache
def model():
    return long_generation.tiny_model()


@pytest.mark.parametrize(("prompt", "tokens"), LENGTHS)
@pytest.mark.parametrize("name", METHODS)
def test_bytes_and_memory_through_a_long_generation(name, prompt, tokens):
    run = long_generation.in_own_process(
        model(), name, long_generation.BUDGETS, prompt, tokens, timed=min(tokens // 4, 512)
    )
    assert run.most_over <= 0  # at every step
    assert run.host_bytes <= run.host_limit
    # no tensor grows beside the cache: those of two steps would be more
    assert abs(run.tensor_growth - run.cache_growth) < 512
    # what the allocator keeps for temporaries, which does not follow the number of tokens
    assert run.process_beyond <= 8 * MIB
