"""The contract matrix: method x feature x architecture x dtype, on tiny models.

CI runs a covering subset: every method with every feature, every architecture and every dtype, and every feature with
every architecture and dtype. The full product is slow. `tests/baselines/test_contract.py` holds what one architecture
in fp32 shows already (budgets, byte counts, resets, stock equality).
"""

import pytest
import torch
from matrix_cases import ARCHITECTURES, DTYPES, FEATURES, stand_of

import freqdepth
import kvcore.baselines
import sekv
from kvcore.method import method_names

pytestmark = pytest.mark.versions
REGISTERED = (kvcore.baselines, sekv, freqdepth)
METHODS = method_names()
PLACES = [(architecture, dtype) for architecture in ARCHITECTURES for dtype in DTYPES]
CASES = "contract cases"


def covering() -> list[tuple[str, str, str, str]]:
    """Every method x feature once, the model turning so that every other pair comes up as well."""
    return [
        (name, feature, *PLACES[(first + second) % len(PLACES)])
        for first, name in enumerate(METHODS)
        for second, feature in enumerate(FEATURES)
    ]


def product() -> list[tuple[str, str, str, str]]:
    """The whole product, one model after the other."""
    return [(name, feature, *place) for place in PLACES for name in METHODS for feature in FEATURES]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def test_the_subset_covers_every_pair_and_the_product_is_whole(capsys):
    cases = covering()
    everything = (METHODS, FEATURES, ARCHITECTURES, DTYPES)
    for first, second in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        pairs = {(case[first], case[second]) for case in cases}
        assert len(pairs) == len(everything[first]) * len(everything[second])
    assert set(cases) <= set(product())
    with capsys.disabled():
        print(f"\ncontract matrix: {len(cases)} cases here, {len(product())} in the full product")


@pytest.mark.parametrize(("name", "feature", "architecture", "dtype"), covering())
def test_covering_subset(name, feature, architecture, dtype, tally):
    tally(CASES)
    FEATURES[feature](stand_of(name, architecture, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "feature", "architecture", "dtype"), product())
def test_full_product(name, feature, architecture, dtype, tally):
    tally(CASES)
    FEATURES[feature](stand_of(name, architecture, dtype))
