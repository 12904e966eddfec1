"""Run a candidate program in a separate process with time, memory and network limits.

The process is a fresh interpreter (isolated mode, empty environment, empty working directory that is removed
afterwards). CPU time, address space and written bytes are limited by the kernel. Where it allows them, an empty
network namespace shuts the network, and a seccomp filter refuses sockets, new processes, signals and every change of a
file; the interpreter refuses the common ways in any case. This holds accidents, not a determined attacker: for
untrusted models use a container or a virtual machine too.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
STARTUP_SECONDS = 20.0


@dataclass(frozen=True)
class Limits:
    """Limits of one run.

    Attributes:
        seconds: wall-clock and CPU time of the program.
        memory_bytes: address space of the process.
    """

    seconds: float = 3.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        passed: the program ran to its end.
        result: `passed`, `timed out` or `failed`.
        enforced: protections that held: cpu, memory, file_size, core, processes, network_namespace, seccomp,
            interpreter (see `worker.py`).
    """

    passed: bool
    result: str
    enforced: tuple[str, ...]


def run_program(program: str, limits: Limits) -> Outcome:
    """Run Python source to its end or its limits.

    Raises:
        OSError: the interpreter cannot be started.
    """
    token = secrets.token_hex(16)
    task = json.dumps(
        {
            "program": program,
            "cpu_seconds": max(1, round(limits.seconds)),
            "memory_bytes": limits.memory_bytes,
            "token": token,
        }
    )
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(read_end, "r") as report:
        process = _start(write_end, folder)
        try:
            timed_out = _feed(process, task, limits.seconds)
        finally:
            _kill(process)
        lines = report.read().splitlines()
    enforced = tuple(json.loads(lines[0])) if lines else ()
    passed = not timed_out and len(lines) > 1 and lines[1] == token
    return Outcome(passed, "passed" if passed else "timed out" if timed_out else "failed", enforced)


def _start(write_end: int, folder: str) -> subprocess.Popen[bytes]:
    """The worker with `write_end` as its file descriptor 3, in its own session."""
    source = f"import os; os.dup2({write_end}, 3); import runpy; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_end,),
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
    finally:
        os.close(write_end)


def _feed(process: subprocess.Popen[bytes], task: str, seconds: float) -> bool:
    """Send the task and wait; whether the time ran out."""
    try:
        # the interpreter's own start is not the program's time; CPU time is limited by the kernel besides
        process.communicate(task.encode(), timeout=seconds + 1.0)
    except subprocess.TimeoutExpired:
        return True
    except BrokenPipeError:
        return False
    return process.returncode == -signal.SIGXCPU


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole session of the worker."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


def protection() -> tuple[str, ...]:
    """The protections that hold on this machine, found by running an empty program.

    Raises:
        RuntimeError: the limited process does not work here.
    """
    outcome = run_program("pass", Limits(seconds=STARTUP_SECONDS))
    if not outcome.passed:
        raise RuntimeError(
            f"the limited process for generated code does not run on this machine ({outcome.result}); humaneval needs "
            f"a POSIX system that can start {sys.executable}"
        )
    return outcome.enforced
