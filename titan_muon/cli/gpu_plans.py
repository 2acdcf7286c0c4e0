"""The plans that the optimizer would make on NVIDIA GPUs, made on any machine."""

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from titan_muon.distributed.geometry import coordinate_of
from titan_muon.distributed.layout import (
    Layout,
    is_dtensor,
    layout_of,
    local_region,
    region_shape,
)
from titan_muon.distributed.plan import Plan, Unit, make_plan
from titan_muon.integration.fused_weights import fused_splits
from titan_muon.kernels import dispatch
from titan_muon.optim import Muon, members
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.groups import group_names, matrix_rules
from titan_muon.optim.kinds import number_kinds
from titan_muon.optim.members import Member
from titan_muon.optim.param_groups import assign, to_groups

__all__ = ["RankSet", "elements_by_rank", "parts_of", "plan_model", "rank_sets"]


@dataclass(frozen=True)
class RankSet:
    """The Muon-family parameters that lie on the same ranks.

    Args:
        members: In the order of the plan's parameters.
        plan: Of the whole set.
    """

    members: list[Member]
    plan: Plan


@contextlib.contextmanager
def _as_on_nvidia() -> Generator[None]:
    """Let costs be those of a GPU with the Triton kernels, whatever is here."""
    changed = {
        dispatch: {"device_fault": lambda device: None},
        members: {"compute_device": lambda param: torch.device("cuda")},
    }
    originals = {m: {name: getattr(m, name) for name in names} for m, names in changed.items()}
    for module, names in changed.items():
        vars(module).update(names)
    try:
        yield
    finally:
        for module, names in originals.items():
            vars(module).update(names)


def plan_model(model: nn.Module) -> list[Plan]:
    """Plan Muon with its defaults and the default routing for a laid-out model.

    Args:
        model: For example of :func:`titan_muon.integration.meta_model.meta_model`. Not modified.

    Returns:
        One plan for each set of ranks.
    """
    found = assign(model, ("muon", {}), ("adamw", {}), splits=fused_splits(model))
    return [ranks.plan for ranks in rank_sets(Muon(to_groups(found)))]


def rank_sets(optimizer: Muon) -> list[RankSet]:
    """Plan every set of ranks of an optimizer; nothing is computed or sent.

    Args:
        optimizer: Its parameters may be on the meta device. Not modified.
    """
    by_ranks: dict[tuple[tuple[int, ...], bool], list[Member]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if not get_algorithm(group["algorithm"]).is_matrix:
            continue
        rules = matrix_rules(group, f"param group {index}")
        names = group_names(group)
        for param, name, rule in zip(group["params"], names, rules, strict=True):
            if rule is None:
                raise AssertionError(f"{name} has no matrix rule")
            member = Member(param, name, group, rule, optimizer.state)
            key = (tuple(sorted(member.layout.ranks)), is_dtensor(param))
            by_ranks.setdefault(key, []).append(member)
    with _as_on_nvidia():
        return [_planned(by_ranks[key]) for key in sorted(by_ranks)]


def _planned(found: list[Member]) -> RankSet:
    numbers = number_kinds(found)
    params = [m.plan_param(number) for m, number in zip(found, numbers, strict=True)]
    limit = max(m.group["max_stage_bytes"] for m in found)
    return RankSet(found, make_plan(params, max_stage_bytes=limit))


def parts_of(plan: Plan, parts: Sequence[Sequence[int]]) -> list[Plan]:
    """Divide a plan by its parameters, for the costs of each part.

    Args:
        plan: The whole plan.
        parts: Indices in ``plan.params``, each in one part.

    Returns:
        A plan for each part, with the owners and stages of the whole one.
    """
    place = {number: (i, j) for i, part in enumerate(parts) for j, number in enumerate(part)}
    units: list[list[Unit]] = [[] for _ in parts]
    loads = [dict.fromkeys(plan.ranks, 0.0) for _ in parts]
    for unit in plan.units:
        part, position = place[unit.param]
        units[part].append(replace(unit, param=position))
        costs = plan.params[unit.param].costs
        loads[part][unit.owner] += costs[unit.index % len(costs)]
    return [
        Plan(
            tuple(plan.params[number] for number in part),
            plan.ranks,
            tuple(units[i]),
            plan.stages,
            tuple(loads[i].values()),
        )
        for i, part in enumerate(parts)
    ]


def elements_by_rank(tensor: Tensor, ranks: range) -> Tensor:
    """Return how many elements of a tensor each rank holds.

    Args:
        tensor: Plain, and then whole on every rank, or a DTensor. Not read.
        ranks: Those to answer for.
    """
    if not is_dtensor(tensor):
        return torch.full((len(ranks),), tensor.numel(), dtype=torch.int64)
    return _elements(layout_of(tensor), ranks)


@lru_cache(maxsize=1024)
def _elements(layout: Layout, ranks: range) -> Tensor:
    found = torch.zeros(len(ranks), dtype=torch.int64)
    for rank in layout.ranks:
        region = local_region(layout, coordinate_of(layout, rank))
        found[rank - ranks.start] = math.prod(region_shape(region))
    return found
