"""Containers of batched tensors: one walk serves batch operations, byte counts and resets.

Convention of the whole project: every tensor stored in a cache carries the batch on dimension 0.
Whatever a method keeps (keys, indices, scales, summaries, host factors), `reorder_cache`, row selection
and the byte ledger therefore reach it without method-specific code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    for tensor, on_host in _located(states, False):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() == 0:
            continue
        seen.add(storage.data_ptr())
        if on_host or (device is not None and device.type != "cpu" and tensor.device.type == "cpu"):
            host_total += storage.nbytes()
        else:
            device_total += storage.nbytes()
    return device_total, host_total


class HostState(BatchedState):
    """A state that belongs to host memory: counted as host bytes even when the model runs on the CPU."""


def _located(value: Any, on_host: bool) -> Iterator[tuple[Tensor, bool]]:
    if isinstance(value, Tensor):
        yield value, on_host
    elif isinstance(value, BatchedState):
        inside = on_host or isinstance(value, HostState)
        for name, item in vars(value).items():
            yield from _located(item, inside or name in value.host_fields)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _located(item, on_host)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _located(item, on_host)
