"""What a result was measured with: versions, device, threads, git revision."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "hydra-core", "triton", "tokenizers", "numpy")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Everything a reader needs to compare numbers, as plain data."""
    record: dict[str, Any] = {"git": git_revision(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            record[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            record[package] = None
    record["device"] = device_name(device)
    record["threads"] = torch.get_num_threads()
    record["platform"] = platform.platform()
    return record


def device_name(device: torch.device | None) -> str:
    """Name of the accelerator, or of the processor."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"cpu ({model})"


def git_revision() -> str | None:
    """Commit of the checkout this code runs from, `-dirty` where files differ; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
