"""Work in forked children that are killed: after some seconds, or at one of their file operations.

A fork of a warm process costs milliseconds where a new one costs the seconds of its imports, and SIGKILL ends either in
the same way.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from kvcore.cli import guard

# what Python announces before it does it (sys.addaudithook); a kill there leaves everything before it done
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree")


def in_child(
    work: Callable[[], object],
    kill_after: float | None = None,
    number: int = signal.SIGKILL,
    kill_at: int | None = None,
    folder: Path | None = None,
) -> int:
    """Run `work` in a forked child; returns the wait status.

    Args:
        work: what to run.
        kill_after: seconds after which the child is killed.
        number: signal of the kill.
        kill_at: file operation in `folder` at which the child is killed, counted from 1.
        folder: where file operations count.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # pytest's own streams and handlers are no part of the program
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends soon
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if kill_at is not None:
                sys.addaudithook(_counting(folder, lambda count: count == kill_at and os.kill(os.getpid(), number)))
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, number)
    return os.waitpid(child, 0)[1]


def _counting(folder: Path, reached: Callable[[int], object]) -> Callable[[str, tuple], None]:
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in OPERATIONS:
            return
        paths = [str(path) for path in arguments[: 2 if event == "os.rename" else 1]]
        # paths relative to an open folder (of `shutil.rmtree`) count as well
        if any(str(folder) in path or "/" not in path for path in paths):
            count += 1
            reached(count)

    return hook


def operations(work: Callable[[], object], folder: Path) -> int:
    """Number of file operations in `folder` of a whole run of `work`."""
    reader, writer = os.pipe()

    def counted() -> None:
        last = [0]
        sys.addaudithook(_counting(folder, lambda count: last.__setitem__(0, count)))
        work()
        os.write(writer, str(last[0]).encode())

    assert in_child(counted) == 0
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return int(pipe.read())


def killed(status: int, number: int) -> bool:
    """Whether the child was killed before it had ended."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def on_a_full_disk(work: Callable[[], object], size: int) -> Callable[[], object]:
    """`work` under a kernel that refuses to let files grow beyond `size` bytes, with the command line's messages."""

    def run() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return guard(lambda _: work())(OmegaConf.create({}))

    return run
