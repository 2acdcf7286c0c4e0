"""Launches past Triton's binder, with a kernel that writes down how it is launched."""

import gc
import weakref

import pytest
import torch

from titan_muon.kernels import launcher
from titan_muon.kernels.launcher import Launch, described, launch, remember, repeat

CONSTANTS = {"BLOCK": 64, "FLAG": True}


class Compiled:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """As Triton's: called with a grid, it compiles what is new to it, launches and returns it."""

    def __init__(self, interpreted=False):
        self.interpreted, self.compilations = interpreted, []
        self.arg_names = ["x", "y", "size", "scale", *CONSTANTS]

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            if self.interpreted:
                return None
            self.compilations.append(Compiled())
            return self.compilations[-1]

        return run


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(launcher, "_COMPILED", {})
    monkeypatch.setattr(launcher, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def aligned(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose address is a multiple of 256."""
    memory = torch.zeros(elements * dtype.itemsize + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + elements * dtype.itemsize].view(dtype)


def test_what_was_compiled_is_launched_again_with_todays_arguments():
    kernel, x, y = Kernel(), aligned(256), aligned(256)
    launch(kernel, (4,), (x, y, 7, 0.5), CONSTANTS, num_warps=4)
    other = aligned(512)
    launch(kernel, (9, 2), (other, y, 7, 0.25), CONSTANTS, num_warps=4)
    (compiled,) = kernel.compilations
    assert compiled.launches == [((9, 2, 1), (other.data_ptr(), y.data_ptr(), 7, 0.25, 64, True))]


@pytest.mark.parametrize(
    "change",
    [
        lambda a, c, o: (a[1:2] + a[1:], c, o),
        lambda a, c, o: ([a[0][1:], *a[1:]], c, o),
        lambda a, c, o: ([a[0][32:], *a[1:]], c, o),
        lambda a, c, o: ([a[0].double(), *a[1:]], c, o),
        lambda a, c, o: ([None, *a[1:]], c, o),
        lambda a, c, o: ([*a[:2], 1, a[3]], c, o),
        lambda a, c, o: ([*a[:2], 2**40, a[3]], c, o),
        lambda a, c, o: ([*a[:3], a[0]], c, o),
        lambda a, c, o: (a, {**c, "BLOCK": 128}, o),
        lambda a, c, o: (a, {**c, "FLAG": False}, o),
        lambda a, c, o: (a, c, {"num_warps": 8}),
        lambda a, c, o: (a, c, {"num_stages": 4}),
    ],
    ids=[
        *("dtype of a neighbour", "4 bytes on", "128 bytes on", "dtype", "None", "1", "64 bits"),
        *("tensor for a number", "constant", "flag", "warps", "another option"),
    ],
)
def test_what_triton_may_specialise_on_is_compiled_anew(change):
    kernel, options = Kernel(), {"num_warps": 4}
    arguments = [aligned(256), aligned(256, torch.float16), 7, 0.5]
    launch(kernel, (4,), arguments, CONSTANTS, **options)
    arguments, constants, options = change(arguments, CONSTANTS, options)
    launch(kernel, (4,), arguments, constants, **options)
    assert len(kernel.compilations) == 2


def test_two_kernels_share_nothing():
    kernels, x = [Kernel(), Kernel()], aligned(256)
    for kernel in kernels:
        launch(kernel, (4,), (x, x, 7, 0.5), CONSTANTS)
    assert [len(kernel.compilations) for kernel in kernels] == [1, 1]


def test_constants_in_another_order_are_refused():
    x = aligned(256)
    with pytest.raises(AssertionError, match="FLAG"):
        launch(Kernel(), (4,), (x, x, 7, 0.5), {"FLAG": True, "BLOCK": 64})


def test_nothing_is_kept_in_the_interpreter():
    kernel, x = Kernel(interpreted=True), aligned(256)
    assert launch(kernel, (4,), (x, x, 7, 0.5), CONSTANTS) is None
    assert launcher._COMPILED == {}
    remember(("key",), None)
    assert not repeat(("key",), [])


def test_a_launch_is_repeated_where_its_operands_are_now():
    compiled = Compiled()
    known = Launch(compiled, (3,), lambda addresses: addresses[::-1], (5, "constant"))
    remember(("key",), known)
    assert repeat(("key",), [10, 20])
    assert compiled.launches == [((3, 1, 1), (20, 10, 5, "constant"))]
    assert not repeat(("another",), [10, 20])


def test_nothing_holds_the_memory_of_operands():
    kinds, values = described(aligned(256), None, 3, 0.5)
    assert values[1:] == [None, 3, 0.5]
    assert isinstance(values[0], int)
    assert not any(isinstance(kind, torch.Tensor) for kind in kinds)


@pytest.mark.parametrize("added", [True, False])
def test_remembered_products_hold_no_operand(added, monkeypatch):
    """Work buffers of every size that ever ran would add up to gigabytes."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import symmetric_matmul, triton_symmetric

    monkeypatch.setattr(triton_symmetric, "launch", lambda *arguments, **options: Compiled())
    operands = {name: torch.zeros(2, 64, 64) for name in ("a", "b", "c", "out")}
    references = [weakref.ref(tensor) for tensor in operands.values()]
    beta = 0.5 if added else 0.0
    symmetric_matmul.symmetric_product(**operands, alpha=0.5, beta=beta)
    assert len(launcher._KNOWN) == 1
    del operands
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_hopper_launches_describe_their_operands_where_they_are_now(monkeypatch):
    """Without a GPU: what the kernel would be given."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_hopper
    from titan_muon.kernels.configurations import HOPPER_SMALL

    compiled = Compiled()
    monkeypatch.setattr(triton_hopper, "device_facts", lambda device: ((9, 0), 132))
    monkeypatch.setattr(triton_hopper, "_hopper_kernel", {(6,): lambda *_, **__: compiled})
    x = torch.zeros(2, 256, 64, dtype=torch.float16)
    c, out = torch.zeros(2, 2, 256, 256, dtype=torch.float16)
    references = [weakref.ref(tensor) for tensor in (x, c, out)]
    known = triton_hopper.multiply(x, x.mT, c, 0.5, 2.0, out, HOPPER_SMALL)
    del x, c, out
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    known([1024, 2048, 4096, 8192])
    ((grid, (*descriptors, rows, columns, depth, alpha, beta, _, total)),) = [
        (grid, arguments[:12]) for grid, arguments in compiled.launches
    ]
    assert (grid, rows, columns, depth, alpha, beta, total) == ((6, 1, 1), 256, 256, 64, 0.5, 2, 6)
    found = [(d.base.data_ptr(), tuple(d.shape), tuple(d.block_shape)) for d in descriptors]
    assert found == [
        (1024, (2, 256, 64), (1, 64, 64)),
        (2048, (2, 256, 64), (1, 128, 64)),
        (4096, (2, 256, 256), (1, 64, 128)),
        (8192, (2, 256, 256), (1, 64, 128)),
        (8192, (2, 256, 256), (1, 128, 64)),
    ]


def test_choices_made_while_a_graph_is_captured_are_not_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    remember(("key",), Launch(Compiled(), (1,), lambda addresses: addresses, ()))
    assert launcher._KNOWN == {}


def test_tables_stay_small(monkeypatch):
    monkeypatch.setattr(launcher, "_MOST", 8)
    kernel, x = Kernel(), aligned(256)
    for size in range(100):
        launch(kernel, (4,), (x, x, size, 0.5), CONSTANTS)
    assert len(launcher._COMPILED) <= 8
