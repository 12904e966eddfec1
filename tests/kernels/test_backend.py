"""The choice of the path: imports without Triton (K1), the reason is given once, operators are visible to the compiler,
launches are tuned only when asked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcore.kernels import backend, backend_report, dispatch, ops

WITHOUT_TRITON = """
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'triton':
            raise ModuleNotFoundError(f"No module named '{name}'", name='triton')
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == 'triton' else real(name, package)
sys.meta_path.insert(0, Hidden())
import torch
import kvcore.kernels as kernels
import kvcore.cache, kvcore.method
assert 'triton' not in sys.modules
assert kernels.backend_report()['triton'] == 'off: triton is not installed', kernels.backend_report()
query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 10, 64)
output, lse = kernels.decode_attention(query, key, key, 0.125)
assert output.isfinite().all() and lse.isfinite().all()
"""


def test_works_without_triton_and_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: True)  # lets CPU tensors pass the device check
    monkeypatch.setattr(backend, "triton_off_reason", lambda: "this test hides it")
    monkeypatch.setattr("kvcore.log._said", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not backend.use_triton(torch.zeros(1, 1, 1, 64))
    assert [record.message for record in caplog.records if "this test hides it" in record.message] == [
        "Triton kernels are off, attention takes the torch path: this test hides it"
    ]


def test_cpu_tensors_never_go_to_triton() -> None:
    if not backend.interpreted():
        assert not backend.use_triton(torch.zeros(1, 1, 1, 64))


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (torch.zeros(1, 1, 1, 64, dtype=torch.float64), "float64"),
        (torch.zeros(1, 1, 17, 64), "17 query tokens"),
        (torch.zeros(1, 1, 1, 512), "head dimension 512"),
    ],
)
def test_what_triton_does_not_take_is_named(query: torch.Tensor, reason: str) -> None:
    found = backend._call_off_reason(query)
    assert found is not None and reason in found


def test_report_names_every_path() -> None:
    for state in backend_report().values():
        assert state.startswith("on") or state.startswith("off: ")


def test_operators_have_fake_implementations() -> None:
    """Shapes and dtypes are known without running anything (`torch.compile`, graph capture)."""
    with FakeTensorMode():
        query = torch.empty(2, 6, 3, 64, dtype=torch.float16)
        key = torch.empty(2, 2, 50, 64, dtype=torch.float16)
        output, lse = ops.decode_attention(query, key, key, 0.1, None)
        assert (output.shape, output.dtype, lse.shape, lse.dtype) == (
            (2, 6, 3, 64),
            torch.float16,
            (2, 6, 3),
            torch.float32,
        )
        index = torch.empty(2, 2, 5, dtype=torch.int64)
        assert ops.gather_attention(query, key, key, index, 0.1, 4, None)[0].shape == query.shape
        coarse, score = ops.span_scores(query, key, torch.empty(2, 50), 0.1, None, None, None, None)
        assert coarse.shape == score.shape == (2, 6, 3, 50)
        spans = (torch.empty(2, 2, 7, 20, 8), torch.empty(2, 2, 7, 8, 64))
        lengths = torch.empty(2, 2, 7, dtype=torch.int64)
        assert ops.lowrank_attention(query, *spans, *spans, lengths, 0.1, None, None, None)[0].shape == query.shape
        merged = ops.merge_states(torch.empty(4, 2, 6, 3, 64), torch.empty(4, 2, 6, 3))
        assert merged[0].shape == query.shape
        codes = torch.empty(2, 1, 30, 64, dtype=torch.uint8)
        assert ops.packed_logits(torch.empty(2, 1, 18, 30), codes, 4, 120).shape == (2, 1, 18, 120)
        assert ops.packed_mix(torch.empty(2, 1, 18, 120), codes, 4).shape == (2, 1, 18, 30)
        parts = [torch.empty(1), torch.empty(1), torch.empty(1)]
        assert ops.quantised_attention(query, parts, parts, [4, 32], [4, 32], 50, 0.1, None)[0].shape == query.shape


def test_compiled_code_sees_through_the_public_functions() -> None:
    query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 10, 64)

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return dispatch.decode_attention(q, k, k, 0.125)[0] * 2

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), step(query, key))


def test_tuning_measures_once_and_never_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kvcore.kernels.triton import common

    slow, fast = common.Config(32, 1), common.Config(64, 2)
    monkeypatch.setattr(common, "_chosen", {})
    calls: list[common.Config] = []
    assert common.tuned("key", [slow, fast], calls.append, torch.device("cpu")) == slow
    assert calls == []

    def bench(run: object, warmup: int, rep: int) -> float:
        run()
        return {32: 2.0, 64: 1.0}[calls[-1].block]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(common.triton.testing, "do_bench", bench)
    gpu = torch.device("cuda")
    assert common.tuned("key", [slow, fast], calls.append, gpu) == fast
    assert common.tuned("key", [slow, fast], calls.append, gpu) == fast
    assert calls == [slow, fast]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert common.tuned("other", [slow, fast], calls.append, gpu) == slow
