"""What a plan costs each rank. Pure: from the layouts alone, also for thousands of ranks."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from titan_muon.distributed.balance import load_bound
from titan_muon.distributed.geometry import coordinate_of, geometry, segments
from titan_muon.distributed.layout import Layout, local_region, region_shape
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.distributed.packets import channel_layout, parcel_bytes
from titan_muon.distributed.plan import Plan, PlanParam

__all__ = ["PlanCosts", "owner_bound", "plan_costs"]


@dataclass(frozen=True)
class PlanCosts:
    """What one step costs; every tensor has one entry for each of ``plan.ranks``.

    Args:
        bytes_sent: To other ranks, headers included.
        edge_bytes: Those of them that no arithmetic can hide: to the first stage, from the last.
        matrices: Orthogonalized.
        loads: In the unit of the plan's costs.
        shard_bytes: This rank's shards of all matrices in the wire dtype.
        work_bytes: Work memory of the fullest stage.
        buffer_bytes: Persistent packet buffers, both ways, of the largest stages.
        collectives: All-to-alls; the same on all ranks.
    """

    bytes_sent: Tensor
    edge_bytes: Tensor
    matrices: Tensor
    loads: Tensor
    shard_bytes: Tensor
    work_bytes: Tensor
    buffer_bytes: Tensor
    collectives: int


def plan_costs(plan: Plan) -> PlanCosts:
    """Return what one step of a plan costs each rank."""
    ranks = len(plan.ranks)
    position = {rank: p for p, rank in enumerate(plan.ranks)}
    # What lies in each of the four packet buffers of a stage.
    packets = torch.zeros((4, plan.stages, ranks), dtype=torch.int64)
    sent, edge, matrices = (torch.zeros(ranks, dtype=torch.int64) for _ in range(3))
    stages = sorted({unit.stage for unit in plan.units if unit.travels})
    work = torch.zeros((plan.stages, ranks), dtype=torch.int64)
    shards = torch.zeros(ranks, dtype=torch.int64)
    for param in plan.params:
        shards += _shard_bytes(param, plan.ranks)
    for unit in plan.units:
        param, owner = plan.params[unit.param], position[unit.owner]
        blocks = len(param.work_bytes)
        matrices[owner] += 1
        work[unit.stage, owner] += param.work_bytes[unit.index % blocks]
        if not unit.travels:
            continue
        send_there, receive_there, send_back, receive_back = packets[:, unit.stage]
        for channel in range(len(param.channels)):
            whole = _parcels(param, channel, unit.index, plan.ranks)
            layout, _ = channel_layout(param, channel)
            there = whole * _in_replica(layout, unit.owner, plan.ranks)
            send_there += there
            receive_there[owner] += there.sum()
            receive_back += whole
            send_back[owner] += whole.sum()
            # A rank keeps what it would send to itself.
            there[owner] = 0
            back = whole.sum() - whole[owner]
            sent += there
            sent[owner] += back
            edge += there * (unit.stage == stages[0])
            edge[owner] += back * (unit.stage == stages[-1])
    return PlanCosts(
        sent,
        edge,
        matrices,
        torch.tensor(plan.loads, dtype=torch.float64),
        shards,
        work.amax(dim=0),
        packets.amax(dim=1).sum(dim=0),
        2 * len(stages),
    )


def owner_bound(plan: Plan) -> float:
    """Return a load that some rank has however whole matrices are assigned."""
    jobs = []
    for unit in plan.units:
        param = plan.params[unit.param]
        homes = geometry(param.layout, param.rule).homes[unit.index]
        jobs.append(_Job(homes, param.costs[unit.index % len(param.costs)]))
    return load_bound(jobs, dict(zip(plan.ranks, plan.loads, strict=True)))


@dataclass(frozen=True)
class _Job:
    homes: tuple[int, ...]
    cost: float


def _parcels(param: PlanParam, channel: int, unit: int, ranks: tuple[int, ...]) -> Tensor:
    """Return the bytes of every rank's parcel of one matrix; 0 where it holds none of it."""
    layout, rule = channel_layout(param, channel)
    return _sizes(layout, rule, unit, param.channels[channel].dtype, _Ranks(ranks))


class _Ranks:
    """Ranks of a plan as a cache key that is compared by identity first."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def __hash__(self) -> int:
        return hash((len(self.ranks), self.ranks[0], self.ranks[-1]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ranks) and self.ranks == other.ranks


@lru_cache(maxsize=4096)
def _sizes(layout: Layout, rule: MatrixRule, unit: int, dtype: str, ranks: _Ranks) -> Tensor:
    sizes = torch.zeros(len(ranks.ranks), dtype=torch.int64)
    position = _positions(ranks)
    for rank in geometry(layout, rule).homes[unit]:
        pieces = segments(layout, rule, coordinate_of(layout, rank), unit)
        sizes[position[rank]] = parcel_bytes(dtype, pieces) if pieces else 0
    return sizes


@lru_cache(maxsize=64)
def _positions(ranks: _Ranks) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks.ranks)}


def _in_replica(layout: Layout, owner: int, ranks: tuple[int, ...]) -> Tensor:
    """Return for every rank whether it is in the owner's replica."""
    axes = [axis for axis, cut in enumerate(layout.cuts) if cut.dim is None]
    theirs = coordinate_of(layout, owner)
    return _at(layout, tuple((axis, theirs[axis]) for axis in axes), _Ranks(ranks))


@lru_cache(maxsize=4096)
def _at(layout: Layout, fixed: tuple[tuple[int, int], ...], ranks: _Ranks) -> Tensor:
    coordinates = (coordinate_of(layout, rank) for rank in ranks.ranks)
    return torch.tensor([all(c[axis] == at for axis, at in fixed) for c in coordinates])


def _shard_bytes(param: PlanParam, ranks: tuple[int, ...]) -> Tensor:
    itemsize = getattr(torch, param.channels[0].dtype).itemsize
    return _shard_elements(param.layout, _Ranks(ranks)) * itemsize


@lru_cache(maxsize=1024)
def _shard_elements(layout: Layout, ranks: _Ranks) -> Tensor:
    found = [
        math.prod(region_shape(local_region(layout, coordinate_of(layout, rank))))
        for rank in ranks.ranks
    ]
    return torch.tensor(found, dtype=torch.int64)
