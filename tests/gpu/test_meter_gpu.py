"""Measured steps on a GPU: times by events, sums like those of a CPU, nothing changed."""

import pytest
import torch
from torch import nn

from titan_muon import Muon
from titan_muon.optim.meter import FIELDS, StepMeter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(device: str) -> tuple[list[nn.Parameter], Muon]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(512, 1024), (768, 512), (4, 256, 512), (1000, 64)]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]
    groups = [
        {"params": params[:2]},
        {"params": params[2:3], "algorithm": "normuon"},
        {"params": params[3:], "algorithm": "adamw"},
    ]
    return params, Muon(groups, lr=1e-2, weight_decay=0.0)


def train(device: str, *, measured: bool) -> tuple[list[nn.Parameter], StepMeter]:
    params, optimizer = build(device)
    watch = StepMeter(optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(1 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        if measured:
            with watch:
                optimizer.step()
        else:
            optimizer.step()
    return params, watch


def test_measuring_changes_no_bit():
    seen, _ = train("cuda", measured=True)
    unseen, _ = train("cuda", measured=False)
    assert all(torch.equal(a, b) for a, b in zip(seen, unseen, strict=True))


def test_sums_are_those_of_a_cpu():
    sums = train("cuda", measured=True)[1].sums.cpu()
    expected = train("cpu", measured=True)[1].sums
    compared = [i for i, name in enumerate(FIELDS) if not name.startswith("orthogonality")]
    # The iteration runs in float16 here and in float32 there: 1 % on an update, less on its norm.
    torch.testing.assert_close(sums[:, compared], expected[:, compared], rtol=1e-2, atol=1e-2)
    errors = sums[:2, FIELDS.index("orthogonality_errors")]
    counts = sums[:2, FIELDS.index("orthogonality_count")]
    assert (errors / counts < 0.6).all()


def test_parts_are_timed_by_the_device():
    params, optimizer = build("cuda")
    watch = StepMeter(optimizer)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    with watch:
        optimizer.step()
    stop.record()
    parts = watch.seconds()
    torch.cuda.synchronize()
    assert {"momentum", "orthogonalize", "write", "elementwise"} <= set(parts)
    assert all(value >= 0 for value in parts.values())
    whole = start.elapsed_time(stop) / 1e3
    assert 0.5 * whole < sum(parts.values()) <= 1.01 * whole
