"""Shapes of models that need not be on this machine: for planning memory without weights and without a hub."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from kvcore.backbone import DTYPES, BackboneConfig
from kvcore.budget import ModelSpec
from kvcore.tiny import tiny_config

# layers, query heads, KV heads, head dimension, positions: `config.json` of https://huggingface.co/<id>
SHAPES = {
    "meta-llama/Meta-Llama-3-8B": (32, 32, 8, 128, 8192),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 32, 8, 128, 131072),
    "meta-llama/Llama-3.2-3B-Instruct": (28, 24, 8, 128, 131072),
    "mistralai/Mistral-7B-Instruct-v0.3": (32, 32, 8, 128, 32768),
    "Qwen/Qwen2.5-14B-Instruct": (48, 40, 8, 128, 32768),
    "Qwen/Qwen3-8B": (36, 32, 8, 128, 40960),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (30, 9, 3, 64, 8192),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (24, 32, 32, 64, 8192),
}


def backbone_shape(config: BackboneConfig) -> ModelSpec:
    """The shape of a backbone's KV cache, without its weights.

    `dtype=auto` means bfloat16, as on an accelerator; of the tiny model float32, as on a CPU.

    Raises:
        ValueError: neither a known hub id, nor a local folder with a `config.json`, nor the tiny model.
    """
    is_tiny = config.path == "tiny"
    default = torch.float32 if is_tiny else torch.bfloat16
    dtype = default if config.dtype == "auto" else DTYPES[config.dtype]
    if config.path in SHAPES:
        layers, heads, kv_heads, head_dim, positions = SHAPES[config.path]
    elif is_tiny or (Path(config.path).expanduser() / "config.json").is_file():
        options = {key: value for key, value in config.tiny.items() if key != "seed"}
        folder = str(Path(config.path).expanduser())
        found = tiny_config(**options) if is_tiny else AutoConfig.from_pretrained(folder, local_files_only=True)
        layers, heads = found.num_hidden_layers, found.num_attention_heads
        kv_heads = getattr(found, "num_key_value_heads", None) or heads
        head_dim = getattr(found, "head_dim", None) or found.hidden_size // heads
        positions = found.max_position_embeddings
    else:
        raise ValueError(
            f"the shape of '{config.path}' is not known without its files. Known: {', '.join(SHAPES)}; or give a local "
            "folder that holds its config.json: backbone.path=FOLDER"
        )
    cpu = torch.device("cpu")
    return ModelSpec(layers, heads, kv_heads, head_dim, dtype, cpu, positions, (None,) * layers, None, config.name)
