"""Versions, devices, and which fast paths are on, or off and why. Run: `python scripts/env.py` (JSON: `--json`)."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

import torch

from kvcore.kernels import backend_report

PACKAGES = ("torch", "triton", "transformers", "accelerate", "datasets", "safetensors", "numpy", "hydra-core")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def devices() -> dict[str, str]:
    found = {"cpu": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory >> 20} MiB, capability {capability}"
    return found


def report() -> dict[str, dict[str, str]]:
    """Sections of names and states; also stored beside benchmark results."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "devices": devices(),
        "fast paths": backend_report(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sections = report()
    if parser.parse_args().json:
        print(json.dumps(sections))
        return
    for title, entries in sections.items():
        print(title)
        for name, state in entries.items():
            print(f"  {name:24} {state}")


if __name__ == "__main__":
    main()
