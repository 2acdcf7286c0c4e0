"""The kernels and the orthogonalizer on a GPU: accuracy in every dtype, determinism, capture."""

import pytest
import torch

from tests.helpers.kernel_checks import (
    DTYPES,
    check_divide,
    check_gram,
    check_nan_stays_in_its_matrix,
    check_product,
    inputs,
)
from tests.helpers.spectra import SPECTRA, matrix, relative_error
from titan_muon.kernels import reference, symmetric_matmul
from titan_muon.kernels.configurations import HOPPER_LARGE, HOPPER_SMALL, Configuration
from titan_muon.orthogonalization import explain, orthogonalize_batch, resolve_schedule

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
POINTER = Configuration("pointer", 64, 64, 64, 4, 4)
DEFAULT = resolve_schedule("polar_express")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pointer_kernel(dtype):
    for shape in ((1, 1, 1), (3, 200, 264), (2, 77, 33)):
        for x in inputs(*shape, dtype, "cuda"):
            check_gram(x, POINTER if dtype != torch.float32 else None)
    check_product(2, 200, dtype, "cuda", POINTER if dtype != torch.float32 else None)
    check_nan_stays_in_its_matrix("cuda", POINTER)


@needs_hopper
@pytest.mark.parametrize("shape", [HOPPER_LARGE, HOPPER_SMALL], ids=["large", "small"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_hopper_kernel(dtype, shape):
    for size in ((1, 64, 64), (3, 200, 264), (2, 520, 136), (5, 1024, 1000), (2, 1408, 2048)):
        for x in inputs(*size, dtype, "cuda")[:2]:
            check_gram(x, shape)
    for rows in (200, 520, 1408):
        check_product(3, rows, dtype, "cuda", shape)
    check_nan_stays_in_its_matrix("cuda", shape)


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tall", [False, True])
def test_hopper_product(dtype, tall):
    for batch, rows, columns in ((1, 64, 64), (3, 200, 264), (2, 1408, 2048), (2, 520, 4096)):
        a = torch.randn(batch, rows, rows, device="cuda", dtype=torch.float32).to(dtype)
        x = torch.randn(batch, rows, columns, device="cuda", dtype=torch.float32).to(dtype)
        x = x.mT.contiguous().mT if tall else x
        out = torch.full_like(x, float("nan"))
        symmetric_matmul.product(a, x, alpha=0.5, beta=-3.0, out=out)
        truth = 0.5 * a.double() @ x.double() - 3.0 * x.double()
        dense = reference.product(a, x, alpha=0.5, beta=-3.0)
        assert relative_error(out, truth) <= 2 * relative_error(dense, truth)


@needs_hopper
def test_sizes_the_copy_engine_cannot_address():
    for x in inputs(2, 333, 515, torch.float16, "cuda"):
        check_gram(x, None)


@pytest.mark.parametrize(
    "shape",
    [None, POINTER, pytest.param(HOPPER_SMALL, marks=needs_hopper)],
    ids=["chosen", "pointer", "hopper"],
)
def test_repeated_launches_follow_their_operands(shape):
    """The second launch of a size skips Triton's binder, wherever its operands lie."""
    memory = torch.randn(4 << 20, device="cuda", dtype=torch.float32).half()
    chosen = memory[: 2 * 512 * 768].view(2, 512, 768).clone()
    expected = symmetric_matmul.gram(chosen, configuration=shape)
    addend = torch.randn_like(expected)
    product = {"alpha": 0.5, "beta": 2.0, "configuration": shape}
    twice = symmetric_matmul.symmetric_product(expected, expected, addend, **product)
    # The copy engine addresses multiples of 16 bytes.
    for start in (0, 8, 64, 128, 131072, *([1] if shape is POINTER else [])):
        place = memory[start : start + chosen.numel()].view(chosen.shape)
        place.copy_(chosen)
        out = torch.full_like(expected, float("nan"))
        assert torch.equal(symmetric_matmul.gram(place, out=out, configuration=shape), expected)
        moved = memory[start : start + out.numel()].view(out.shape).copy_(expected)
        found = symmetric_matmul.symmetric_product(moved, moved, addend, **product)
        assert torch.equal(found, twice)
        other = {**product, "beta": 3.0}
        changed = symmetric_matmul.symmetric_product(moved, moved, addend, **other)
        assert not torch.equal(changed, twice)


def test_divide():
    check_divide("cuda")


# A third of dense bfloat16 on gaussian matrices, a fifth on the others; on power laws that holds
# from 1024 rows up (0.13 at 4096 rows, 0.22 at 512).
@pytest.mark.parametrize(("kind", "bound"), list(zip(SPECTRA, (1 / 3, 1 / 5, 1 / 4), strict=True)))
@pytest.mark.parametrize("size", [(512, 512), (512, 1792), (1792, 512)], ids=str)
@pytest.mark.parametrize("evaluation", ["auto", "standard"])
def test_accuracy(kind, bound, size, evaluation):
    x = matrix(kind, min(size), max(size)).cuda()
    x = x if size[0] <= size[1] else x.mT
    truth = orthogonalize_batch(x, DEFAULT, dtype=torch.float64, evaluation="standard")
    ours = orthogonalize_batch(x.float(), DEFAULT, dtype=torch.float16, evaluation=evaluation)
    dense = orthogonalize_batch(x.float(), DEFAULT, dtype=torch.bfloat16, evaluation="standard")
    assert relative_error(ours, truth) <= bound * relative_error(dense, truth)


def test_same_bits_from_run_to_run():
    x = torch.randn(3, 512, 1024, device="cuda")
    for evaluation in ("standard", "gram"):
        first, second = (
            orthogonalize_batch(x, DEFAULT, dtype=torch.float16, evaluation=evaluation)
            for _ in range(2)
        )
        assert torch.equal(first, second)


def test_zeros_and_nan_stay_apart():
    x = torch.randn(3, 512, 1024, device="cuda")
    x[1, 3, 5] = float("nan")
    x[2] = 0
    for evaluation in ("standard", "gram"):
        result = orthogonalize_batch(x, DEFAULT, dtype=torch.float16, evaluation=evaluation)
        assert result[0].isfinite().all()
        assert result[1].isnan().any()
        assert torch.equal(result[2], torch.zeros_like(result[2]))


def test_captured_in_a_graph():
    x = torch.randn(2, 512, 1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        orthogonalize_batch(x, DEFAULT, dtype=torch.float16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = orthogonalize_batch(x, DEFAULT, dtype=torch.float16)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(result, orthogonalize_batch(x, DEFAULT, dtype=torch.float16))


def test_nothing_waits_for_the_device():
    x = torch.randn(2, 512, 1024, device="cuda")
    orthogonalize_batch(x, DEFAULT, dtype=torch.float16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        orthogonalize_batch(x, DEFAULT, dtype=torch.float16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_hopper
def test_explained():
    text = explain((4, 4096, 14336), torch.float16, torch.device("cuda"), DEFAULT)
    assert "gram evaluation" in text
    assert "triton products" in text
