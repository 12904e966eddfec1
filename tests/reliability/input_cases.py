"""What is fed and typed in the tests of inputs. Every value is drawn from the lists below: nothing here is random."""

from __future__ import annotations

import functools
import math

import torch

from kvcore.tiny import build_tiny, byte_tokenizer

# no option of any part may be one of these
WRONG = ({"a": {"b": 1}}, [[{"c": None}], 3], "no such value", "")
# each may be refused or served; never an error that is not explained
EXTREME = (-1, 0, 1, 2**40, -1e30, 1e-12, 1e30, math.nan, math.inf, True, None, [], [-1], [0.0], [2**40])


def texts() -> dict[str, str]:
    return {
        "one token": "x",
        "two tokens": "xy",
        "same token": "a" * 300,
        "whitespace": " \t\n\r" * 512,
        "right to left": "שלום עולם، مرحبا بالعالم. " * 8,
        "cjk": "長い文書の要約。기다란 문서입니다. " * 8,
        "emoji": "👩‍👩‍👧‍👦🏳️‍🌈🇺🇳" * 8,
        "code": "def f(x):\n    return {k: v[::-1] for k, v in x.items()}  # 🙂\n" * 5,
        "table": "| id | n |\n|----|---|\n" + "".join(f"| {i} | {i * i} |\n" for i in range(20)),
        "controls": "\x00\x01\x7f\ufeff\u202e\u200b\ufffd" * 20,
        "full stops": "." * 200,
        "newlines": "\n" * 200,
    }


SPECIALS = "special tokens"
PROMPTS = [*texts(), SPECIALS]


@functools.cache
def tiny(dtype: torch.dtype = torch.float32):
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"max_position_embeddings": 4096}
    return build_tiny(dtype=dtype, **small, initializer_range=0.3, eos_token_id=None)[0]


def ids_of(prompt: str) -> torch.Tensor:
    if prompt == SPECIALS:
        return torch.tensor([list(range(5)) * 12])
    return torch.tensor([byte_tokenizer()(texts()[prompt]).input_ids])
