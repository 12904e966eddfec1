"""Results of a run as a file that may be committed: what was measured and how, nothing about the machine's folders.

    python scripts/publish_results.py outputs/quick/sekv_niah --output results
    python scripts/publish_results.py outputs/mine/results.json --output results --name mine \\
        --command "python evaluate.py experiment=sekv_niah seed=1"

A folder is published under its own name. `output_dir` becomes null, paths to data become relative to this checkout; any
other absolute path is refused by name, so that none slips through.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvcore.bench.results import write_atomically

ROOT = Path(__file__).resolve().parents[1]
DATA_KEYS = ("data_dir",)
# texts of samples, which may say anything
TEXTS = ("prediction", "references")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="results.json, or folders that hold one")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder to write NAME.json into")
    parser.add_argument("--name", help="of the file, for a single source; its folder's name otherwise")
    parser.add_argument("--command", help="that made the results; kept in the file")
    options = parser.parse_args(arguments)
    if len(options.sources) > 1 and (options.name or options.command):
        parser.error("--name and --command are for a single source")
    for source in options.sources:
        try:
            path = publish(source, options.output, options.name, options.command)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"published: {path}")
    return 0


def publish(source: Path, output: Path, name: str | None = None, command: str | None = None) -> Path:
    """Write one file; returns its path.

    Raises:
        ValueError: no results, or a path of this machine in them.
        OSError: the source cannot be read, or the file not be written.
    """
    file = source / "results.json" if source.is_dir() else source
    content = portable(json.loads(file.read_text(encoding="utf-8")), command)
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{name or file.resolve().parent.name}.json"
    write_atomically(target, json.dumps(content, indent=1) + "\n")
    return target


def portable(content: dict[str, Any], command: str | None = None) -> dict[str, Any]:
    """A copy without this machine's folders, with the command that made it.

    Raises:
        ValueError: no results, or an absolute path that is not a data path; says where.
    """
    if not isinstance(content, dict) or not {"config", "summary", "samples"} <= content.keys():
        raise ValueError("not a results file of evaluate.py")
    content = json.loads(json.dumps(content))
    config = content["config"]
    if config:
        config["output_dir"] = None
    for options in (config, *config.get("bench", {}).values()):
        for key in DATA_KEYS:
            if options.get(key) is not None:
                options[key] = os.path.relpath(options[key], ROOT)
    for where, value in _strings(content):
        if os.path.isabs(value):
            raise ValueError(f"{where} holds the absolute path {value!r}; published results hold none")
    known = {"command": command} if command else {}
    return {"schema": content.get("schema"), **known, **content}


def _strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text below a value, with its place; those of samples are left out."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in TEXTS:
                yield from _strings(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{where}[{index}]")


if __name__ == "__main__":
    sys.exit(main())
