"""The limited process that runs one candidate program. Started by `sandbox.py`; standard library only.

Reads one JSON object from standard input: {"program", "cpu_seconds", "memory_bytes", "token"}. The first
line on file descriptor 3 says which protections the kernel accepted; the token follows on a second line only when the
program ran to its end, so a program that exits early does not pass.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import resource
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# refused: network, new processes and programs, signals, and whatever changes a file or folder
X86_64 = {
    "network": (41, 42, 43, 44, 49, 50, 53, 288, 425),
    "processes": (56, 57, 58, 59, 322, 435, 62, 200, 234, 424, 101, 310, 311, 272, 308, 165, 166),
    "files": (76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 258, 260, 263, 264, 265, 266, 268, 316, 437),
}
AARCH64 = {
    "network": (198, 199, 200, 201, 202, 203, 206, 242, 425),
    "processes": (220, 221, 281, 435, 129, 130, 131, 424, 117, 270, 271, 97, 268, 40, 39),
    "files": (34, 35, 36, 37, 38, 45, 46, 52, 53, 54, 55, 276, 437),
}
# machine: audit architecture, refused calls, (call, argument with its flags) of the ways to open a file
SECCOMP = {
    "x86_64": (0xC000003E, X86_64, ((2, 1), (257, 2))),
    "aarch64": (0xC00000B7, AARCH64, ((56, 2),)),
}
X32_CALLS = 0x40000000
EPERM_RESULT, ALLOW_RESULT, KILL_RESULT = 0x00050001, 0x7FFF0000, 0x80000000


def limit_resources(cpu_seconds: int, memory_bytes: int) -> list[str]:
    """CPU time, address space, file size, processes and core dumps; returns the names of the limits set."""
    limits = {
        "cpu": (resource.RLIMIT_CPU, cpu_seconds),
        "memory": (resource.RLIMIT_AS, memory_bytes),
        "file_size": (resource.RLIMIT_FSIZE, 0),
        "core": (resource.RLIMIT_CORE, 0),
        "processes": (resource.RLIMIT_NPROC, 0),
    }
    done = []
    for name, (kind, value) in limits.items():
        try:
            # the hard limit lies higher: the soft one ends the process with a signal of its own
            resource.setrlimit(kind, (value, value + 1 if name == "cpu" else value))
            done.append(name)
        except (ValueError, OSError):
            continue
    return done


def own_network_namespace(libc: ctypes.CDLL) -> bool:
    """Move into an empty network namespace."""
    return bool(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)


def seccomp_program(machine: str) -> list[bytes]:
    """The filter as BPF instructions: refused calls and opening a file for writing give EPERM, a foreign ABI kills."""
    architecture, calls, opens = SECCOMP[machine]
    load, jump_equal, jump_above, jump_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [
        step(load, 4),
        step(jump_equal, architecture, 1, 0),
        step(give, KILL_RESULT),
        step(load, 0),
        step(jump_above, X32_CALLS, 0, 1),
        step(give, KILL_RESULT),
    ]
    for number in sorted(number for group in calls.values() for number in group):
        program += [step(jump_equal, number, 0, 1), step(give, EPERM_RESULT)]
    for number, argument in opens:
        # skip the check unless it is this call; the accumulator holds the call's number again afterwards
        program += [
            step(jump_equal, number, 0, 4),
            step(load, 16 + 8 * argument),
            step(jump_bits, WRITING, 0, 1),
            step(give, EPERM_RESULT),
            step(load, 0),
        ]
    return [*program, step(give, ALLOW_RESULT)]


def seccomp_filter(libc: ctypes.CDLL) -> bool:
    """Have the kernel refuse the calls of `SECCOMP`, for good."""
    if platform.machine() not in SECCOMP:
        return False
    code = seccomp_program(platform.machine())
    instructions = ctypes.create_string_buffer(b"".join(code))
    program = ctypes.create_string_buffer(struct.pack("HL", len(code), ctypes.addressof(instructions)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def refuse_in_python() -> None:
    """Where the kernel accepts neither: sockets and programs are at least refused inside the interpreter."""

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError("not available to generated code")

    socket.socket = socket.create_connection = socket.socketpair = refused  # type: ignore[assignment, misc]
    for name in ("system", "fork", "forkpty", "execv", "execve", "kill", "killpg", "posix_spawn"):
        setattr(os, name, refused)
    builtins.exit = builtins.quit = refused  # type: ignore[assignment]


def main() -> None:
    """Set the limits, say which hold, run the program, report its end."""
    task = json.loads(sys.stdin.read())
    report = os.fdopen(3, "w")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    libc = ctypes.CDLL(None, use_errno=True)
    held = limit_resources(task["cpu_seconds"], task["memory_bytes"])
    held += ["network_namespace"] if own_network_namespace(libc) else []
    held += ["seccomp"] if seccomp_filter(libc) else []
    refuse_in_python()
    report.write(json.dumps([*held, "interpreter"]) + "\n")
    report.flush()
    exec(compile(task["program"], "candidate", "exec"), {"__name__": "candidate"})
    report.write(task["token"] + "\n")
    report.flush()


if __name__ == "__main__":
    main()
