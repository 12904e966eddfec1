"""Compile every Triton kernel, as the operators launch it, for GPUs that are not here. Run as a program without
TRITON_INTERPRET; prints one JSON line per kernel and target. `test_compile.py` judges them.

The launches are recorded from the operators themselves (on CPU tensors), so that this list cannot drift from the code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcore.kernels.triton import (
    common,
    coordinates,
    decode,
    depth,
    gather,
    lowrank,
    merge,
    planes,
    quantised,
    span_scores,
)
from kvcore.quant import pack, quantize

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Recorder:
    """Stands in for `common.launch`: keeps the launches instead of starting them."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, object, tuple, dict]] = []
        self.case = ""

    def __call__(self, kernel: object, grid: tuple, args: tuple, **meta: object) -> None:
        self.launches.append((self.case, kernel, args, meta))


def source(kernel: triton.JITFunction, args: tuple, meta: dict) -> tuple[ASTSource, dict]:
    """The kernel specialised to recorded arguments, and the compile options among the meta parameters."""
    options = {name: meta[name] for name in ("num_warps", "num_stages") if name in meta}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in meta:
            constants[(index,)] = meta[name]
            signature[name] = "constexpr"
            continue
        value = args[index]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            # Triton turns an argument of 1 into a constant; a stride of 1 is what makes loads wide
            signature[name] = "constexpr" if value == 1 else "i32" if value < 2**31 else "i64"
            if value == 1:
                constants[(index,)] = 1
            elif value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """Registers of a thread and bytes of register spills (stores and loads), as ptxas reports them."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    # the assembler that Triton itself takes from Hopper on
    if capability >= 90 and (ptxas.parent / "ptxas-blackwell").exists():
        ptxas = ptxas.parent / "ptxas-blackwell"
    architecture = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={architecture}", str(path), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", report).group(1)),
        "spills": sum(int(count) for count in re.findall(r"(\d+) bytes spill", report)),
    }


def record(dtype: torch.dtype, dim: int, bits: int) -> list[tuple[str, object, tuple, dict]]:
    """Launches of every operator at Llama-3-8B's shapes (32 query and 8 KV heads)."""
    recorder = Recorder()
    common.launch = recorder
    query = torch.zeros(1, 32, 1, dim, dtype=dtype)
    key = torch.zeros(1, 8, 2048, dim, dtype=dtype)
    mean, spans = key[:, :, :64], torch.ones(1, 64)
    bias = torch.zeros(1, 1, 1, 1, 2048)
    recorder.case = "decode"
    decode.decode_attention(query, key, key, 0.1, bias)
    recorder.case = "gather"
    gather.gather_attention(query, key, key, torch.zeros(1, 8, 32, dtype=torch.int32), 0.1, 16)
    recorder.case = "merge"
    merge.merge_stacked(torch.zeros(4, *query.shape), torch.zeros(4, 1, 32, 1), dtype)
    recorder.case = "span_scores"
    directions = key.new_zeros(1, 8, 64, 2, dim)
    span_scores.span_scores(query, mean, spans, 0.1, query, torch.ones(1, 32, 64), directions, torch.ones(32))
    recorder.case = "lowrank"
    factors, basis, gain = key.new_zeros(1, 8, 16, 64, 32), key.new_zeros(1, 8, 16, 32, dim), torch.ones(1, 8, 16, 32)
    lengths = torch.full((1, 8, 16), 64)
    lowrank.lowrank_attention(query, factors, basis, factors, basis, lengths, 0.1, gain, gain, bias[..., :16])
    recorder.case = "quantised"
    small = torch.zeros(1, 8, 256, dim)
    stored = [quantize(small, bits, 64, "tokens"), quantize(small, bits, 32 if dim % 64 else 64, "channels")]
    operands = [(x.codes, x.scale, x.zero) for x in stored]
    forms = [(x.bits, x.group_size) for x in stored]
    quantised.quantised_attention(query, operands[0], operands[1], forms[0], forms[1], 256, 0.1)
    recorder.case = "depth"
    codes = pack(torch.zeros(1, 1, 192, 1024, dtype=torch.uint8), bits)
    depth.packed_logits(query.new_zeros(1, 1, 32, 192), codes, bits, 1024)
    depth.packed_mix(query.new_zeros(1, 1, 32, 1024), codes, bits)
    recorder.case = "coordinates"
    coordinates.coordinate_logits(query[..., :32], codes.new_zeros(1, 8, 10, 2048), [8, 24], [4, 2], query[..., 0])
    recorder.case = "planes"
    if bits in (1, 2, 4):  # the widths of planes; rows are fp32 whatever the model's dtype
        packed, fields = torch.zeros(1, 1024, 208, dtype=torch.uint8), 8 // bits
        planes.plane_logits(torch.zeros(1, 32, 208), packed, bits)
        planes.plane_mix(torch.zeros(1, 32, 1024 * fields), packed, bits)
    return recorder.launches


def main(capabilities: list[int], forms: list[tuple[str, int, int]]) -> None:
    for name, dim, bits in forms:
        for case, kernel, args, meta in record(getattr(torch, name), dim, bits):
            specialised, options = source(kernel, args, meta)
            for capability in capabilities:
                row = {
                    "case": case,
                    "kernel": kernel.__name__,
                    "sm": capability,
                    "dtype": name,
                    "dim": dim,
                    "bits": bits,
                }
                try:
                    compiled = triton.compile(specialised, target=GPUTarget("cuda", capability, 32), options=options)
                    row |= {"shared": compiled.metadata.shared, **assembled(compiled.asm["ptx"], capability)}
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments["capabilities"], arguments["forms"])
