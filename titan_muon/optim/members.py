"""One Muon-family parameter as the engine sees it, and the gradients of a step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.layout import layout_of
from titan_muon.distributed.matrices import MatrixRule, block_rows
from titan_muon.distributed.plan import Channel, PlanParam
from titan_muon.distributed.tensors import compute_device, local_gradient, local_of
from titan_muon.kernels.pieces import PieceTable, TensorList
from titan_muon.kernels.pieces_dispatch import PieceOperations
from titan_muon.optim.algorithms.base import MatrixAlgorithm, get_algorithm
from titan_muon.optim.matrix_math import matrix_cost
from titan_muon.optim.quantized import clone_state
from titan_muon.optim.rounding import STEP, Rounding, is_rounded
from titan_muon.optim.state import MOMENTUM
from titan_muon.optim.state_tensors import arithmetic_dtype, quantized_as

__all__ = ["Gradients", "Member"]


class Member:
    """A parameter with its group, state and description for the planner.

    Args:
        param: Plain tensor or DTensor.
        name: For errors.
        group: Its complete param group.
        rule: Its matrices.
        states: State of all parameters; its owner may replace tensors of it between steps.

    Raises:
        NotImplementedError: A placement is ``Partial``.
    """

    def __init__(
        self,
        param: Tensor,
        name: str,
        group: dict[str, Any],
        rule: MatrixRule,
        states: Mapping[Tensor, dict[str, Tensor]],
    ) -> None:
        self.param, self.name, self.group, self._states = param, name, group, states
        state = self.state
        self.layout, self.rule = layout_of(param, name), rule
        algorithm = get_algorithm(group["algorithm"])
        if not isinstance(algorithm, MatrixAlgorithm):
            raise AssertionError(f"{name}: {algorithm.name} is no matrix algorithm")
        self.algorithm = algorithm
        self.momentum = local_of(state[MOMENTUM])
        self._seen = dict(state)
        self._rounding: Rounding | None = None
        self.channels = (
            Channel("direction", group["wire_dtype"]),
            *(Channel(b.name, _dtype_name(state[b.name]), b.by_row) for b in algorithm.buffers),
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """Its state."""
        return self._states[self.param]

    def plan_param(self, kind: int) -> PlanParam:
        """Return what the planner knows of the parameter."""
        sizes = [sum(r.count for r in ranges) for ranges in block_rows(self.rule)]
        device, dtype = compute_device(self.param), arithmetic_dtype(self.momentum)
        columns, algorithm = self.rule.stack[2], self.algorithm
        costs = [matrix_cost(n, columns, algorithm, self.group, device, dtype) for n in sizes]
        flops, memory = zip(*costs, strict=True)
        return PlanParam(self.name, self.layout, self.rule, kind, self.channels, flops, memory)

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of weight and state, of quantised state that of its values."""
        state = [arithmetic_dtype(local_of(t)) for t in self.state.values()]
        return [self.param.dtype, *state]

    @property
    def quantized_as(self) -> str | None:
        """Format of the state, the same on every rank, even on one with an empty shard."""
        return quantized_as(self.param, self.group["state_dtype"])

    @property
    def is_staged(self) -> bool:
        """Whether no kernel can work on weight and state as they lie."""
        offloaded = local_of(self.param).device != compute_device(self.param)
        return offloaded or self.quantized_as is not None or self.is_rounded

    @property
    def is_rounded(self) -> bool:
        """Whether the weight is rounded stochastically."""
        return is_rounded(self.param, self.group)

    def rounded(self, values: Tensor) -> Tensor:
        """Return new values of the flat shard, float32, in the weight's dtype."""
        if self._rounding is None:
            self._rounding = Rounding(self.param, self.name, self.group["rounding_seed"])
        return self._rounding(values, self.state[STEP])

    def shard(self) -> Tensor:
        """Return the local weights.

        Raises:
            ValueError: They have another shape than when the optimizer was built.
        """
        shard = local_of(self.param)
        if shard.shape != self.momentum.shape:
            raise ValueError(
                f"{self.name}: its shape on this rank is {tuple(shard.shape)}, and was "
                f"{tuple(self.momentum.shape)} when the optimizer was built; build a new one after "
                "parameters change"
            )
        return shard

    def take_state(self) -> None:
        """Take over tensors of the state that were replaced.

        Raises:
            ValueError: One has another shape, dtype or device than when the optimizer was built.
        """
        for key, old in self._seen.items():
            new = self.state.get(key)
            if not isinstance(new, Tensor) or _form(new) != _form(old):
                found = _form(new) if isinstance(new, Tensor) else type(new).__name__
                raise ValueError(
                    f"{self.name}: its state {key} is {found} now and was {_form(old)} when the "
                    "optimizer was built; put back what was there before the next step"
                )
        self._seen = dict(self.state)
        self.momentum = local_of(self.state[MOMENTUM])

    def gradient(self) -> Tensor | None:
        """Return the local gradient; see :func:`titan_muon.distributed.tensors.local_gradient`."""
        return local_gradient(self.param, self.name)


class Gradients:
    """Local gradients and momenta of one step.

    A parameter without a gradient here gets zeros and a copy of its momentum, which becomes the
    momentum only where another rank had a gradient.

    Args:
        members: All parameters.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        found = [member.gradient() for member in members]
        self._live = [member.momentum for member in members]
        self._missing = {i for i, grad in enumerate(found) if grad is None}
        self.momenta = TensorList(
            clone_state(momentum) if grad is None else momentum
            for grad, momentum in zip(found, self._live, strict=True)
        )
        grads = [
            _zeros(momentum) if grad is None else grad.contiguous()
            for grad, momentum in zip(found, self._live, strict=True)
        ]
        if len({grad.dtype for grad in grads}) > 1:
            # Kernels take one dtype; the EMA's is the one in which gradients end anyway.
            grads = [g.to(arithmetic_dtype(m)) for g, m in zip(grads, self._live, strict=True)]
        self.grads = TensorList(grads)

    @property
    def all_present(self) -> bool:
        """Whether this rank has every gradient."""
        return not self._missing

    def any_present(self, params: Iterable[int]) -> bool:
        """Whether this rank has the gradient of one of some parameters."""
        return not self._missing or any(param not in self._missing for param in params)

    def flags(self, device: torch.device) -> Tensor:
        """Return (parameters,) float32, 1 where this rank has the gradient."""
        present = [float(i not in self._missing) for i in range(len(self.grads))]
        return torch.tensor(present, dtype=torch.float32).to(device)

    def commit(self, table: PieceTable, keep: Tensor, ops: PieceOperations) -> None:
        """Take over the advanced momentum of missing gradients where some rank had one.

        Args:
            table: Segments on the tensor side.
            keep: (pieces,), 1 where some rank had a gradient.
            ops: Operations of the kind whose table it is.
        """
        missing = tuple(i for i in table.tensors if i in self._missing)
        if missing:
            moved, live = ([ts[i] for i in missing] for ts in (self.momenta, self._live))
            ops.merge(moved, live, table.only(missing), keep)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    local = local_of(tensor)
    return tuple(local.shape), local.dtype, local.device


def _zeros(momentum: Tensor) -> Tensor:
    dtype = arithmetic_dtype(momentum)
    return torch.zeros(momentum.shape, dtype=dtype, device=momentum.device)


def _dtype_name(tensor: Tensor) -> str:
    return str(arithmetic_dtype(local_of(tensor))).removeprefix("torch.")
