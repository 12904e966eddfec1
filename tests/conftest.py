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


def pytest_report_header(config):
    return f"seed: {SEED} (SEKV_TEST_SEED=N draws others); hub: offline; torch threads: 1"


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
