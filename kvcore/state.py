"""Containers of batched tensors: one walk serves batch operations, byte counts and resets.

Convention of the whole project: every tensor stored in a cache carries the batch on dimension 0.
Whatever a method keeps (keys, indices, scales, summaries, host factors), `reorder_cache`, row selection
and the byte ledger therefore reach it without method-specific code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor


class BatchedState:
    """An object whose attributes may hold tensors, other states, or lists / tuples / dicts of them.

    Attributes of any other type (configuration, counters, modules with trained weights) are left alone.

    Class attributes:
        host_fields: attributes that live in host memory whatever the device of the model: bookkeeping of the Python
            side, such as the length of every row. They count as host bytes.
    """

    host_fields: ClassVar[frozenset[str]] = frozenset()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, at any depth."""
        yield from _walk(vars(self))

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor `t` held, at any depth, by `fn(t)`."""
        for name, value in vars(self).items():
            setattr(self, name, _mapped(value, fn))

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, any order, repeats allowed) of every tensor."""
        self.map_tensors(lambda t: t.index_select(0, rows.to(t.device)))


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, BatchedState):
        yield from _walk(vars(value))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)


def _mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, BatchedState):
        value.map_tensors(fn)
        return value
    if isinstance(value, dict):
        return {key: _mapped(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, fn) for item in value)
    return value


def storage_bytes(states: list[BatchedState], device: torch.device | None) -> tuple[int, int]:
    """Bytes of the live storages behind `states`, as (on the device, on the host).

    A view counts its whole storage and a shared storage counts once. When the model itself lives on the CPU
    there is one memory only; then tensors inside a `HostState` or in `host_fields` count as host.
    """
    seen: set[int] = set()
    device_total = host_total = 0
    found: list[tuple[Tensor, bool]] = []
    _locate(states, False, found)
    for tensor, on_host in found:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in seen or size == 0:
            continue
        seen.add(place)
        if on_host or (device is not None and device.type != "cpu" and tensor.device.type == "cpu"):
            host_total += size
        else:
            device_total += size
    return device_total, host_total


class HostState(BatchedState):
    """A state that belongs to host memory: counted as host bytes even when the model runs on the CPU."""


# what most attributes are: they hold no tensor
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def _locate(items: Iterable[Any], on_host: bool, found: list[tuple[Tensor, bool]]) -> None:
    """Add every tensor among the items, at any depth, and whether it counts as host memory. Runs once a decode step."""
    for item in items:
        if type(item) in _PLAIN:
            continue
        if isinstance(item, Tensor):
            found.append((item, on_host))
        elif isinstance(item, BatchedState):
            inside, named = on_host or isinstance(item, HostState), item.host_fields
            if named and not inside:
                _locate([vars(item).get(name) for name in named], True, found)
                _locate((value for name, value in vars(item).items() if name not in named), False, found)
            else:
                _locate(vars(item).values(), inside, found)
        elif isinstance(item, dict):
            _locate(item.values(), on_host, found)
        elif isinstance(item, list | tuple):
            _locate(item, on_host, found)
