"""Products with packed codes in C equal those of the codes, integer ones bit for bit; without a compiler they are off
by name.

Legend: n byte rows, K coefficients, F fields of a byte, R rows of digits.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import OPERATORS, Operands, Shape, coordinates, depth
from tolerances import LOGITS, OUTPUT

from kvcore.kernels import backend_report, dispatch, native, reference, reference_compressed, torch_planes
from kvcore.quant import pack

needs_native = pytest.mark.skipif(native.off_reason() is not None, reason=f"native products: {native.off_reason()}")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Load anew inside the test, with a cache of its own, and forget it afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._loaded.cache_clear()
    yield tmp_path
    native._loaded.cache_clear()


@needs_native
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 18, 25, 64])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 5), (37, 64), (270, 65), (17, 200)])
def test_sums_are_exact(width: int, num_rows: int, n: int, count: int) -> None:
    packed = torch.randint(0, 256, (n, count), dtype=torch.uint8)
    fields = 8 // width
    codes = torch.stack([packed >> (f * width) & (2**width - 1) for f in range(fields)]).flatten(0, 1)
    digits = torch.randint(-127, 128, (num_rows, count + 9), dtype=torch.int8)[:, 4 : 4 + count]
    before = torch.randint(-99, 99, (num_rows, fields * n + 3), dtype=torch.int32)
    total = before.clone()
    native.add_plane_logits(total[:, 2:-1], digits, packed, width)
    assert torch.equal(total[:, 2:-1].long() - before[:, 2:-1], digits.long() @ codes.long().T)
    assert torch.equal(total[:, :2], before[:, :2])
    assert torch.equal(total[:, -1], before[:, -1])
    weights = torch.randint(-127, 128, (num_rows, fields * n), dtype=torch.int8)
    mixed = torch.zeros(num_rows, count, dtype=torch.int32)
    native.add_plane_mix(mixed, weights, packed, width)
    assert torch.equal(mixed.long(), weights.long() @ codes.long())


@needs_native
@pytest.mark.parametrize("length", [32, 99, 520])
@pytest.mark.parametrize("name", ["plane-logits", "plane-mix"])
def test_the_c_form_equals_the_torch_form(monkeypatch, name: str, length: int) -> None:
    build, public, _ = OPERATORS[name]
    args, _ = build(Operands(0, Shape(batch=1, length=length), torch.float32, "cpu"))
    found = public(*args)
    monkeypatch.setattr(torch_planes, "MOST_NATIVE_ROWS", 0)
    expected = public(*args)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def lines(num_tokens: int, count: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [1, 2, count, N] (a multiple of 8 tokens), and packed."""
    codes = torch.randint(0, 2**bits, (1, 2, count, -(-num_tokens // 8) * 8), dtype=torch.uint8)
    return codes, pack(codes, bits)


@needs_native
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("num_rows", [1, 4, 7, 13])
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (66, 5), (520, 64), (2500, 67)])
def test_products_with_packed_lines(bits: int, num_rows: int, num_tokens: int, count: int) -> None:
    codes, packed = lines(num_tokens, count, bits)
    rows, weights = torch.randn(1, 2, num_rows, count), torch.randn(1, 2, num_rows, num_tokens)
    used = codes[..., :num_tokens].double()
    logits, mixed = native.packed_logits(rows, packed, bits, num_tokens), native.packed_mix(weights, packed, bits)
    largest = 2.0**bits
    torch.testing.assert_close(logits.double(), rows.double() @ used, rtol=1e-5, atol=1e-5 * largest)
    torch.testing.assert_close(mixed.double(), weights.double() @ used.mT, rtol=1e-5, atol=1e-4 * largest)


@needs_native
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    _, packed = lines(9000, 40, 6)
    rows, weights = torch.randn(1, 2, 9, 40), torch.rand(1, 2, 9, 9000)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append((native.packed_logits(rows, packed, 6, 9000), native.packed_mix(weights, packed, 6)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("length", [1, 65, 257, 8193])
@pytest.mark.parametrize(("bits", "joint"), [((8, 4, 3), True), ((16, 2), False), ((5, 1, 6), True)])
def test_depth_attention_equals_its_reference(dtype, length: int, bits: tuple[int, ...], joint: bool) -> None:
    """The public function, with fully hidden rows, padded lines and residuals, in the products in C."""
    shape = Shape(batch=1 if length > 500 else 2, length=length, group=3, queries=2)
    args, options = depth(bits, joint)(Operands(length, shape, dtype, "cpu"))
    assert dispatch.use_native(args[0])
    found, wanted = (f(*args, **options) for f in (dispatch.depth_attention, reference_compressed.depth_attention))
    torch.testing.assert_close(found[0], wanted[0], **OUTPUT[dtype])
    torch.testing.assert_close(found[1], wanted[1], **LOGITS[dtype])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("length", [0, 1, 63, 65, 1000, 8193])
@pytest.mark.parametrize("parts", [[(6, 4), (28, 2)], [(37, 8)], [(4, 2)]], ids=str)
def test_coordinate_logits_equal_their_reference(dtype, length: int, parts: list[tuple[int, int]]) -> None:
    args, _ = coordinates(parts)(Operands(length, Shape(length=length, group=5, queries=2), dtype, "cpu"))
    assert dispatch.use_native(args[0])
    found, wanted = dispatch.coordinate_logits(*args), reference_compressed.coordinate_logits(*args)
    torch.testing.assert_close(found, wanted, **LOGITS[dtype])
    wider = torch.full((*wanted.shape[:3], length + 9), 7.0)
    dispatch.coordinate_logits(*args, out=wider[..., 4 : length + 4])
    assert torch.equal(wider[..., 4 : length + 4], found)
    assert (wider[..., :4] == 7).all() and (wider[..., length + 4 :] == 7).all()


@needs_native
@pytest.mark.parametrize("length", [1, 64, 1000])
def test_segment_sums_equal_their_reference(length: int) -> None:
    values = torch.randn(2, 3, 2, length)
    starts = torch.randint(0, length + 1, (2, 40)).sort(dim=1).values  # runs of every length, empty ones among them
    found, wanted = dispatch.segment_sums(values, starts), reference.segment_sums(values, starts)
    torch.testing.assert_close(found, wanted, **OUTPUT[torch.float32])
    with pytest.raises(ValueError, match="do not fit"):
        native.segment_sums(values, starts[:1])


@needs_native
def test_a_gradient_takes_the_path_that_has_one() -> None:
    args, _ = depth((4,), False)(Operands(0, Shape(length=40), torch.float32, "cpu"))
    gradients = []
    for function in (dispatch.depth_attention, reference_compressed.depth_attention):
        query = args[0].clone().requires_grad_()
        function(query, *args[1:])[0].square().sum().backward()
        gradients.append(query.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("n", "sizes"), [(1, (1,)), (3, (70, 5)), (24, (64, 65, 128))])
def test_codes_are_exact_and_land_in_their_place(width: int, n: int, sizes: tuple[int, ...]) -> None:
    packed = torch.randint(0, 256, (2, n, sum(sizes)), dtype=torch.uint8)
    fields, place = 8 // width, 8 - width
    codes = torch.stack([packed >> (f * width) & (2**width - 1) for f in range(fields)], dim=1).flatten(1, 2)
    total = torch.zeros(2, fields * n - 1, sum(sizes) + 3 * len(sizes), dtype=torch.uint8)
    expected, runs, start, first = total.clone(), [], 0, 0
    for index, size in enumerate(sizes):  # every run leaves three columns alone
        shift = place if index % 2 else 0
        expected[..., start : start + size] = codes[:, : total.shape[1], first : first + size] << shift
        runs.append((start, size, shift))
        start, first = start + size + 3, first + size
    native.add_plane_codes(total, packed, width, runs)
    assert torch.equal(total, expected)


@needs_native
def test_what_does_not_fit_is_refused() -> None:
    packed, digits = torch.zeros(8, 6, dtype=torch.uint8), torch.zeros(2, 6, dtype=torch.int8)
    with pytest.raises(ValueError, match="do not fit"):
        native.add_plane_logits(torch.zeros(2, 31, dtype=torch.int32), digits, packed, 2)
    with pytest.raises(ValueError, match="no lines of 3 bits"):
        native.packed_mix(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 6, 4, dtype=torch.uint8), 3)
    codes, query = torch.zeros(1, 1, 4, 9, dtype=torch.uint8), torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="do not fit queries"):
        native.coordinate_logits(query, codes, [(6, 4)], query[..., 0])
    with pytest.raises(ValueError, match="equal distances"):
        native.coordinate_logits(query, codes, [(8, 4)], query[..., 0], torch.zeros(1, 3, 1, 9)[:, ::2])
    with pytest.raises(ValueError, match="side by side"):
        native.add_plane_logits(torch.zeros(32, 2, dtype=torch.int32).T, digits, packed, 2)
    for shape, run in (((1, 33, 6), (0, 6, 0)), ((1, 32, 5), (0, 6, 0)), ((1, 32, 6), (0, 6, 7))):
        with pytest.raises(ValueError, match="do not fit"):
            native.add_plane_codes(torch.zeros(shape, dtype=torch.uint8), packed[None], 2, [run])
    with pytest.raises(ValueError, match="side by side"):
        native.add_plane_codes(torch.zeros(1, 6, 32, dtype=torch.uint8).mT, packed[None], 2, [(0, 6, 0)])


def test_the_report_says_when_there_is_but_one_thread(monkeypatch) -> None:
    library = SimpleNamespace(lines_parallel=lambda: 0)
    monkeypatch.setattr(native, "_loaded", lambda: (library, "on"))
    report = backend_report()
    assert report["cpu products in C"] == "on"
    assert report["threads in C"].startswith("off: torch brings no OpenMP library")


def test_off_by_choice_without_a_compiler_and_with_a_broken_one(monkeypatch, fresh) -> None:
    monkeypatch.setenv("KVCORE_NATIVE", "0")
    assert native.off_reason() == "KVCORE_NATIVE=0"
    report = backend_report()
    assert report["cpu products in C"] == report["threads in C"] == "off: KVCORE_NATIVE=0"
    with pytest.raises(RuntimeError, match="KVCORE_NATIVE=0"):
        native.add_plane_mix(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), 4)
    with pytest.raises(RuntimeError, match="KVCORE_NATIVE=0"):
        native.packed_mix(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 4, dtype=torch.uint8), 4)
    with pytest.raises(RuntimeError, match="KVCORE_NATIVE=0"):
        native.add_plane_codes(torch.zeros(1, 8, 1), torch.zeros(1, 1, 1), 1, [(0, 1, 0)])
    monkeypatch.setenv("KVCORE_NATIVE", "1")
    monkeypatch.setattr(native.platform, "system", lambda: "Linux")
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native._loaded.cache_clear()
    assert "no C compiler" in str(native.off_reason())
    broken = fresh / "cc"
    broken.write_text("#!/bin/sh\necho cannot compile >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(broken))
    native._loaded.cache_clear()
    assert "cannot compile" in str(native.off_reason())
    assert not list((fresh / "kvcore").glob("*.so"))
    build, public, _ = OPERATORS["plane-logits"]
    args, _ = build(Operands(0, Shape(batch=1, length=32), torch.float32, "cpu"))
    assert public(*args).shape[-1] == 32


@needs_native
def test_built_once_and_found_again(fresh) -> None:
    assert native.off_reason() is None
    (built,) = (fresh / "kvcore").glob("products-*.so")
    stamp = built.stat().st_mtime_ns
    native._loaded.cache_clear()
    assert native.off_reason() is None
    assert [p.stat().st_mtime_ns for p in (fresh / "kvcore").iterdir()] == [stamp]
