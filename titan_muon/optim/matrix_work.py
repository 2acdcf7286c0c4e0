"""The Muon-family parameters that lie on the same ranks, with their plan and exchange."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.exchange import Arrival, Batch, Exchange
from titan_muon.distributed.geometry import Segment
from titan_muon.distributed.groups import agree_on_plan, group_of
from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.matrices import MatrixRule, block_rows
from titan_muon.distributed.plan import Channel, PlanParam, make_plan
from titan_muon.distributed.tensors import compute_device, local_of
from titan_muon.distributed.wire import local_views
from titan_muon.kernels import select_operations
from titan_muon.optim import update_rules
from titan_muon.optim.algorithms.base import MatrixAlgorithm, get_algorithm
from titan_muon.optim.groups import group_names
from titan_muon.optim.matrix_math import batch_update
from titan_muon.optim.state import MOMENTUM
from titan_muon.orthogonalization import (
    choose_evaluation,
    cost,
    resolve_dtype,
    resolve_schedule,
    work_bytes,
)

__all__ = ["MatrixWork", "matrix_work"]


def matrix_work(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Tensor]],
    rules: Mapping[int, MatrixRule],
) -> list["MatrixWork"]:
    """Sort all Muon-family parameters by the ranks they lie on and plan each set.

    Args:
        groups: All param groups, complete.
        state: Optimizer state.
        rules: Matrix rule of each Muon-family parameter by ``id``.

    Returns:
        One entry for each set of ranks, in an order that all ranks share.

    Raises:
        NotImplementedError: A parameter has a ``Partial`` placement.
        RuntimeError: Ranks made different plans.

    Collective: all ranks of each set, where it is more than one.
    """
    by_ranks: dict[tuple[Any, ...], list[_Member]] = {}
    for number, group in enumerate(groups):
        if not get_algorithm(group["algorithm"]).is_matrix:
            continue
        names = group_names(group, group["params"])
        for param, name in zip(group["params"], names, strict=True):
            member = _Member(param, name, group, number, rules[id(param)], state[param])
            ranks = tuple(sorted(member.plan.layout.ranks))
            key = (ranks, str(compute_device(param)), is_dtensor(param))
            by_ranks.setdefault(key, []).append(member)
    return [MatrixWork(by_ranks[key], key[0], distributed=key[2]) for key in sorted(by_ranks)]


class _Member:
    """One parameter with its group, state and description for the planner."""

    def __init__(
        self,
        param: Tensor,
        name: str,
        group: dict[str, Any],
        number: int,
        rule: MatrixRule,
        state: dict[str, Tensor],
    ) -> None:
        self.param, self.name, self.group, self.state = param, name, group, state
        algorithm = get_algorithm(group["algorithm"])
        if not isinstance(algorithm, MatrixAlgorithm):
            raise AssertionError(f"{name}: {algorithm.name} is no matrix algorithm")
        self.algorithm = algorithm
        self.channels = (
            Channel("direction", group["wire_dtype"]),
            *(
                Channel(b.name, str(state[b.name].dtype).removeprefix("torch."), b.by_row)
                for b in algorithm.buffers
            ),
        )
        costs, memory = _block_costs(rule, group, compute_device(param), state[MOMENTUM].dtype)
        self.plan = PlanParam(
            name, layout_of(param, name), rule, number, self.channels, costs, memory
        )

    def shard(self) -> Tensor:
        return local_of(self.param)

    def gradient(self) -> Tensor | None:
        """Return the local gradient.

        Raises:
            NotImplementedError: The gradient is placed otherwise than the parameter.
        """
        grad = self.param.grad
        if grad is None or not is_dtensor(grad) or not is_dtensor(self.param):
            return grad
        if grad.placements != self.param.placements:
            raise NotImplementedError(
                f"{self.name}: the gradient has placements {grad.placements}, the parameter "
                f"{self.param.placements}; reduce or redistribute the gradient before step()"
            )
        return local_of(grad)


class MatrixWork:
    """The exchange of one set of ranks and what this rank feeds into it.

    Args:
        members: Parameters on these ranks, in an order that all ranks share.
        ranks: Global ranks, ascending.
        distributed: Whether the parameters are DTensors.
    """

    def __init__(
        self, members: Sequence[_Member], ranks: tuple[int, ...], *, distributed: bool
    ) -> None:
        self.members = list(members)
        device = compute_device(members[0].param)
        limit = max(m.group["max_stage_bytes"] for m in members)
        plan = make_plan([m.plan for m in members], max_stage_bytes=limit)
        group = group_of(ranks) if distributed else None
        agree_on_plan(plan, group, device)
        rank = dist.get_rank() if distributed else ranks[0]
        self.exchange = Exchange(plan, rank, group, device)
        self.stages = range(plan.stages)
        self._travelling = {u.param for u in plan.units if u.travels}
        self._gradients: list[Tensor | None] = []
        self._momenta: dict[int, Tensor] = {}
        self._directions: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Advance the momentum of every parameter with a gradient.

        Where only this rank may lack the gradient, the advanced momentum waits until the owner says
        whether another rank had one.
        """
        self._gradients = [m.gradient() for m in self.members]
        self._momenta = {}
        by_group: dict[int, list[int]] = {}
        for index, (member, grad) in enumerate(zip(self.members, self._gradients, strict=True)):
            momentum = local_of(member.state[MOMENTUM])
            if grad is not None:
                self._momenta[index] = momentum
                by_group.setdefault(id(member.group), []).append(index)
            elif index in self._travelling:
                self._momenta[index] = momentum * member.group["momentum"]
        for indices in by_group.values():
            group = self.members[indices[0]].group
            update_rules.advance_momentum(
                [self._momenta[i] for i in indices],
                [self._signed_gradient(i) for i in indices],
                momentum=group["momentum"],
            )

    def send(self, stage: int) -> Any:
        """Start the exchange of a stage. Collective: all ranks of the set."""
        self._directions = {}
        return self.exchange.send(stage, self)

    def receive(self, stage: int, message: Any) -> list[Batch]:
        """Return the whole matrices that this rank computes in a stage."""
        return self.exchange.receive(stage, message, self)

    def compute(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Replace the direction in every batch by its update; return the scales."""
        scales = []
        for batch in batches:
            member = self.members[self.exchange.plan.units[batch.units[0]].param]
            scales.append(batch_update(batch, member.algorithm, member.group))
        return scales

    def finish(self) -> None:
        """Let go of the step's tensors."""
        self._gradients, self._momenta, self._directions = [], {}, {}

    def write(self, arrivals: Sequence[Arrival]) -> None:
        """Write updates into the weights and buffers into the state."""
        for arrival in arrivals:
            member = self.members[arrival.param]
            flag = None if self._gradients[arrival.param] is not None else arrival.flag
            if arrival.channel:
                target = local_of(member.state[member.channels[arrival.channel].name])
                self._copy(target, arrival, arrival.values, flag)
                continue
            if flag is not None:
                momentum = self._momenta[arrival.param].view(-1)
                moved = local_views(momentum, arrival.pieces)
                self._copy(local_of(member.state[MOMENTUM]), arrival, moved, flag)
            self._write_update(member, arrival, flag)

    def tensor(self, param: int, channel: int) -> Tensor:
        """Return the flat local tensor of one channel; see ``Sources``."""
        member = self.members[param]
        if channel:
            return local_of(member.state[member.channels[channel].name]).view(-1)
        if param not in self._directions:
            self._directions[param] = self._direction(param)
        return self._directions[param].view(-1)

    def present(self, param: int) -> bool:
        """Whether this rank has a gradient for the parameter; see ``Sources``."""
        return self._gradients[param] is not None

    def square_sum(self, param: int, pieces: Sequence[Segment]) -> Tensor | None:
        """Return the sum of squares of the weights in the rectangles; see ``Sources``."""
        member = self.members[param]
        if member.group["adjust_lr_fn"] != "match_param_rms":
            return None
        flat = member.shard().reshape(-1)
        return update_rules.square_sum(local_views(flat, pieces))

    def _direction(self, param: int) -> Tensor:
        group, momentum = self.members[param].group, self._momenta[param]
        if not group["nesterov"]:
            return momentum
        grad = None if self._gradients[param] is None else self._signed_gradient(param)
        return update_rules.look_ahead(grad, momentum, group["momentum"])

    def _signed_gradient(self, param: int) -> Tensor:
        grad = self._gradients[param]
        if grad is None:
            raise AssertionError(f"{self.members[param].name} has no gradient")
        grad = grad.to(self._momenta[param].dtype).contiguous()
        return -grad if self.members[param].group["maximize"] else grad

    def _write_update(self, member: _Member, arrival: Arrival, flag: Tensor | None) -> None:
        shard, group = member.shard(), member.group
        flat = shard.view(-1) if shard.is_contiguous() else shard.reshape(-1)
        for target, values in zip(local_views(flat, arrival.pieces), arrival.values, strict=True):
            update_rules.write_update(
                target,
                values,
                arrival.scale,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                cautious=group["cautious_weight_decay"],
                flag=flag,
            )
        if not shard.is_contiguous():
            shard.copy_(flat.view(shard.shape))

    def _copy(
        self, target: Tensor, arrival: Arrival, values: Sequence[Tensor], flag: Tensor | None
    ) -> None:
        for view, value in zip(local_views(target.view(-1), arrival.pieces), values, strict=True):
            view.copy_(value if flag is None else torch.where(flag > 0, value, view))


def _block_costs(
    rule: MatrixRule, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return FLOPs and work memory of one matrix of each block."""
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    work_dtype = resolve_dtype(group["ns_dtype"], device, dtype)
    columns = rule.stack[2]
    costs, memory = [], []
    for ranges in block_rows(rule):
        rows = sum(r.count for r in ranges)
        ops = select_operations(min(rows, columns), work_dtype, device)
        evaluation, _ = choose_evaluation(rows, columns, work_dtype, schedule, ops)
        costs.append(cost(rows, columns, schedule, evaluation, ops.half_cost))
        stack = rows * columns * (dtype.itemsize + work_dtype.itemsize)
        memory.append(stack + work_bytes(rows, columns, work_dtype, evaluation))
    return tuple(costs), tuple(memory)
