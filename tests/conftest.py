"""Settings of every test: no network, one torch thread, one printed seed; and the tiny models of the foundation."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported anywhere
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("WANDB_API_KEY", None)

import random

import pytest
import torch
from foundation_cases import tiny_model

SEED = int(os.environ.get("SEKV_TEST_SEED", "0"))
COUNTED = ("fuzzed configurations", "fuzzed prompts", "contract cases")


def pytest_report_header(config):
    return f"seed: {SEED} (SEKV_TEST_SEED=N draws others); hub: offline; torch threads: 1"


@pytest.fixture
def tally(request):
    """Counts what a test tries, under a name in `COUNTED`; the sums stand at the end of the run."""
    counts = dict.fromkeys(COUNTED, 0)

    def add(name: str) -> None:
        counts[name] += 1
        # a test's properties travel with its report, from the processes of pytest-xdist as well
        request.node.user_properties[:] = [(key, count) for key, count in counts.items() if count]

    return add


def pytest_terminal_summary(terminalreporter):
    totals = dict.fromkeys(COUNTED, 0)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name in totals:
                totals[name] += dict(report.user_properties).get(name, 0)
    if any(totals.values()):
        terminalreporter.write_line("reliability: " + ", ".join(f"{n:,} {name}" for name, n in totals.items()))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(SEED)
    random.seed(SEED)


@pytest.fixture(scope="session")
def llama():
    """A tiny Llama: 4 layers, 8 query and 2 KV heads."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def mistral():
    return tiny_model("mistral")


@pytest.fixture(scope="session")
def mistral_window():
    """A tiny Mistral whose layers see the last 32 tokens."""
    return tiny_model("mistral_window")


@pytest.fixture(scope="session")
def qwen2():
    return tiny_model("qwen2")


@pytest.fixture(scope="session")
def qwen3():
    return tiny_model("qwen3")
