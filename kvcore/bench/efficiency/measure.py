"""Clocks and memory meters for one generation.

Device memory is the CUDA allocator's peak on a GPU; on a CPU the device is the process itself, so the peak resident set
is sampled. Both are given as growth over the moment before the cache was made, beside the cache's own ledger.
"""

from __future__ import annotations

import gc
import threading
import time
from types import TracebackType
from typing import Any

import psutil
import torch
from transformers import StoppingCriteria

SAMPLING_SECONDS = 0.005


class PeakMemory:
    """Context manager: peak memory of a device while it is open.

    Attributes:
        kind: `cuda_allocator` or `resident_set`.
        growth: bytes at the peak beyond those at the start.
        peak: bytes at the peak.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "cuda_allocator" if device.type == "cuda" else "resident_set"
        self.growth = self.peak = self._start = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = psutil.Process()

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
            return self
        self._start = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            self.peak = torch.cuda.max_memory_allocated(self.device)
        else:
            self._stop.set()
            self._thread.join()
            self.peak = max(self.peak, self._process.memory_info().rss)
        self.growth = max(0, self.peak - self._start)


class StepClock(StoppingCriteria):
    """Notes the time after every generated token; never stops a generation.

    Args:
        device: waited for, so that queued work is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(now(self.device))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, after the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
