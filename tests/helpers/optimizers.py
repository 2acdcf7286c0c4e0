"""Small optimizers, gradients and a third-party algorithm, shared by the optimizer tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_muon import Muon
from titan_muon.optim.algorithms import Buffer, MatrixAlgorithm, register_algorithm
from titan_muon.optim.options import MATRIX_OPTIONS, Option

ALGORITHMS = ("muon", "normuon", "adamuon", "aurora", "adamw", "adam")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameters(
    *shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    g = generator(seed)
    return [nn.Parameter(torch.randn(tuple(s), generator=g).to(dtype)) for s in shapes]


def set_gradients(
    params: Sequence[Tensor], step: int = 0, dtype: torch.dtype | None = None
) -> None:
    """Give every parameter the gradient of a step; with ``dtype``, another than its own."""
    g = generator(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=g).to(param.dtype)
        if dtype is not None:
            param.grad_dtype = dtype
            grad = grad.to(dtype)
        param.grad = grad


def train(optimizer: Muon, steps: int, first: int = 0) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def snapshot(optimizer: Muon) -> dict[str, Any]:
    """Copy everything that a step or a load may change."""
    return {
        "params": [p.detach().clone() for g in optimizer.param_groups for p in g["params"]],
        "state": [
            {k: v.clone() for k, v in optimizer.state[p].items()}
            for g in optimizer.param_groups
            for p in g["params"]
        ],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    }


def assert_same(left: Any, right: Any) -> None:
    """Demand bitwise equality of two snapshots."""
    torch.testing.assert_close(left["params"], right["params"], rtol=0, atol=0)
    torch.testing.assert_close(left["state"], right["state"], rtol=0, atol=0)
    assert left["groups"] == right["groups"]


class AveragedAlgorithm(MatrixAlgorithm):
    """Averages updates over steps, and counts the steps of each row."""

    name = "averaged_test"
    title = "Averaged"
    options = {
        **MATRIX_OPTIONS,
        "keep": Option(0.5, "a number in [0, 1)", lambda v: 0 <= v < 1, "EMA of the update"),
    }
    buffers = (Buffer("average_buffer", "grad"), Buffer("count_buffer", "rows"))

    def update(
        self, update: Tensor, buffers: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Tensor:
        buffers["count_buffer"].add_(1)
        average = buffers["average_buffer"]
        average.lerp_(update.to(average.dtype), 1 - options["keep"])
        return average.to(update.dtype, copy=True)


def register_averaged() -> str:
    return register_algorithm(AveragedAlgorithm()).name
