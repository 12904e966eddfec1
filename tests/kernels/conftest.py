"""Fixtures of the kernel tests: the paths, the device, and memory that starts as NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcore.kernels import dispatch
from kvcore.kernels.backend import interpreted, triton_off_reason


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path that the public functions take: `triton` natively on a GPU, or in the interpreter if it is on."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "use_triton", lambda query: False)
        monkeypatch.setattr(dispatch, "use_native", lambda *inputs: False)  # test_native.py runs the products in C
    elif triton_off_reason() is not None:
        pytest.skip(f"Triton kernels cannot run in this process ({triton_off_reason()}); test_interpreter.py runs them")
    return request.param


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh floating-point memory holds NaN, so that an output that is not written fails."""

    def poisoned(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def skip_bf16_in_interpreter(dtype: torch.dtype, path: str) -> None:
    if path == "triton" and interpreted() and dtype == torch.bfloat16:
        pytest.skip("the Triton interpreter has no bf16 arithmetic (triton-lang/triton#5424)")
