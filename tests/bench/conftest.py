"""A tiny backbone with a byte tokenizer: prompts of every benchmark without a download."""

from __future__ import annotations

import pytest

import kvcore.baselines
import kvcore.bench.all  # noqa: F401 - registers the benchmarks
from kvcore.backbone import BackboneConfig, load_backbone


@pytest.fixture(scope="session")
def tiny_backbone():
    """A tiny Llama of 16K positions; one token is one byte."""
    config = BackboneConfig(
        name="tiny", path="tiny", device="cpu", dtype="float32", tiny={"max_position_embeddings": 16384}
    )
    return load_backbone(config)
