"""Invariants of any plan, checked element by element where that is feasible."""

import math
from typing import Any

from titan_muon.distributed.costs import plan_costs
from titan_muon.distributed.geometry import coordinate_of, geometry, segments
from titan_muon.distributed.layout import local_region, region_shape
from titan_muon.distributed.packets import route
from titan_muon.distributed.plan import Plan

# Ranks whose packets are built and held against the prediction, beside the busiest one.
_SAMPLE = 3


def check_plan(plan: Plan) -> dict[str, Any]:
    """Raise AssertionError where the plan breaks an invariant; return figures to compare."""
    for param in {(p.layout, p.rule): p for p in plan.params}.values():
        _check_pieces(plan, param)
    _check_owners(plan)
    costs = plan_costs(plan)
    busiest = max(zip(plan.loads, plan.ranks, strict=True))[1]
    step = max(1, len(plan.ranks) // _SAMPLE)
    sample = sorted({busiest, *plan.ranks[::step]})
    travelling = [u for u in plan.units if u.travels]
    bodies = parcels = 0
    for unit in travelling:
        param = plan.params[unit.param]
        held = _areas(plan, param, unit.index)
        total = 2 * unit.rows * unit.columns
        # These layouts have no replicas: what the owner does not hold goes there and back.
        bodies += 2 * (total - 2 * held.get(unit.owner, 0))
        parcels += 2 * (len(held) - (unit.owner in held))
    return {
        "units": len(plan.units),
        "local_units": len(plan.units) - len(travelling),
        "balance": plan.balance,
        "sent_bytes": [int(costs.bytes_sent[plan.ranks.index(r)]) for r in sample],
        "routed_bytes": [_routed(plan, r) for r in sample],
        "total_bytes": int(costs.bytes_sent.sum()),
        "bodies": bodies,
        "parcels": parcels,
    }


def _check_pieces(plan: Plan, param: Any) -> None:
    """Every element of every shard is in one own piece: disjoint, and together the whole shard."""
    homes = geometry(param.layout, param.rule).homes
    units_of: dict[int, list[int]] = {rank: [] for rank in plan.ranks}
    for unit, ranks in enumerate(homes):
        for rank in ranks:
            units_of[rank].append(unit)
    covered = 0
    for rank in plan.ranks:
        coordinate = coordinate_of(param.layout, rank)
        shape = region_shape(local_region(param.layout, coordinate))
        rows: list[tuple[int, int]] = []
        for unit in units_of[rank]:
            for s in segments(param.layout, param.rule, coordinate, unit):
                if s.columns == s.local_stride:
                    rows.append((s.local_offset, s.rows * s.columns))
                else:
                    rows += [
                        (s.local_offset + i * s.local_stride, s.columns) for i in range(s.rows)
                    ]
        rows.sort()
        end = 0
        for start, length in rows:
            assert start == end, f"{param.name}: rank {rank}, element {end} to {start}"
            end += length
        assert end == math.prod(shape), f"{param.name}: rank {rank}"
        covered += end
    assert covered == math.prod(param.layout.shape), param.name


def _check_owners(plan: Plan) -> None:
    counted: dict[tuple[int, int], int] = {}
    for unit in plan.units:
        param = plan.params[unit.param]
        homes = geometry(param.layout, param.rule).homes[unit.index]
        assert unit.owner in homes, param.name
        assert unit.travels == (len(homes) > 1), param.name
        counted[unit.param, unit.index] = counted.get((unit.param, unit.index), 0) + 1
    assert set(counted.values()) <= {1}
    assert len(counted) == sum(len(geometry(p.layout, p.rule).homes) for p in plan.params)


_AREAS: dict[Any, dict[int, int]] = {}


def _areas(plan: Plan, param: Any, unit: int) -> dict[int, int]:
    """Return the bytes in float16 that each rank holds of one matrix."""
    key = (param.layout, param.rule, unit)
    if key not in _AREAS:
        areas = {}
        for rank in geometry(param.layout, param.rule).homes[unit]:
            pieces = segments(param.layout, param.rule, coordinate_of(param.layout, rank), unit)
            if pieces:
                areas[rank] = sum(s.rows * s.columns for s in pieces)
        _AREAS[key] = areas
    return _AREAS[key]


def _routed(plan: Plan, rank: int) -> int:
    own = plan.ranks.index(rank)
    return sum(
        sum(direction.send_bytes) - direction.send_bytes[own]
        for stage in range(plan.stages)
        for direction in route(plan, rank, stage)
    )
