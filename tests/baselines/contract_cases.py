"""Shared by the contract tests: prompts, caches at a budget that a method can meet, steps, and a walk over memory.

Legend: n prompt tokens, q tokens of a decode step.
"""

import pytest
import torch

from kvcore.attention import cache_argument, prefill
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.method import Method, build_method


def token_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts):
    """Input ids and attention mask of prompts [n_i] of unequal lengths."""
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    return ids, mask


def attempt(model, name, budget, ids, mask=None, method=None):
    """A cache that has read `ids` and the last logits, or None when the method names a larger smallest budget."""
    smallest = None
    try:
        cache = (method or build_method(name)).new_cache(model, budget)
        return cache, prefill(model, cache, ids, mask)
    except UnreachableBudgetError as error:
        smallest = error.smallest
    assert isinstance(budget, int) or smallest > budget
    return None


def prefilled(model, name, ids, mask=None, budgets=(0.25, 0.5, 0.85), method=None):
    """`attempt` at the first of `budgets` that the method can meet."""
    for budget in budgets:
        done = attempt(model, name, budget, ids, mask, method)
        if done is not None:
            return done
    pytest.fail(f"{name} meets none of the budgets {budgets} at {ids.shape[1]} tokens")


def fed(model, cache, ids, step=1):
    """Logits [rows, tokens, vocabulary] of tokens fed after the prefill, `step` at a time."""
    pads = torch.tensor(cache.padding)[:, None]
    logits = []
    for start in range(0, ids.shape[1], step):
        piece = ids[:, start : start + step]
        positions = cache.logical_length + torch.arange(piece.shape[1])[None] - pads
        total = cache.logical_length + piece.shape[1]
        mask = (torch.arange(total)[None] >= pads).long() if any(cache.padding) else None
        logits.append(
            model(input_ids=piece, attention_mask=mask, position_ids=positions, **cache_argument(cache)).logits
        )
    return torch.cat(logits, dim=1)


def generate(model, ids, cache, mask=None, **kwargs):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(input_ids=ids, attention_mask=mask, **cache_argument(cache), **options)


def stored(cache):
    return [tensor for state in cache.stored_states() for tensor in state.tensors()]


def stored_of_row(cache, row, rows):
    """Copies of what is stored of one batch row: its slice of every tensor, or its own ones where rows lie apart."""
    if hasattr(cache, "row_tensors"):
        return [tensor.clone() for tensor in cache.row_tensors(row)]
    assert all(tensor.shape[0] == rows for tensor in stored(cache))  # every stored tensor carries the batch first
    return [tensor[row].clone() for tensor in stored(cache)]


def live_storages(value, seen=None, found=None):
    """Every storage reachable from a value through any attribute, counted once: {address: bytes}."""
    seen, found = (set() if seen is None else seen), ({} if found is None else found)
    if id(value) in seen or isinstance(
        value, ModelSpec | Budget | Method | torch.nn.Module | torch.dtype | torch.device
    ):
        return found
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for item in value.values():
            live_storages(item, seen, found)
    elif isinstance(value, list | tuple | set):
        for item in value:
            live_storages(item, seen, found)
    elif hasattr(value, "__dict__") and not callable(value):
        live_storages(vars(value), seen, found)
    return found
