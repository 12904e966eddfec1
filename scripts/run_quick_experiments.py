"""Every table and figure of the papers in its quick form, one after the other, and one report of all of them.

    python scripts/run_quick_experiments.py                       # into outputs/quick; the same command resumes
    python scripts/run_quick_experiments.py --only sekv_niah pareto
    python scripts/run_quick_experiments.py --publish results     # and copies to commit
    python scripts/run_quick_experiments.py backbone.dtype=bfloat16 --output outputs/quick_bf16

Each runs by its own command, `python evaluate.py experiment=NAME`; arguments with a `=` go to all. Two need data:
`python scripts/fetch_data.py gsm8k longbench infinitebench`. One that fails does not stop the others: it is named at
the end, and the exit code is 1. Times go to OUTPUT/times.json, added up over resumed runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvcore.bench.results import write_atomically
from kvcore.cli import groups

ROOT = Path(__file__).resolve().parents[1]
TITLE = "KV-cache compression: every table and figure in its quick form"


def quick_experiments() -> list[str]:
    """The quickstart, and every experiment that has a form in the papers' setting beside it."""
    names = groups()["experiment"]
    return ["quickstart", *(name for name in names if f"{name}_paper" in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for evaluate.py, in every experiment")
    parser.add_argument("--only", nargs="+", choices=quick_experiments(), metavar="NAME", help="some of them")
    parser.add_argument("--output", type=Path, default=Path("outputs/quick"), help="a folder per experiment inside")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="copy results there, without this machine's paths")
    options = parser.parse_args(arguments)
    for override in options.overrides:
        if "=" not in override:
            parser.error(f"{override!r} is no KEY=VALUE (names of experiments go behind --only)")
    failed = []
    for name in options.only or quick_experiments():
        command = ["python", "evaluate.py", f"experiment={name}", *options.overrides]
        print(f"\n== {shlex.join(command)}", flush=True)
        folder = options.output / name
        if run(command, folder, options.output / "times.json") != 0:
            failed.append(name)
        elif options.publish is not None:
            wanted = ["--output", str(options.publish), "--name", name, "--command", shlex.join(command)]
            call("scripts/publish_results.py", str(folder), *wanted)
    done = sorted(path.parent for path in options.output.glob("*/results.json"))
    if done:
        call("scripts/report.py", *map(str, done), "--output", str(options.output / "report"), "--title", TITLE)
    if failed:
        print(f"not complete: {', '.join(failed)}. The same command resumes", file=sys.stderr)
    return 1 if failed else 0


def run(command: Sequence[str], folder: Path, times: Path) -> int:
    """Run one experiment in a process of its own and note its time; returns its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    began, used = time.perf_counter(), processor_seconds()
    code = call(*command[1:], f"output_dir={folder.resolve()}")
    spent = {"wall_seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - used}
    noted = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    before = noted.get(folder.name, {})
    noted[folder.name] = {key: round(before.get(key, 0) + value, 1) for key, value in spent.items()}
    write_atomically(times, json.dumps(noted, indent=1) + "\n")
    total = sum(row["processor_seconds"] for row in noted.values())
    print(f"{folder.name}: {spent['processor_seconds'] / 60:.1f} processor minutes; all so far: {total / 60:.1f}")
    return code


def call(program: str, *arguments: str) -> int:
    """Run a program of this checkout with this Python; returns its exit code."""
    return subprocess.run([sys.executable, str(ROOT / program), *arguments], check=False).returncode


def processor_seconds() -> float:
    """Of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
