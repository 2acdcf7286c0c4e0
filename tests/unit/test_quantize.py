"""Codes and scales: the Triton kernels equal their torch definition, and what both compute."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import interpreted
from tests.helpers.ptx import global_accesses
from titan_muon.kernels import coding as codings
from titan_muon.kernels.coding import Coding, Search, search_of
from titan_muon.kernels.quantize import decode, decode_reference, encode, encode_reference

FORMATS = ("int8", "int4", "float8")
# Blocks of each tensor: part of a tile, whole tiles, several with a rest.
BLOCKS = (1, 32, 5, 40)


def coding_of(name: str, signed: bool, device: str = "cpu") -> Coding:
    """Return a coding with a map that is finer near zero, as torchao's are."""
    if name == "float8":
        return Coding(256)
    entries, block = (256, 256) if name == "int8" else (16, 128)
    qmap = torch.linspace(-1 if signed else 0, 1, entries) ** 3
    qmap = qmap.to(device)
    return Coding(block, qmap, (qmap[1:] + qmap[:-1]) / 2)


def middles_of(coding: Coding) -> Tensor:
    """Return the values halfway between two codes, for a block whose scale is 1."""
    if coding.middles is not None:
        return coding.middles.cpu()
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return (steps[1:] + steps[:-1]) / 2


def blocks_of(coding: Coding, signed: bool) -> Tensor:
    """Return blocks of every size, with what is special in some of them."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(sum(BLOCKS), coding.block, generator=generator)
    # Down to where numbers are denormal, or nothing beside the smallest scale.
    blocks *= torch.logspace(-42, 37, len(blocks)).view(-1, 1)
    blocks[3], blocks[10, 1:] = 0, 0
    blocks[5, 7] = float("nan")
    blocks[6, 1], blocks[6, 2] = float("inf"), -float("inf")
    blocks[7, 3], blocks[7, 4] = -float("nan"), float("inf")
    middles = middles_of(coding)
    # A quotient that is rounded otherwise falls on the other side of a middle.
    for row, scale in enumerate(torch.linspace(1, 2, 8), 20):
        blocks[row, : len(middles)] = middles * scale
        blocks[row, -1] = (448 if coding.qmap is None else 1) * scale
        blocks[row + 8] = -blocks[row]
    return blocks if signed else blocks.abs()


def parts_of(coding: Coding, device: str = "cpu", first: int = 0) -> list[Tensor]:
    """Return codes and scales that hold anything, NaN in the last tensor alone.

    Args:
        coding: Of the parts.
        device: Where.
        first: Byte of their memory at which codes begin.
    """
    generator = torch.Generator().manual_seed(1)
    width = coding.block // 2 if coding.packed else coding.block
    parts = []
    for number, count in enumerate(BLOCKS):
        codes = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
        if coding.qmap is None and number < len(BLOCKS) - 1:
            codes[codes & 127 == 127] = 3
        if count > 1:
            codes[0] = 200  # which encoding would not choose: the largest is not among them
        memory = torch.zeros(codes.numel() + first, dtype=torch.uint8, device=device)
        memory[first:] = codes.view(-1)
        scales = torch.rand(count, generator=generator).to(device)
        parts += memory[first:].view(codes.shape), scales
    return parts


def _equal(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(nan=0), want.nan_to_num(nan=0)
    )


def check_kernels(decode, encode, device="cpu"):
    """Compare with the torch definition, bit for bit but for which NaN it is."""
    for name, signed, only_changed in itertools.product(FORMATS, (True, False), (False, True)):
        case = name, signed, only_changed
        coding = coding_of(name, signed, device)
        # Codes that do not begin at a multiple of 16 bytes as well.
        got, want = parts_of(coding, device, 3 if signed else 0), parts_of(coding, device)
        before = decode_reference(want, coding)
        assert _equal(decode(got, coding), before), case
        values = blocks_of(coding, signed).to(device).view(-1)
        # Some blocks stay what they are: in the first tensor, within a tile, and almost.
        for block in (0, 2, 37, 35, 77):
            place = slice(block * coding.block, (block + 1) * coding.block)
            values[place] = before[place]
        values[35 * coding.block + 9] += 1
        given = values.clone()
        encode_reference(values, want, coding, only_changed)
        encode(values, got, coding, only_changed)
        assert _equal(values, given), case
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) if a.dtype == torch.uint8 else _equal(a, b), case
        assert _equal(decode(got, coding), decode_reference(want, coding)), case


def test_triton_kernels_equal_reference_in_the_interpreter():
    code = (
        "import test_quantize; from titan_muon.kernels import triton_quantize as kernels;"
        "test_quantize.check_kernels(kernels.decode, kernels.encode); print('equal')"
    )
    assert interpreted("-c", code) == "equal"


def maps_of(device: str = "cpu") -> dict[str, Tensor]:
    """Return the middles of every map: those of this file, of torchao, and unusual ones."""
    cases = list(itertools.product(("int8", "int4"), (True, False)))
    codings = {f"{name} {signed}": coding_of(name, signed, device) for name, signed in cases}
    if find_spec("torchao") is not None:
        from titan_muon.optim.quantized import Quantized

        none = torch.empty(0)
        for name, signed in cases:
            quantized = Quantized(none, none, (0,), name, signed)
            codings[f"torchao {name} {signed}"] = quantized.coding(torch.device(device))
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(31, generator=generator) * torch.logspace(-45, 20, 31)
    unusual = {
        "all the same": torch.full((15,), 0.3),
        "nothing but denormals": torch.linspace(-1e-42, 1e-42, 15),
        "zeros": torch.tensor([-0.5, -0.0, 0.0, 0.0, 0.5, 0.5, 1.0]),
        "far apart": spread.sort().values,
        "negative": torch.linspace(-3.0, -1.0, 15),
    }
    found = {name: coding.middles for name, coding in codings.items()} | unusual
    return {name: middles.to(device) for name, middles in found.items() if middles is not None}


def numbers_around(middles: Tensor, search: Search) -> Tensor:
    """Return each middle and edge of a bucket with its neighbours, and what is special."""
    count = len(search.starts) // 2
    edges = torch.arange(search.lowest, search.lowest + count + 1) << search.shift
    edges = edges.clamp(max=0x7F800000).to(torch.int32).view(torch.float32)
    infinity = torch.tensor(float("inf"))
    some = torch.cat([middles.cpu(), edges, torch.logspace(-45, 38, 400)])
    some = torch.cat(
        [f(some) for f in (torch.clone, lambda x: x.nextafter(infinity))]
        + [some.nextafter(-infinity)]
    )
    words = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    special = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    return torch.cat([some, -some, special, -special])


def check_search(nearest, device="cpu"):
    """Compare with torch's search, and see it fail with a step less."""
    for name, middles in maps_of(device).items():
        search = search_of(middles)
        values = numbers_around(middles, search)
        # Where bits might be lost on the way: both signs of a NaN are among them.
        assert (values.isnan() & values.signbit()).any()
        want = torch.bucketize(values, middles.cpu(), out_int32=True, right=True)
        assert (want[values.isnan()] == len(middles)).all()
        values = values.to(device)
        assert torch.equal(nearest(values, search).cpu(), want), name
        assert search.steps > 0, name
        fewer = search._replace(steps=search.steps - 1)
        assert not torch.equal(nearest(values, fewer).cpu(), want), name


def test_search_of_the_kernels_equals_torch_in_the_interpreter():
    code = (
        "import test_quantize; from tests.helpers.nearest import nearest;"
        "test_quantize.check_search(nearest); print('equal')"
    )
    assert interpreted("-c", code) == "equal"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_tables_are_no_larger_than_their_steps_need(steps, monkeypatch):
    monkeypatch.setattr(codings, "_STEPS", steps)
    for name, middles in maps_of().items():
        search = search_of(middles)
        if "int" in name:
            assert 0 < search.steps <= steps, name
            # Bytes; with each step more the largest table takes half of them.
            assert len(search.starts) <= (12288 >> steps if "int8" in name else 384), name
    # Equal middles are as many steps, whatever the table.
    assert search_of(torch.full((15,), 0.3)).steps == 15


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
class TestDefinition:
    def test_codes_are_the_nearest(self, name, signed):
        coding = coding_of(name, signed)
        (count,) = {256: (4,), 128: (8,)}[coding.block]
        values = torch.randn(1024, generator=torch.Generator().manual_seed(2))
        values = values if signed else values.abs()
        width = coding.block // 2 if coding.packed else coding.block
        parts = [torch.zeros(count, width, dtype=torch.uint8), torch.zeros(count)]
        encode(values, parts, coding)
        largest = values.view(count, -1).abs().amax(1)
        if coding.qmap is None:
            every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            every, largest = every[every.isfinite()], largest / 448
        else:
            every = coding.qmap
        assert torch.equal(parts[1], largest)
        distances = values.view(count, -1, 1) / largest.view(-1, 1, 1) - every
        error = decode(parts, coding).view(count, -1) / largest.view(-1, 1)
        error -= values.view(count, -1) / largest.view(-1, 1)
        # Two roundings of float32 at up to 448.
        torch.testing.assert_close(error.abs(), distances.abs().amin(-1), rtol=0, atol=1e-4)

    def test_unchanged_blocks_keep_their_bits(self, name, signed):
        coding = coding_of(name, signed)
        # Codes of which none need be the nearest of what they stand for.
        parts = parts_of(coding)[:-2]
        before = [part.clone() for part in parts]
        values = decode(parts, coding).view(-1, coding.block)
        values[-1, 0] = 5e4
        encode(values.view(-1), parts, coding, only_changed=True)
        for old, new in zip(before[:-2], parts[:-2], strict=True):
            assert torch.equal(old, new)
        for old, new in zip(before[-2:], parts[-2:], strict=True):
            assert torch.equal(old[:-1], new[:-1])
            assert not torch.equal(old[-1], new[-1])
        encode(values.view(-1), parts, coding)
        assert not torch.equal(before[3], parts[3])


def test_nothing_is_quantised_by_a_reciprocal():
    """The same scales on a CPU and on a GPU, where dividing by a number multiplies instead."""
    coding = coding_of("float8", True)
    largest = torch.linspace(1, 2, 1000)
    values = torch.zeros(1000, 256)
    values[:, 0] = largest
    parts = [torch.zeros(1000, 256, dtype=torch.uint8), torch.zeros(1000)]
    encode(values.view(-1), parts, coding)
    exact = (largest.double() / 448).float()
    assert torch.equal(parts[1], exact)
    assert not torch.equal(largest * torch.tensor(1 / 448), exact)


TYPES = {
    "tiles": "*i32", "pointers": "*i64", "values": "*fp32", "smallest": "fp32", "largest": "fp32",
}  # fmt: skip
MAPS = {
    "qmap": "*fp32", "middles": "*fp32", "starts": "*u8",
    "shift": "i32", "lowest": "i32", "buckets": "i32",
}  # fmt: skip


@pytest.mark.parametrize("only_changed", [True, False])
@pytest.mark.parametrize(("levels", "block"), [(8, 256), (4, 128), (0, 256)])
def test_codes_and_values_are_loaded_and_stored_in_vectors(levels, block, only_changed):
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_quantize as kernels

    types = {**TYPES, **(MAPS if levels else {})}
    shape = {"BLOCK": block, "ROWS": 2048 // block, "LEVELS": levels, "ALIGNED": True}
    constants = {**shape, "ONLY_CHANGED": only_changed, "STEPS": 1, **dict.fromkeys(MAPS)}
    # A thread has 16 values, and as many codes: 16 bytes, or 8 where two share one.
    codes = "v2.b32" if levels == 4 else "v4.b32"
    decoding = global_accesses(kernels._decode_kernel, types, constants)
    assert [a for a in decoding if a.startswith("st")] == ["st.global.v4.b32"] * 4
    assert [a for a in decoding if ".v" in a and a.startswith("ld")] == [f"ld.global.{codes}"]
    # Each value is looked up on its own; table and scales besides.
    assert sum(a == "ld.global.b32" for a in decoding) <= 8 + (16 if levels else 0)
    encoding = global_accesses(kernels._encode_kernel, types, constants)
    assert sorted(a for a in encoding if a.startswith("st")) == sorted(
        [f"st.global.{codes}", "st.global.b32"]
    )
    vectors = sorted(a for a in encoding if ".v" in a and a.startswith("ld"))
    read = [f"ld.global.{codes}"] if only_changed else []
    assert vectors == sorted(["ld.global.v4.b32"] * 4 + read)
    # A first code and as many middles as there are steps for each value.
    looked_up = 16 if levels else 0
    assert sum(a == "ld.global.b32" for a in encoding) <= 8 + looked_up * (1 + only_changed)
    assert [a for a in encoding if ".b8" in a] == ["ld.global.b8"] * looked_up
    assert not [a for a in decoding if ".b8" in a]
    assert not [a for a in decoding + encoding if ".b16" in a]
