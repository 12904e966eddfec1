"""Without a GPU the Triton kernels run in the interpreter, in a process of their own: the switch acts at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# A bounded set: the interpreter takes about a tenth of a second for each program of a launch.
SELECTED = (
    "triton and (dtypes or empty or masked or merg or (gradients and decode) or random"
    " or (lengths and 257 and (decode or depth)) or sixteen or (head_dimensions and 256))"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present: test_operators.py runs the kernels natively")
@pytest.mark.parametrize(
    ("file", "selected"),
    [(HERE / "test_operators.py", SELECTED), (HERE.parent / "freqdepth/test_codes.py", "products")],
)
def test_kernels_match_the_reference_in_the_interpreter(file: Path, selected: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run([*command, "-k", selected], env=environment, capture_output=True, text=True, cwd=HERE)
    print(result.stdout[-3000:])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
