"""Versions, devices, and which fast paths are on, or off and why. Run: `python scripts/env.py` (JSON: `--json`)."""

from __future__ import annotations

import argparse
import json
import os

import torch

from kvcore.environment import PACKAGES, device_name, environment
from kvcore.kernels import backend_report


def devices() -> dict[str, str]:
    found = {"cpu": f"{device_name(None)}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory >> 20} MiB, capability {capability}"
    return found


def report() -> dict[str, dict[str, str]]:
    """Sections of names and states; also stored beside benchmark results."""
    measured = environment()
    versions = {name: measured[name] or "not installed" for name in ("python", *PACKAGES)}
    return {
        "versions": versions,
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
