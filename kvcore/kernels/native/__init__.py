"""Products with packed codes in C, for CPUs: built once per machine with the C compiler found there, never needed.

Without a compiler, on another processor or with `KVCORE_NATIVE=0` the callers take their torch path: the same sums.

planes.c         exact integer products with planes whose bytes lie coefficient by coefficient, and their codes
plane_floats.c   fp32 products of a few rows with such planes (called from `plane_floats.py`)
digits.c         rows as the integers that the products with planes take (called from `digits.py`)
lines.c          fp32 products with lines packed by `kvcore.quant.pack`, whose bytes lie token by token
coordinates.c    fp32 products with tokens kept as a few coordinates, a byte per token and line
segments.c       sums of runs of neighbours

Legend: n byte rows of a plane, K coefficients, F = 8 / width fields of a byte, R rows; B batch, Hc coefficient heads,
Hkv KV heads, N tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))
# without contraction a product is rounded before it is added to, as in torch, where the source does not ask for more
_FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
_BUILD_SECONDS = 60


@lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    if os.environ.get("KVCORE_NATIVE", "1") == "0":
        return None, "KVCORE_NATIVE=0"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, f"no form for {platform.system()} on {platform.machine()}"
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) is installed"
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except subprocess.SubprocessError as error:
        stderr = getattr(error, "stderr", b"") or b""
        return None, f"{compiler} failed: {stderr.decode(errors='replace').strip()[-200:] or error}"
    except OSError as error:
        return None, f"the library cannot be built or loaded: {error}"
    if not (library.plane_supported() and library.lines_supported()):
        return None, "the processor has no AVX-512 VNNI"
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for function in (library.plane_logits, library.plane_mix):
        function.argtypes = [pointer, count, count, ctypes.c_int, pointer, count, count, pointer, count]
    library.plane_codes.argtypes = [pointer, count, count, count, ctypes.c_int, pointer, count, pointer, count, count]
    library.plane_codes.restype = None
    for function in (library.plane_dot, library.plane_sum):
        function.argtypes = [pointer, count, pointer, pointer, pointer, *[count] * 6, pointer, count, pointer, count]
    library.plane_digits.argtypes = [pointer, *[count] * 3, pointer, count, ctypes.c_int, pointer, pointer]
    library.line_digits.argtypes = [pointer, *[count] * 6, ctypes.c_int, pointer, pointer]
    lines = (pointer, ctypes.c_int, count, count, count, pointer, count)
    library.lines_logits.argtypes = [*lines, pointer, ctypes.c_int]
    library.lines_mix.argtypes = [*lines, count, pointer, ctypes.c_int]
    coordinates = (pointer, pointer, count, count, count, pointer, pointer)
    library.coordinate_logits.argtypes = [*coordinates, count, pointer, count, ctypes.c_int]
    library.segment_sums.argtypes = [pointer, count, count, count, pointer, count, pointer]
    library.segment_sums.restype = None
    library.lines_tiles.argtypes = [count]
    library.lines_tiles.restype = count
    return library, "on"


def _built(compiler: str) -> Path:
    """The shared library of these sources, built when the user's cache does not hold it."""
    source = b"".join(path.read_bytes() for path in _SOURCES)
    name = hashlib.sha256(source + " ".join((compiler, *_FLAGS)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcore"
    library = folder / f"products-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # several processes may build at once: the last one stays
        fresh = Path(work) / library.name
        command = [compiler, *_FLAGS, "-o", str(fresh), *(str(path) for path in _SOURCES if path.suffix == ".c")]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)
        os.replace(fresh, library)
    return library


def one_thread_reason() -> str | None:
    """Why the products that could use several threads do not; None when they do, or are not available at all."""
    library, _ = _loaded()
    if library is None or library.lines_parallel():
        return None
    return "torch brings no OpenMP library with GOMP_parallel"


def off_reason() -> str | None:
    """Why the products are not available in this process; None when they are."""
    library, reason = _loaded()
    return None if library is not None else reason


def add_plane_logits(total: Tensor, digits: Tensor, packed: Tensor, width: int) -> None:
    """Add `digits @ codesᵀ` to `total`: int32 [R, F * n], int8 [R, K], uint8 [n, K]."""
    _call("plane_logits", total, digits, packed, width)


def add_plane_mix(total: Tensor, digits: Tensor, packed: Tensor, width: int) -> None:
    """Add `digits @ codes` to `total`: int32 [R, K], int8 [R, F * n], uint8 [n, K]."""
    _call("plane_mix", total, digits, packed, width)


def _call(name: str, total: Tensor, digits: Tensor, packed: Tensor, width: int) -> None:
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(f"native products are off: {reason}")
    (num_rows, num_sums), (rows, coefficients), fields = total.shape, packed.shape, 8 // width
    inner, outer = (coefficients, fields * rows) if name == "plane_logits" else (fields * rows, coefficients)
    if digits.shape != (num_rows, inner) or num_sums != outer:
        raise ValueError(
            f"{name}: digits {tuple(digits.shape)} and sums {tuple(total.shape)} do not fit codes "
            f"{tuple(packed.shape)} of {width} bits"
        )
    if not (packed.is_contiguous() and digits.stride(1) == 1 and total.stride(1) == 1):
        raise ValueError(f"{name}: entries of a row must lie side by side")
    failed = getattr(library, name)(
        packed.data_ptr(), rows, coefficients, width, digits.data_ptr(), digits.stride(0), num_rows,
        total.data_ptr(), total.stride(0),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"{name}: no memory for the rows of digits")


def add_plane_codes(total: Tensor, packed: Tensor, width: int, runs: Sequence[tuple[int, int, int]]) -> None:
    """Add a plane's codes to `total`, whose bits there are 0: uint8 [B, M, R], uint8 [B, n, K], M at most F * n.

    Args:
        total: codes.
        packed: the plane.
        width: bits of its fields.
        runs: (first coefficient in `total`, coefficients, place) of the plane's coefficients, in order.
    """
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(f"native unpacking is off: {reason}")
    (batch, num_tokens, stride), (planes, rows, coefficients) = total.shape, packed.shape
    fits = planes == batch and num_tokens <= 8 // width * rows and sum(run[1] for run in runs) == coefficients
    if not fits or any(start < 0 or start + size > stride or place + width > 8 for start, size, place in runs):
        raise ValueError(f"runs {runs} of codes {tuple(packed.shape)} of {width} bits do not fit {tuple(total.shape)}")
    if not (packed.is_contiguous() and total.is_contiguous() and packed.dtype == total.dtype == torch.uint8):
        raise ValueError("plane_codes: codes are bytes that lie side by side")
    table = (ctypes.c_int64 * (3 * len(runs)))(*(number for run in runs for number in run))
    library.plane_codes(
        packed.data_ptr(), batch, rows, coefficients, width, table, len(runs), total.data_ptr(), num_tokens, stride
    )


def packed_logits(rows: Tensor, codes: Tensor, bits: int, num_tokens: int) -> Tensor:
    """See `torch_compressed.packed_logits`; sums are fp32, on as many threads as torch uses."""
    batch, streams, num_rows, num_coefficients = rows.shape
    library, eighth = _lines(rows, codes, bits)
    rows, codes = rows.float().contiguous(), codes.contiguous()
    logits = torch.empty(batch, streams, num_rows, 8 * eighth)
    failed = library.lines_logits(
        codes.data_ptr(), bits, batch * streams, num_coefficients, eighth, rows.data_ptr(), num_rows,
        logits.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("packed_logits: no memory for a tile")
    return logits[..., :num_tokens]


def packed_mix(weights: Tensor, codes: Tensor, bits: int) -> Tensor:
    """See `torch_compressed.packed_mix`; sums are fp32, on as many threads as torch uses."""
    batch, streams, num_rows, num_tokens = weights.shape
    library, eighth = _lines(weights, codes, bits)
    weights, codes = weights.float().contiguous(), codes.contiguous()
    partial = torch.empty(batch, streams, library.lines_tiles(eighth), num_rows, codes.shape[2])
    failed = library.lines_mix(
        codes.data_ptr(), bits, batch * streams, codes.shape[2], eighth, weights.data_ptr(), num_rows, num_tokens,
        partial.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("packed_mix: no memory for a tile")
    return partial.sum(2)


def coordinate_logits(
    query: Tensor, codes: Tensor, parts: list[tuple[int, int]], offset: Tensor, out: Tensor | None = None
) -> Tensor:
    """See `dispatch.coordinate_logits`; on as many threads as torch uses."""
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(f"native products are off: {reason}")
    batch, heads, num_bytes, num_tokens = codes.shape
    fits = query.shape[3] == sum(dims for dims, _ in parts) and num_bytes == sum(d * bits // 8 for d, bits in parts)
    if not fits or codes.dtype != torch.uint8 or offset.shape != query.shape[:3]:
        raise ValueError(f"codes {codes.dtype} {tuple(codes.shape)} of {parts} do not fit queries {tuple(query.shape)}")
    query, offset, codes = query.float().contiguous(), offset.float().contiguous(), codes.contiguous()
    logits = torch.empty(*query.shape[:3], num_tokens) if out is None else out
    # one stride leads from line to line: rows of a larger tensor will do
    stride = logits.stride(2)
    if logits.shape != (*query.shape[:3], num_tokens) or logits.dtype != torch.float32 or logits.stride(3) != 1:
        raise ValueError(f"out {logits.dtype} {tuple(logits.shape)} is not fp32 {(*query.shape[:3], num_tokens)}")
    if logits.stride(1) != stride * query.shape[2] or logits.stride(0) != stride * query.shape[2] * query.shape[1]:
        raise ValueError(f"lines of out must lie at equal distances; received strides {logits.stride()}")
    table = (ctypes.c_int64 * (2 * len(parts)))(*(number for part in parts for number in part))
    failed = library.coordinate_logits(
        codes.data_ptr(), table, len(parts), batch * heads, num_tokens, query.data_ptr(), offset.data_ptr(),
        query.shape[1] // heads * query.shape[2], logits.data_ptr(), stride, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("coordinate_logits: no memory for a tile")
    return logits


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """See `reference.segment_sums`; values are fp32."""
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(f"native sums are off: {reason}")
    batch, num_entries, segments = values.shape[0], values.shape[-1], starts.shape[1] - 1
    if values.dtype != torch.float32 or starts.dtype != torch.int64 or starts.shape[0] != batch:
        raise ValueError(f"{values.dtype} values {tuple(values.shape)} and starts {tuple(starts.shape)} do not fit")
    values, starts = values.contiguous(), starts.contiguous()
    sums = torch.empty(*values.shape[:-1], segments)
    per_batch = sums[0].numel() // segments if segments else 0
    library.segment_sums(values.data_ptr(), batch, per_batch, num_entries, starts.data_ptr(), segments, sums.data_ptr())
    return sums


def _lines(rows: Tensor, codes: Tensor, bits: int) -> tuple[ctypes.CDLL, int]:
    """The library, and the bytes of an eighth of each line of codes uint8 [B, Hc, R, bytes]."""
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(f"native products are off: {reason}")
    if codes.shape[:2] != rows.shape[:2] or codes.dtype != torch.uint8 or codes.shape[-1] % bits:
        raise ValueError(
            f"codes {codes.dtype} {tuple(codes.shape)} are no lines of {bits} bits for rows {tuple(rows.shape)}"
        )
    return library, codes.shape[-1] // bits
