"""Rows that a decode step fetches from host memory: asked for as soon as they are known, taken as late as possible.

On a GPU the index travels to the host behind the kernels that chose it, the rows are gathered into pinned memory there
and copied on a stream of their own; meanwhile the compute stream works on what a step has on the device, and what it
waits after that is the stall. Where host and device are one memory nothing runs beside the step: the time of the gather
is its stall.

Legend: n rows, x numbers of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Takes the indices on the device of the store; writes into the given tensors where there are any, returns the rows.
Gather = Callable[[Sequence[Tensor], "Sequence[Tensor] | None"], list[Tensor]]


class HostLink:
    """The way from host to device that the layers of one cache share.

    Args:
        pinned: rows pass through pinned memory, beside the computation; otherwise copies block.
    """

    def __init__(self, pinned: bool = True) -> None:
        self.pinned = pinned
        self._stalled = 0.0
        self._waits: list[tuple[Any, Any]] = []  # events before and after each wait of a compute stream

    def __deepcopy__(self, memo: dict[int, Any]) -> HostLink:
        copied = HostLink(self.pinned)
        copied._stalled = self.stalled_seconds()  # waits under way stay with the original
        return copied

    def request(
        self, gather: Gather, indices: Sequence[Tensor], out: Sequence[Tensor] | None = None, *, from_host: bool = True
    ) -> Transfer:
        """Ask for rows.

        Args:
            gather: looks the rows up.
            indices: what it takes, on the device.
            out: buffers on the device for the rows, free from now on; None makes new ones.
            from_host: the rows lie in host memory; otherwise nothing travels and nothing is counted.
        """
        if from_host and self.pinned and indices[0].device.type == "cuda":
            return StreamTransfer(self, gather, indices, out)
        return Transfer(self, gather, indices, out, from_host)

    def record_stall(self, seconds: float) -> None:
        """A step waited for rows."""
        self._stalled += seconds

    def record_wait(self, before: Any, after: Any) -> None:
        """A compute stream waits between these two events (with times)."""
        self._waits.append((before, after))

    def stalled_seconds(self) -> float:
        """Seconds that steps have waited, as far as the device has come; does not wait for it."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.pop(0)
            self._stalled += before.elapsed_time(after) / 1000
        return self._stalled


class Transfer:
    """Rows under way. This form looks them up when they are taken."""

    def __init__(
        self, link: HostLink, gather: Gather, indices: Sequence[Tensor], out: Sequence[Tensor] | None, from_host: bool
    ) -> None:
        self.link, self.gather, self.indices, self.out, self.from_host = link, gather, indices, out, from_host

    def arrive(self) -> list[Tensor]:
        """The rows [n, x], on the device."""
        device = self.indices[0].device
        if not self.from_host:
            return self.gather(self.indices, self.out)
        began = time.perf_counter()
        if device.type == "cpu":
            rows = self.gather(self.indices, self.out)
        else:
            rows = _placed(self.gather([index.cpu() for index in self.indices], None), device, self.out, False)
        self.link.record_stall(time.perf_counter() - began)
        return rows


class StreamTransfer(Transfer):
    """Rows that travel on a stream of their own."""

    def __init__(self, link: HostLink, gather: Gather, indices: Sequence[Tensor], out: Sequence[Tensor] | None) -> None:
        super().__init__(link, gather, indices, out, True)
        self.host_indices = [index.to("cpu", non_blocking=True) for index in indices]  # into pinned memory
        self.asked = torch.cuda.Event()
        self.asked.record()

    def arrive(self) -> list[Tensor]:
        device = self.indices[0].device
        self.asked.synchronize()  # waits for the choice, not for what was launched after it
        staged = [row.pin_memory() for row in self.gather(self.host_indices, None)]
        compute, copies = torch.cuda.current_stream(device), _copy_stream(device)
        with torch.cuda.stream(copies):
            copies.wait_event(self.asked)  # the buffers' last readers were launched before it
            rows = _placed(staged, device, self.out, True)
            copied = torch.cuda.Event()
            copied.record(copies)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(copied)
        after.record(compute)
        for row in rows:
            row.record_stream(compute)  # memory of one stream is used on the other: it may not be given away before
        self.link.record_wait(before, after)
        return rows


def _placed(
    rows: Sequence[Tensor], device: torch.device, out: Sequence[Tensor] | None, non_blocking: bool
) -> list[Tensor]:
    """Rows of the host on the device."""
    if out is None:
        return [row.to(device, non_blocking=non_blocking) for row in rows]
    return [
        target.copy_(row.view(target.shape), non_blocking=non_blocking) for target, row in zip(out, rows, strict=True)
    ]


@lru_cache(maxsize=16)
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
