"""Every Triton kernel compiles for GPUs that are not here, within their shared memory and without register spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAPABILITIES = [80, 90, 100]
# Bytes of shared memory one block may use (CUDA programming guide, compute capabilities 8.0, 9.0, 10.0).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Bytes of spill stores and loads of one thread; 64 are 8 registers written and read once, outside the inner loop.
SPILL_LIMIT = 64
KERNELS = {
    "coordinate_kernel",
    "decode_kernel",
    "gather_kernel",
    "lowrank_kernel",
    "merge_kernel",
    "packed_logits_kernel",
    "packed_mix_kernel",
    "plane_logits_kernel",
    "plane_mix_kernel",
    "quantised_kernel",
    "span_scores_kernel",
}
BOUNDED = [["float16", 128, 4]]
DTYPES, DIMENSIONS = ("float32", "bfloat16", "float16"), (64, 80, 96, 128, 256)
# every dtype and head dimension with 4 bits; every other width in the usual form, the odd ones in the widest as well
WIDE = [[dtype, dim, 4] for dtype in DTYPES for dim in DIMENSIONS]
WIDE += [["bfloat16", 128, bits] for bits in (1, 2, 3, 5, 6, 7, 8)]
WIDE += [["float32", 256, bits] for bits in (3, 6, 8)] + [["float16", 256, 6], ["bfloat16", 64, 3]]


def compiled(forms: list[list]) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    request = json.dumps({"capabilities": CAPABILITIES, "forms": forms})
    program = Path(__file__).with_name("compile_targets.py")
    command = [sys.executable, str(program), request]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def judge(rows: list[dict]) -> None:
    failures = [
        row for row in rows if "error" in row or row["spills"] > SPILL_LIMIT or row["shared"] > SHARED_LIMIT[row["sm"]]
    ]
    assert not failures, "\n".join(map(json.dumps, failures))
    seen = {(row["kernel"], row["sm"]) for row in rows}
    assert seen == {(kernel, capability) for kernel in KERNELS for capability in CAPABILITIES}


def test_kernels_compile_for_every_target() -> None:
    pytest.importorskip("triton")
    judge(compiled(BOUNDED))


@pytest.mark.slow
def test_other_dtypes_dimensions_and_widths_compile() -> None:
    """With KVCORE_COMPILE_RESULTS=results/kernel_compile.json in the environment, what it finds is written there."""
    triton = pytest.importorskip("triton")
    rows = compiled(WIDE)
    if path := os.environ.get("KVCORE_COMPILE_RESULTS"):
        limits = {"spills": SPILL_LIMIT, "shared": SHARED_LIMIT}
        head = json.dumps({"triton": triton.__version__, "limits": limits})[:-1]
        body = ",\n ".join(map(json.dumps, rows))  # a row a line
        Path(path).write_text(f'{head}, "rows": [\n {body}\n]}}\n')
    judge(rows)


def test_the_judge_fails_on_spills_memory_and_errors() -> None:
    row = {"kernel": "decode_kernel", "sm": 80, "shared": 0, "spills": 0}
    for fault in ({"spills": SPILL_LIMIT + 1}, {"shared": SHARED_LIMIT[80] + 1}, {"error": "CompilationError"}):
        with pytest.raises(AssertionError, match="decode_kernel"):
            judge([row | fault])
