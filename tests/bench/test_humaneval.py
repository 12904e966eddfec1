"""HumanEval: consent, the limited process, completions; golden on genuine problems."""

from __future__ import annotations

import gzip
import json
import sys

import pytest
from shared_data import shared

from kvcore.bench.base import build_bench
from kvcore.bench.humaneval.data import prompts
from kvcore.bench.humaneval.sandbox import Limits, protection, run_program
from kvcore.bench.humaneval.scoring import check, completion_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limited process needs Linux's limits")
PROBLEM = {
    "task_id": "Test/0",
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
QUICK = Limits(seconds=10.0)


def kernel_filter():
    return "seccomp" in protection()


def make(tmp_path, **options):
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    return build_bench("humaneval", data_dir=str(tmp_path), **options)


def test_nothing_runs_without_consent(tmp_path):
    bench = make(tmp_path)
    with pytest.raises(PermissionError, match=r"allow_code_execution=true"):
        bench.check()
    with pytest.raises(PermissionError, match="nothing is run"):
        bench.score(None, "    return a + b\n")


def test_pass_and_fail(tmp_path, tiny_backbone):
    bench = make(tmp_path, allow_code_execution=True, timeout_seconds=10)
    bench.check()
    (sample,) = bench.samples(tiny_backbone)
    assert (sample.context, sample.question, sample.chat) == ("", PROBLEM["prompt"], False)
    assert bench.score(sample, PROBLEM["canonical_solution"]) == {"pass@1": 100.0}
    assert bench.score(sample, "    return a - b\n") == {"pass@1": 0.0}
    assert bench.score(sample, "") == {"pass@1": 0.0}
    assert bench.score(sample, "    return a + b\n\ndef broken(:") == {"pass@1": 100.0}, "cut at the official stops"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "assert 1 == 2",
        "x = bytearray(4 << 30)",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import os; os.system('true')",
        "def f(:",
    ],
)
def test_programs_that_must_not_pass(program):
    assert run_program(program, QUICK).result == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "import _socket; _socket.socket()",
        "import posix; posix.fork()",
        "import os; os.remove({keep!r})",
        "import posix; posix.rename({keep!r}, {keep!r} + 'x')",
        "open({keep!r}, 'w')",
        "open({keep!r}, 'r+')",
        "import os; os.open({keep!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.mkdir({keep!r} + 'd')",
        "import os, signal; os.kill(os.getppid(), 0)",
        "import _posixsubprocess, os; import subprocess; subprocess.run(['true'])",
    ],
)
def test_the_kernel_refuses_files_processes_and_network(program, tmp_path):
    if not kernel_filter():
        pytest.skip("this kernel does not accept a seccomp filter")
    keep = tmp_path / "keep"
    keep.write_text("kept")
    # the exception is caught, so only the refusal itself is seen
    body = program.format(keep=str(keep))
    assert run_program(body, QUICK).result == "failed"
    assert keep.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_runs_out(program):
    assert run_program(program, Limits(seconds=1.0)).result == "timed out"


def test_what_honest_programs_need_works(tmp_path):
    program = "import math, re, hashlib, collections, itertools, typing\nprint('hi')\nassert math.gcd(4, 6) == 2"
    outcome = run_program(program, QUICK)
    assert outcome.passed
    assert {"cpu", "memory", "file_size", "interpreter"} <= set(outcome.enforced)


def test_completions():
    stops = prompts()["stop"]
    assert completion_of("    return 1\ndef other():", "", "f", stops) == "    return 1"
    assert completion_of("    return 1\nprint(f())", "", "f", stops) == "    return 1"
    answer = "Sure!\n```python\ndef f():\n    return 1\n```\nDone."
    assert completion_of(answer, "", "f", stops) == "\ndef f():\n    return 1\n"
    assert completion_of("```\n    return 1\n```", "", "f", stops) == "    return 1\n"
    assert completion_of("<think>def f</think>    return 1", "", "f", stops) == "    return 1"


@pytest.mark.parametrize("options", [{"timeout_seconds": 0}, {"memory_mib": 1}, {"max_new_tokens": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=r"bench\.humaneval needs"):
        build_bench("humaneval", **options)


# --- golden: genuine problems ---


def test_genuine_problems_pass_with_their_solutions_and_fail_without():
    with gzip.open(shared("humaneval/HumanEval.jsonl.gz"), "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    assert len(problems) == 164
    for problem in problems[:6]:
        assert check(problem, problem["canonical_solution"], QUICK).passed, problem["task_id"]
        assert not check(problem, "    return None\n", QUICK).passed, problem["task_id"]
