"""Rows from the host: what arrives, what a wait costs, and that nothing is read before it has come."""

import contextlib
import copy
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvcore.transfer
from kvcore.transfer import HostLink, StreamTransfer

STORE = torch.arange(60.0).view(20, 3)


def gather(indices: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    rows = STORE.index_select(0, indices[0])
    return [rows] if out is None else [out[0].copy_(rows)]


@pytest.mark.parametrize("from_host", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
def test_rows_arrive_in_the_order_asked_for_and_only_host_rows_stall(from_host, buffered):
    link, index = HostLink(), torch.tensor([7, 0, 7, 19])
    out = [torch.full((4, 3), float("nan"))] if buffered else None
    [rows] = link.request(gather, [index], out, from_host=from_host).arrive()
    assert torch.equal(rows, STORE[index])
    if out is not None:
        assert rows.data_ptr() == out[0].data_ptr()
    assert (link.stalled_seconds() > 0) == from_host


def test_a_copy_of_a_link_goes_on_from_its_stalls_alone():
    link = HostLink(pinned=False)
    link.record_stall(2.0)
    copied = copy.deepcopy(link)
    copied.record_stall(1.0)
    assert (link.stalled_seconds(), copied.stalled_seconds(), copied.pinned) == (2.0, 3.0, False)


class FakeStream:
    """Notes what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    """Recorded at the time that a clock shows; events are named in the order in which they are recorded."""

    log: ClassVar[list[str]] = []
    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.name, self.done = enable_timing, "", True

    def record(self, stream: FakeStream | None = None) -> None:
        FakeEvent.clock += 3.0
        self.time = FakeEvent.clock
        self.name = f"{'compute' if stream is None else stream.name}@{self.time:.0f}"
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.timing and other.timing
        return other.time - self.time


def test_on_a_gpu_every_stream_waits_for_what_it_reads(monkeypatch):
    """The order of the stream path, on streams that only take notes (there may be no GPU)."""
    log: ClassVar[list[str]] = []
    monkeypatch.setattr(FakeEvent, "log", log)
    monkeypatch.setattr(FakeEvent, "clock", 0.0)
    compute, copies = FakeStream("compute", log), FakeStream("copies", log)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(kvcore.transfer, "_copy_stream", lambda device: copies)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: log.append("gathered") or tensor.clone())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"kept for {stream.name}"))
    link, index = HostLink(), torch.tensor([3, 1])
    transfer = StreamTransfer(link, gather, [index], None)
    log.append("resident attention")
    [rows] = transfer.arrive()
    assert torch.equal(rows, STORE[index])
    assert log == [
        *("record compute@3", "resident attention", "host waits for compute@3", "gathered"),
        *("copies waits for compute@3", "record copies@6"),
        *("record compute@9", "compute waits for copies@6", "record compute@12", "kept for compute"),
    ]
    assert link.stalled_seconds() == pytest.approx(0.003)
    StreamTransfer(link, gather, [index], None).arrive()
    link._waits[0][1].done = False
    assert link.stalled_seconds() == pytest.approx(0.003)  # the device is not there yet: nobody waits for it
    link._waits[0][1].done = True
    assert link.stalled_seconds() == pytest.approx(0.006)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: streams and pinned memory are not exercised")
@pytest.mark.parametrize("pinned", [True, False])
def test_a6_rows_are_whole_under_a_busy_compute_stream(pinned):
    link, generator = HostLink(pinned), torch.Generator().manual_seed(0)
    busy = torch.randn(2048, 2048, device="cuda")
    store = torch.randn(100_000, 128, generator=generator)
    out = [torch.empty(4096, 128, device="cuda")]
    for repeat in range(200):
        index = torch.randint(0, store.shape[0], (4096,), generator=generator)
        on_device = index.cuda()

        def lookup(indices: Sequence[Tensor], _: object) -> list[Tensor]:
            return [store.index_select(0, indices[0])]

        transfer = link.request(lookup, [on_device], out if repeat % 2 else None)
        busy = (busy @ busy).clamp_(-1, 1)
        [rows] = transfer.arrive()
        read = rows.double().sum()  # on the compute stream, at once
        rows.mul_(0) if repeat % 3 == 0 else None
        assert float(read) == pytest.approx(float(store[index].double().sum()), rel=1e-9)
    torch.cuda.synchronize()
    assert link.stalled_seconds() > 0
