"""The Triton operations on pieces equal their torch definition, run by Triton's interpreter."""

import pytest
import torch

from tests.helpers.interpreter import interpreted
from tests.helpers.ptx import global_accesses
from titan_muon import Muon
from titan_muon.kernels import pieces_reference as reference
from titan_muon.kernels.pieces import PieceTable, Row

SHAPES = [(24, 64), (13, 17), (2, 2100), (1, 9), (100, 24)]
OPTIONS = {"momentum": 0.9, "nesterov": True, "sign": 1.0}


def make_case(dtype=torch.float32, grad_dtype=torch.float32):
    """Return tensors, a flat buffer and a table with runs, rectangles and odd strides."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=generator).to(grad_dtype) for s in SHAPES]
    momenta = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]
    rows, flat = [], 0
    for tensor, (m, n) in enumerate(SHAPES):
        upper = max(1, m // 2)
        # The upper half as one run; the lower half as two rectangles of one piece.
        rows.append(Row(tensor, upper, n, 0, n, flat, n, 2 * tensor))
        flat += upper * n
        left = n // 2
        if m > upper:
            for start, width in ((0, left), (left, n - left)):
                rows.append(
                    Row(tensor, m - upper, width, upper * n + start, n, flat, width, 2 * tensor + 1)
                )
                flat += (m - upper) * width
    return grads, momenta, torch.zeros(flat), PieceTable(rows, 2 * len(SHAPES))


def check_operations(kernels, device="cpu"):
    """Compare every operation of a module with the reference; used by the GPU tests as well."""
    for dtype, grad_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ):
        for nesterov, sign in ((True, 1.0), (False, -1.0)):
            options = {"momentum": 0.9, "nesterov": nesterov, "sign": sign}
            _check_direction(kernels, device, dtype, grad_dtype, options)
        _check_copies(kernels, device, dtype)
        _check_write(kernels, device, dtype)


def check_row_scaling(scale, device="cpu"):
    """Compare the row scaling with one rounding of the float32 product."""
    for shape in ((2, 33, 17), (1, 5, 5000), (3, 1, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().to(device)
        factors = torch.linspace(0.1, 3, shape[0] * shape[1]).view(*shape[:2], 1).to(device)
        want = (x * factors).half()
        scale(x, factors)
        assert torch.equal(x, want)


def check_whole_steps(kernels):
    """Compare optimizer steps by the kernels, which divide by the norm as they emit, on the CPU."""
    from titan_muon.optim import kinds

    select = kinds.select_piece_operations
    for algorithm in ("muon", "normuon"):
        runs = []
        for operations in (reference, kernels):
            kinds.select_piece_operations = lambda *_, chosen=operations: chosen
            runs.append(_steps(algorithm))
        for got, want in zip(*runs, strict=True):
            # float32 sums in another order, amplified by five iterations.
            assert ((got - want).norm() / want.norm()).item() < 1e-5, algorithm
    kinds.select_piece_operations = select


def _steps(algorithm):
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 20), (24, 6), (2, 5, 8)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    start = [p.detach().clone() for p in params]
    groups = [
        {"params": params[:1], "adjust_lr_fn": "match_param_rms"},
        {"params": params[1:2], "split": [12, 12]},
        {"params": params[2:]},
    ]
    optimizer = Muon([{**g, "algorithm": algorithm} for g in groups], lr=0.05)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [p.detach() - s for p, s in zip(params, start, strict=True)]


def _close(got, want, dtype, roundings=1):
    # One rounding of the target dtype, two where values are squared; float32 sums may be in
    # another order.
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype] * roundings
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=tolerance, atol=tolerance)


def _check_direction(kernels, device, dtype, grad_dtype, options):
    grads, want, flat, table = make_case(dtype, grad_dtype)
    got = [m.clone().to(device) for m in want]
    device_grads = [g.to(device) for g in grads]
    statistics = reference.advance(grads, want, table, **options)
    _close(kernels.advance(device_grads, got, table, **options), statistics, dtype, roundings=2)
    for a, b in zip(got, want, strict=True):
        _close(a, b, dtype)
    _close(
        kernels.measure(device_grads, got, table, **options),
        reference.measure(grads, want, table, **options),
        dtype,
        roundings=2,
    )
    # From here on the same bits on both sides: a 16-bit momentum may have rounded either way.
    got = [m.to(device) for m in want]
    factors = torch.linspace(0.5, 2, table.pieces)
    for target in (torch.float32, torch.float16):
        expected, result = flat.to(target), flat.to(device, target)
        reference.emit(grads, want, expected, table, factors, **options)
        kernels.emit(device_grads, got, result, table, factors.to(device), **options)
        _close(result, expected, target)


def _check_copies(kernels, device, dtype):
    _, tensors, flat, table = make_case(dtype)
    moved = [t.to(device) for t in tensors]
    factors = torch.linspace(0.5, 2, table.pieces)
    keep = (torch.arange(table.pieces) % 3 > 0).float()
    expected, result = flat.clone(), flat.to(device)
    reference.copy_to_flat(tensors, expected, table, factors)
    kernels.copy_to_flat(moved, result, table, factors.to(device))
    _close(result, expected, dtype)
    reference.copy_to_tensors(expected, tensors, table, None, keep)
    kernels.copy_to_tensors(expected.to(device), moved, table, None, keep.to(device))
    for a, b in zip(moved, tensors, strict=True):
        assert torch.equal(a.cpu(), b)
    _close(kernels.statistics(moved, table), reference.statistics(tensors, table), dtype)


def _check_write(kernels, device, dtype):
    _, params, flat, table = make_case(dtype)
    update = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)).half()
    factors = torch.linspace(0.5, 2, table.pieces)
    keep = (torch.arange(table.pieces) % 3 > 0).float()
    for lr in (0.1, torch.tensor(0.1)):
        for cautious in (True, False):
            want = [p.clone() for p in params]
            got = [p.clone().to(device) for p in params]
            options = {"weight_decay": 0.5, "cautious": cautious}
            reference.write(want, update, table, factors, lr=lr, keep=keep, **options)
            rate = lr.to(device) if isinstance(lr, torch.Tensor) else lr
            kernels.write(
                got, update.to(device), table, factors.to(device),
                lr=rate, keep=keep.to(device), **options,
            )  # fmt: skip
            for a, b in zip(got, want, strict=True):
                _close(a, b, dtype)


def test_reference_agrees_with_plain_arithmetic():
    grads, momenta, flat, table = make_case()
    before = [m.clone() for m in momenta]
    statistics = reference.advance(grads, momenta, table, **OPTIONS)
    assert torch.equal(reference.measure(grads, momenta, table, **OPTIONS), statistics)
    directions = []
    for g, old, new in zip(grads, before, momenta, strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * g, rtol=1e-6, atol=1e-6)
        directions.append(0.1 * g + 0.9 * new)
    total = sum(d.square().sum() for d in directions)
    torch.testing.assert_close(statistics[:, 1].sum(), total, rtol=1e-5, atol=0)
    reference.emit(grads, momenta, flat, table, None, **OPTIONS)
    # Every element is in the flat buffer exactly once.
    everything = torch.cat([d.flatten() for d in directions]).sort().values
    torch.testing.assert_close(flat.sort().values, everything, rtol=1e-6, atol=1e-6)


def test_run_of_rows_becomes_one_segment():
    row = Row(0, 8, 16, 0, 16, 128, 16, 0)
    assert PieceTable([row], 1).rows[0][:4] == (0, 1, 128, 0)


def test_slots_of_a_piece_are_consecutive():
    table = make_case()[3].on(torch.device("cpu"))
    slots = torch.cat([c.tiles[:, 3] for c in table.classes]).sort().values
    assert slots.tolist() == list(range(table.slots))
    assert table.bounds[0] == 0
    assert table.bounds[-1] == table.slots


def test_triton_kernels_equal_reference_in_the_interpreter():
    code = (
        "import test_pieces;"
        "from titan_muon.kernels import triton_pieces, triton_rows;"
        "test_pieces.check_operations(triton_pieces);"
        "test_pieces.check_row_scaling(triton_rows.scale_rows_);"
        "test_pieces.check_whole_steps(triton_pieces); print('equal')"
    )
    assert interpreted("-c", code) == "equal"


POINTERS = {"tensors": "*i64", "grads": "*i64", "momenta": "*i64", "weights": "*i64"}
ALIKE = {"like": "*fp32", "grad_like": "*fp32", "momentum_like": "*fp32", "flat": "*fp16"}
TABLES = {"tiles": "*i32", "segments": "*i64", "factors": "*fp32", "partial": "*fp32"}
NUMBERS = {"momentum": "fp32", "sign": "fp32", "lr": "fp32", "weight_decay": "fp32"}
FLAGS = {"NESTEROV": True, "ADVANCE": True, "SCALED": True, "TO_FLAT": True}


def accesses_of(kernel, **changes) -> list[str]:
    types = {**POINTERS, **ALIKE, **TABLES, **NUMBERS}
    types.update({k: v for k, v in changes.items() if k in types})
    tile = {"COLUMNS": 1024, "ROWS": 2, "ALIGNED": True}
    flags = dict.fromkeys(kernel.arg_names, False)
    constants = {**flags, **FLAGS, **tile, "keep": None, **changes}
    used = {k: v for k, v in types.items() if k in kernel.arg_names}
    return global_accesses(kernel, used, constants)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("_advance_kernel", {}),
        ("_emit_kernel", {}),
        ("_emit_kernel", {"momentum_like": "*bf16"}),
        ("_copy_kernel", {"like": "*fp16"}),
        ("_copy_kernel", {"like": "*fp16", "TO_FLAT": False}),
        ("_statistics_kernel", {}),
        ("_write_kernel", {}),
        ("_write_kernel", {"like": "*bf16"}),
    ],
)
def test_aligned_tiles_are_loaded_and_stored_in_vectors(name, changes):
    """A mask or an address whose alignment is lost makes a kernel up to four times slower."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_pieces

    found = accesses_of(getattr(triton_pieces, name), **changes)
    # Each thread has 16 elements of each tensor; the table's entries are numbers of their own.
    assert [a for a in found if ".b16" in a] == []
    assert sum(".b32" in a and ".v" not in a for a in found) <= 6, found
    assert sum(".v4.b32" in a for a in found) >= 4, found
