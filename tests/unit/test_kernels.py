"""The symmetric products: Triton's kernels interpreted on the CPU, and the rules around them."""

import itertools
import json
import sys

import pytest
import torch

from tests.helpers.interpreter import interpreted
from titan_muon.kernels import devices, reference, select_operations, tuning
from titan_muon.kernels.configurations import (
    CANDIDATES,
    HOPPER_LARGE,
    HOPPER_SMALL,
    Configuration,
    known_configuration,
    pointer_configuration,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


def test_kernels_interpreted():
    """The checks of tests/helpers/kernel_checks.py, where Triton was told to interpret."""
    assert interpreted("-m", "tests.helpers.kernel_checks") == "passed"


@needs_triton
@pytest.mark.parametrize(("ratio", "group"), [(1, 2), (1, 8), (2, 2), (2, 4), (2, 8)])
def test_tiles_cover_the_triangle_once(ratio, group):
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels.triton_tiles import rectangle_tile_of, tile_of

    for tile_rows in range(1, 40):
        want = sorted((i, j) for i in range(tile_rows) for j in range(i // ratio + 1))
        shape = Configuration("pointer", 16, 16 * ratio, 16, 4, 2, group)
        assert shape.tiles(16 * tile_rows) == shape.tiles(16 * tile_rows - 15) == len(want)
        got = [tile_of(index, tile_rows, group, ratio) for index in range(len(want))]
        assert sorted(got) == want
        columns = 41 - tile_rows
        count = shape.all_tiles(16 * tile_rows, 16 * ratio * columns)
        got = [rectangle_tile_of(index, tile_rows, columns, group) for index in range(count)]
        assert sorted(got) == [(i, j) for i in range(tile_rows) for j in range(columns)]


def test_neighbouring_tiles_share_operands():
    """Sixteen tiles in a row of the order read about as few operand rows as a square would."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels.triton_tiles import tile_of

    tiles = [tile_of(index, 64, 8, 1) for index in range(64 * 65 // 2)]
    for run in itertools.batched(tiles, 64) if sys.version_info >= (3, 12) else [tiles[-64:]]:
        assert len({i for i, _ in run} | {j for _, j in run}) <= 32


def test_reference_is_the_definition():
    generator = torch.Generator().manual_seed(0)
    a, c = torch.randn(2, 2, 5, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(reference.gram(x), x @ x.mT, **close)
    torch.testing.assert_close(
        reference.symmetric_product(a, a, c, alpha=2.0, beta=-3.0), 2 * a @ a - 3 * c, **close
    )
    torch.testing.assert_close(reference.symmetric_product(a, a, alpha=2.0), 2 * a @ a, **close)
    torch.testing.assert_close(
        reference.product(a, x, alpha=0.5, beta=4.0), 0.5 * a @ x + 4 * x, **close
    )
    # What beta = 0 does not read cannot make the result NaN.
    nan = torch.full_like(c, float("nan"))
    assert reference.symmetric_product(a, a, nan, alpha=2.0, out=nan.clone()).isfinite().all()
    with pytest.raises(AssertionError, match="without c"):
        reference.symmetric_product(a, a, beta=1.0)


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "missing", "message"),
    [
        (4096, torch.float16, CPU, None, "no Triton kernels on cpu"),
        (4096, torch.float16, torch.device("meta"), None, "no Triton kernels on meta"),
        (4096, torch.float32, CUDA, None, "no Triton kernels for float32"),
        (64, torch.float16, CUDA, None, "cuBLAS is faster below 256 rows, and these have 64"),
        (4096, torch.float16, CUDA, "triton", "triton is not installed"),
        (4096, torch.float16, CUDA, "capability", r"need compute capability 8.0, .* \(7, 5\)"),
        (4096, torch.float16, CUDA, "hip", "this is ROCm"),
    ],
)
def test_every_refusal_says_why(monkeypatch, rows, dtype, device, missing, message):
    devices.device_fault.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = (7, 5) if missing == "capability" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if missing == "triton":
        monkeypatch.setattr(devices, "find_spec", lambda _: None)
    if missing == "hip":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    ops = select_operations(rows, dtype, device)
    devices.device_fault.cache_clear()
    assert ops.name == "reference"
    assert not ops.half_cost
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(ops.why)


def test_a_modern_gpu_gets_the_kernels(monkeypatch):
    devices.device_fault.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(devices, "find_spec", lambda _: object())
    ops = select_operations(4096, torch.float16, CUDA)
    devices.device_fault.cache_clear()
    assert (ops.name, ops.half_cost) == ("triton", True)


def test_known_configurations():
    # 528 tiles of 128 x 128 a matrix: 4 matrices fill 132 multiprocessors exactly 16 times.
    assert known_configuration(4096, 4, torch.float16, (9, 0), 132) == HOPPER_SMALL
    # 1056 tiles of 128 x 256 fill them exactly 8 times, where the small ones take 16 longer waves.
    assert known_configuration(8192, 1, torch.float16, (9, 0), 132) == HOPPER_LARGE
    # 10 tiles a matrix leave most multiprocessors idle: smaller tiles.
    assert known_configuration(512, 4, torch.float16, (9, 0), 132).bm == 64
    assert known_configuration(4096, 4, torch.float16, (9, 0), 132).kernel == "hopper"
    assert known_configuration(4096, 4, torch.float32, (9, 0), 132).kernel == "pointer"
    assert known_configuration(4096, 4, torch.float16, (8, 0), 108).kernel == "pointer"
    assert known_configuration(4096, 4, torch.float16, (12, 0), 170) is None
    shapes = (
        *CANDIDATES,
        *(pointer_configuration(r, c) for r in (64, 4096) for c in ((8, 0), (9, 0), (12, 0))),
    )
    for shape in shapes:
        assert shape.kernel == "pointer"
        assert shape.bn % shape.bm == 0
        assert shape.group % shape.ratio == 0


def test_tuned_shapes_are_kept_on_disk(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="the key names its version")
    monkeypatch.setenv("TITAN_MUON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timed = []

    def fake_time(shape, *_):
        timed.append(shape)
        return -len(timed)

    monkeypatch.setattr(tuning, "_time", fake_time)

    def tuned(rows):
        tuning.tuned_configuration.cache_clear()
        return tuning.tuned_configuration(rows, 4096, 2, torch.float16, CUDA)

    assert tuned(1000) == CANDIDATES[-1]
    assert timed == list(CANDIDATES)
    # Another process, and another size of the same power of two: read, not timed.
    assert tuned(600) == CANDIDATES[-1]
    assert len(timed) == len(CANDIDATES)
    assert len(json.loads(tuning.cache_file().read_text())) == 1
    # A file that was cut short is replaced.
    tuning.cache_file().write_text('{"Some')
    tuned(1000)
    assert len(timed) == 2 * len(CANDIDATES)
    assert len(json.loads(tuning.cache_file().read_text())) == 1
    # Other users of a shared folder read it too, and no other file is left there.
    plain = tmp_path / "plain"
    plain.touch()
    assert tuning.cache_file().stat().st_mode == plain.stat().st_mode
    plain.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["launch_shapes.json"]
    # An entry is an index into these candidates.
    monkeypatch.setattr(tuning, "CANDIDATES", CANDIDATES[::-1])
    tuned(1000)
    assert len(timed) == 3 * len(CANDIDATES)
    tuning.tuned_configuration.cache_clear()


def test_a_user_without_home_keeps_no_tuned_shapes(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="the key names its version")

    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TITAN_MUON_CACHE_DIR", "")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_time", lambda *_: 1.0)
    monkeypatch.chdir(tmp_path)
    tuning.tuned_configuration.cache_clear()
    assert tuning.tuned_configuration(1000, 4096, 2, torch.float16, CUDA) == CANDIDATES[0]
    tuning.tuned_configuration.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="the key names its version")
    monkeypatch.setenv("TITAN_MUON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tuning.tuned_configuration.cache_clear()
    shape = tuning.tuned_configuration(4096, 4096, 2, torch.float16, CUDA)
    tuning.tuned_configuration.cache_clear()
    assert shape == pointer_configuration(4096, (12, 0))
    assert not tuning.cache_file().exists()
