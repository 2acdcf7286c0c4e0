"""What one step did: sums over this rank's part of it, from which the figures of a run are made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.tensors import compute_device, local_of
from titan_muon.optim.measured_work import MeasuredWork
from titan_muon.optim.observer import ElementwiseStep, Observer, StepParts
from titan_muon.optim.quantized import dequantized
from titan_muon.optim.stopwatch import Stopwatch

if TYPE_CHECKING:
    from titan_muon.optim.batches import Batch
    from titan_muon.optim.muon import Muon

__all__ = ["FIELDS", "PARTS", "StepMeter", "orthogonality_error"]

# Columns of the sums. Squares and dots are of elements; counts say over how many.
FIELDS = (
    "update_squares",
    "update_count",
    "weight_squares",
    "weight_count",
    "gradient_squares",
    "momentum_squares",
    "gradient_dot_momentum",
    "orthogonality_errors",
    "orthogonality_count",
)
# Parts of a step: momentum advanced; directions and updates packed and unpacked; waits for what the
# exchange did not hide; arithmetic; updates written; elementwise algorithms.
PARTS = ("momentum", "pack", "exchange", "orthogonalize", "write", "elementwise")
# Most elements that are read of one shard; more would cost and hardly change a root mean square.
_SAMPLE = 1 << 20


class StepMeter(Observer):
    """Measures the steps taken inside ``with meter:`` and changes nothing in them.

    Updates of matrices are measured whole, on the rank that computes them, before decay; those of
    elementwise algorithms are what the step changed, decay included. Weights, gradients and momenta
    are those before the step, and long shards are read by an even sample.

    Args:
        optimizer: Its steps are measured. Not modified.

    Attributes:
        sums: (param groups, FIELDS) float64 of the last step, this rank's share: summed over all
            ranks they are those of the run on every layout.
    """

    def __init__(self, optimizer: "Muon") -> None:
        self._optimizer = optimizer
        self._device = _device_of(optimizer)
        self._watch = Stopwatch(self._device)
        self._steps = 0
        self.sums = self._zeros()

    def __enter__(self) -> "StepMeter":
        """Watch the optimizer."""
        self._optimizer.observer = self
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it alone."""
        self._optimizer.observer = Observer()

    def seconds(self) -> dict[str, float]:
        """Return the time of each part of the last step on this rank; waits for the device."""
        return self._watch.seconds()

    def works(self, works: Sequence[StepParts]) -> Sequence[StepParts]:
        """Begin a step: read the matrices it will change."""
        groups = self._optimizer.param_groups
        self._numbers = {id(group): number for number, group in enumerate(groups)}
        self.sums, self._watch = self._zeros(), Stopwatch(self._device)
        self._steps += 1
        with self._watch.part("measure"):
            for member in (member for work in works for member in work.members):
                self._read(member.group, member.param, member.gradient(), member.momentum)
        return [MeasuredWork(work, self._watch, self._look) for work in works]

    def elements(self, step: ElementwiseStep, params: Sequence[Tensor]) -> ElementwiseStep:
        """Return the step of one group, measured."""

        def measured(
            shards: Sequence[Tensor],
            grads: Sequence[Tensor],
            states: Sequence[Mapping[str, Tensor]],
            group: Mapping[str, Any],
        ) -> None:
            with self._watch.part("measure"):
                before = [_sample(shard).clone() for shard in shards]
                for param, grad, state in zip(params, grads, states, strict=True):
                    self._read(group, param, grad, state.get("exp_avg"))
            with self._watch.part("elementwise"):
                step(shards, grads, states, group)
            with self._watch.part("measure"):
                for param, old in zip(params, before, strict=True):
                    change = _sample(local_of(param)).sub(old)
                    scale = _scale(param, len(old))
                    self._add(group, "update_squares", _dot(change, change) * scale)
                    self._add(group, "update_count", len(old) * scale)

        return measured

    def _look(self, batches: "Sequence[Batch]") -> None:
        """Measure updates that this rank has just computed."""
        for batch in batches:
            group, stack = batch.kind.group, batch.stack
            moved = batch.moves.double() / _copies_of_matrices(group["params"][0])
            wide = torch.promote_types(stack.dtype, torch.float32)
            norms = torch.linalg.vector_norm(stack, dim=(1, 2), dtype=wide).double()
            squares = (norms * batch.reach * _lr_on(group, stack.device)).square()
            self._add(group, "update_squares", (squares * moved).sum())
            self._add(group, "update_count", moved.sum() * stack[0].numel())
            chosen = self._steps % len(stack)
            error = orthogonality_error(stack[chosen]).double()
            self._add(group, "orthogonality_errors", error * moved[chosen])
            self._add(group, "orthogonality_count", moved[chosen])

    def _read(
        self,
        group: Mapping[str, Any],
        param: Tensor,
        grad: Tensor | None,
        momentum: Tensor | None,
    ) -> None:
        weight = _sample(local_of(param))
        scale = _scale(param, len(weight))
        self._add(group, "weight_squares", _dot(weight, weight) * scale)
        self._add(group, "weight_count", len(weight) * scale)
        if grad is None or momentum is None:
            return
        grad, momentum = _sample(grad), _sample(momentum)
        self._add(group, "gradient_squares", _dot(grad, grad) * scale)
        self._add(group, "momentum_squares", _dot(momentum, momentum) * scale)
        self._add(group, "gradient_dot_momentum", _dot(grad, momentum) * scale)

    def _add(self, group: Mapping[str, Any], field: str, value: Tensor | float) -> None:
        self.sums[self._numbers[id(group)], FIELDS.index(field)] += value

    def _zeros(self) -> Tensor:
        shape = len(self._optimizer.param_groups), len(FIELDS)
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def orthogonality_error(matrix: Tensor) -> Tensor:
    """Return how far the shorter side's vectors are from orthogonal and of one length; 0 is exact.

    Args:
        matrix: (M, N), at any scale.

    Returns:
        0-d: the RMS over rows of ``|G / mean(diag G) - I|`` with G the Gram matrix of the short
        side. One for a matrix of zeros.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = (wide @ wide.mT).float()
    mean = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    gram = gram / mean
    gram.diagonal().sub_(1)
    return torch.linalg.vector_norm(gram) / len(gram) ** 0.5


def _sample(tensor: Tensor) -> Tensor:
    """Return at most about ``_SAMPLE`` elements, evenly spread, as one float vector."""
    flat = dequantized(tensor.detach()).reshape(-1)
    # Odd, so that a power-of-two row length does not pick the same columns of every row.
    stride = max(1, len(flat) // _SAMPLE) | 1
    return flat[::stride].to(torch.promote_types(flat.dtype, torch.float32))


def _scale(param: Tensor, sampled: int) -> float:
    """Return for how many elements of the run each sampled one of this rank's shard stands."""
    elements = local_of(param).numel()
    return elements / max(sampled, 1) / _copies(param)


def _copies(param: Tensor) -> int:
    """Return how many ranks hold each element."""
    if not is_dtensor(param):
        return _world_size()
    layout = layout_of(param)
    copies = 1
    for cut, size in zip(layout.cuts, layout.mesh_shape, strict=True):
        copies *= size if cut.dim is None else 1
    return copies


def _copies_of_matrices(param: Tensor) -> int:
    """Return how many ranks compute each matrix: one, but for plain tensors all."""
    return 1 if is_dtensor(param) else _world_size()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _device_of(optimizer: "Muon") -> torch.device:
    # A group may be empty: a frozen part of the model, a pipeline stage without some kind.
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next(params, None)
    return torch.device("cpu") if first is None else compute_device(first)


def _lr_on(group: Mapping[str, Any], device: torch.device) -> Tensor | float:
    lr = group["lr"]
    return lr.to(device) if isinstance(lr, Tensor) else float(lr)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left, right.to(left.dtype)).double()
