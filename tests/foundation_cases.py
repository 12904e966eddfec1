"""Shared by the tests of the foundation: tiny models per family, prompts, greedy decoding, the command line in process.

Legend: B batch rows, n prompt tokens.
"""

import functools
import logging
import sys

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvcore.baselines  # noqa: F401 - registers the methods
from kvcore.attention import cache_argument
from kvcore.cache import CompressedCache
from kvcore.method import build_method
from kvcore.tiny import build_tiny

FAMILIES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
# query heads, KV heads
RATIOS = {"ratio1": (8, 8), "ratio3": (6, 2), "ratio4": (8, 2), "multi_query": (8, 1)}
SMALL = {"hidden_size": 48, "intermediate_size": 64, "initializer_range": 0.3, "eos_token_id": None}
METHODS = ("full", "streaming_llm", "oracle_topk")


@functools.cache
def tiny_model(family: str = "llama", heads: int = 8, kv_heads: int = 2, stock: bool = False, **options):
    """A tiny random model, built once; `stock` names a twin with the same weights that no test attaches."""
    model_type, fixed = FAMILIES[family]
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return build_tiny(model_type=model_type, **{**SMALL, **shape, **fixed, **options})[0]


def stock_model(family: str = "llama", heads: int = 8, kv_heads: int = 2, **options) -> PreTrainedModel:
    """The same weights under transformers' own SDPA attention, never attached."""
    model = tiny_model(family, heads, kv_heads, stock=True, **options)
    assert model.config._attn_implementation == "sdpa"
    return model


def token_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random ids [rows, length] without special tokens."""
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, longest] of random prompts of the given lengths."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = token_ids(1, length, seed + row)[0]
    mask = (torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]).long()
    return ids, mask


def greedy(model: PreTrainedModel, ids: Tensor, cache=None, mask: Tensor | None = None, new: int = 12, **options):
    """Greedy tokens [B, n + new], prompt included."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **cache_argument(cache), **options)


def new_cache(model: PreTrainedModel, name: str = "full", budget: float | int = 1.0, **options) -> CompressedCache:
    return build_method(name, **options).new_cache(model, budget)


@torch.inference_mode()
def feed(model: PreTrainedModel, cache, ids: Tensor, step: int = 1) -> Tensor:
    """Logits [B, tokens, vocabulary] of tokens fed `step` at a time."""
    pieces = ids.split(step, dim=1)
    return torch.cat([model(input_ids=piece, **cache_argument(cache)).logits for piece in pieces], dim=1)


def run_main(monkeypatch, capsys, main, *arguments: str) -> tuple[int, str, str]:
    """Run a command-line entry point in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    # Hydra's logging setup shuts every handler down, and absl's closes the stream that pytest gave it
    monkeypatch.setattr(logging, "_handlerList", [])
    code, handlers = 0, logging.root.handlers[:]
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        logging.root.handlers[:] = handlers  # Hydra's write to the stderr of this test only
    out, err = capsys.readouterr()
    return code, out, err
