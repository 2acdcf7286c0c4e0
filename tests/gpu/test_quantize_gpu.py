"""Codes and scales of quantised state on a GPU: bit for bit what torch and a CPU make of them."""

import pytest
import torch

from tests.unit.test_quantize import (
    FORMATS,
    blocks_of,
    check_kernels,
    check_search,
    coding_of,
    parts_of,
)
from titan_muon import Muon
from titan_muon.kernels import quantize
from titan_muon.kernels.quantize import decode, encode
from titan_muon.optim import elements

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernels_equal_reference():
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_quantize

    check_kernels(triton_quantize.decode, triton_quantize.encode, "cuda")


def test_search_equals_torch():
    pytest.importorskip("triton", reason="the kernels need triton")
    from tests.helpers.nearest import nearest

    check_search(nearest, "cuda")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_cpu(name, signed):
    blocks = blocks_of(coding_of(name, signed), signed)
    blocks = torch.where(blocks.isfinite().all(1, keepdim=True), blocks, 1.0)
    found = []
    for device in ("cpu", "cuda"):
        coding = coding_of(name, signed, device)
        parts = parts_of(coding, device)
        encode(blocks.to(device).view(-1), parts, coding)
        found.append([part.cpu() for part in (*parts, decode(parts, coding))])
    for cpu, cuda in zip(*found, strict=True):
        assert torch.equal(cpu, cuda)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_state_is_decoded_as_by_torchao(name, signed):
    pytest.importorskip("torchao")
    from titan_muon.optim.quantized import Quantized, unwrapped
    from titan_muon.optim.state_tensors import copy_state, new_state

    values = torch.randn(300, 512, generator=torch.Generator().manual_seed(0)).cuda()
    values = values if signed else values.abs()
    state = new_state(values, name, signed=signed)
    copy_state(state, values)
    parts = unwrapped(state)
    assert isinstance(parts, Quantized)
    got = decode([parts.codes, parts.scale], parts.coding(values.device)).view(values.shape)
    assert torch.equal(got, state.dequantize())
    # One rounding of the format, relative to the norm.
    bound = {"int8": 0.02, "float8": 0.05, "int4": 0.2}[name]
    assert 0 < (got - values).norm() / values.norm() < bound


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("algorithm", ["adamw", "adamuon"])
def test_steps_are_those_of_the_torch_definition(algorithm, name, monkeypatch):
    pytest.importorskip("torchao")
    runs = []
    for fault in (None, "tested without"):
        monkeypatch.setattr(quantize, "device_fault", lambda _, fault=fault: fault)
        # Several chunks, one of them with parts of two parameters.
        monkeypatch.setattr(elements, "CHUNK", 1 << 15)
        generator = torch.Generator().manual_seed(0)
        shapes = [(128, 384), (256, 128), (2, 64, 128)]
        params = [torch.nn.Parameter(torch.randn(s, generator=generator).cuda()) for s in shapes]
        options = {"state_dtype": name, "nonfinite": "skip", "max_stage_bytes": 64 << 16}
        optimizer = Muon([{"params": params, "algorithm": algorithm}], lr=0.02, **options)
        for step in range(4):
            grads = [torch.randn(s, generator=generator).cuda() for s in shapes]
            if step == 2:
                grads[0][3, 4] = float("nan")
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        runs.append([p.detach() for p in params])
    for kernels, torch_only in zip(*runs, strict=True):
        # Not a bit; AdaMuon's products would have to be added in the same order.
        error = (kernels - torch_only).norm() / torch_only.norm()
        assert error <= (0 if algorithm == "adamw" else 1e-6)
