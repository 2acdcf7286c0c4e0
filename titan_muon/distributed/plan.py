"""Who computes which matrix, and when. Pure: the same on every rank, no process is asked.

[Note: terms]
unit: one matrix. home: a rank that may compute a unit. owner: the home that does. queue: the units
of one owner, most expensive first. stage: the units that travel and are computed together.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from titan_muon.distributed.balance import improve
from titan_muon.distributed.geometry import geometry
from titan_muon.distributed.layout import Layout
from titan_muon.distributed.matrices import MatrixRule, block_rows
from titan_muon.distributed.stages import cut_queues

__all__ = ["Channel", "Plan", "PlanParam", "Unit", "make_plan"]


@dataclass(frozen=True)
class Channel:
    """One tensor that travels with every matrix of a parameter.

    Args:
        name: ``"direction"`` or the name of a state buffer.
        dtype: Name of the dtype in which it travels.
        by_row: One value a row instead of the matrix's shape.
    """

    name: str
    dtype: str
    by_row: bool = False


@dataclass(frozen=True)
class PlanParam:
    """What the planner knows of one parameter.

    Args:
        name: For errors and reports.
        layout: Where it lies.
        rule: Its matrices.
        kind: Matrices of equal shape and kind are computed together; parameters of one kind have
            the same options and dtypes.
        channels: What travels to the owner; the first is the direction, and the update travels
            back in its dtype. The others travel both ways.
        costs: FLOPs of one matrix of each block.
        work_bytes: Memory that one matrix of each block takes while it is computed.
    """

    name: str
    layout: Layout
    rule: MatrixRule
    kind: int
    channels: tuple[Channel, ...]
    costs: tuple[float, ...]
    work_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """One matrix.

    Args:
        param: Index of its parameter.
        index: Index of the matrix in its parameter.
        rows, columns: (M, N).
        owner: Global rank that computes it.
        stage: When.
        travels: False where its owner is the only rank that holds any of it.
    """

    param: int
    index: int
    rows: int
    columns: int
    owner: int
    stage: int
    travels: bool


@dataclass(frozen=True)
class Plan:
    """The assignment of all matrices of parameters that lie on the same ranks.

    Args:
        params: What was planned.
        ranks: Global ranks, ascending.
        units: All matrices, by parameter and index.
        stages: Number of stages.
        loads: FLOPs that each of ``ranks`` computes.
    """

    params: tuple[PlanParam, ...]
    ranks: tuple[int, ...]
    units: tuple[Unit, ...]
    stages: int
    loads: tuple[float, ...]

    @property
    def balance(self) -> float:
        """Mean load over largest load; 1 is perfect."""
        largest = max(self.loads, default=0.0)
        return sum(self.loads) / len(self.loads) / largest if largest else 1.0

    def fingerprint(self) -> str:
        """Return a digest that is equal on two ranks exactly if their plans are."""
        # Layouts are few and name thousands of ranks: write each once.
        layouts: dict[Layout, int] = {}
        params = [
            (
                layouts.setdefault(p.layout, len(layouts)),
                p.name,
                p.rule,
                p.kind,
                p.channels,
                p.costs,
            )
            for p in self.params
        ]
        units = [(u.param, u.index, u.owner, u.stage, u.travels) for u in self.units]
        return hashlib.sha256(repr((list(layouts), params, self.ranks, units)).encode()).hexdigest()


def make_plan(params: Sequence[PlanParam], *, max_stage_bytes: int) -> Plan:
    """Assign every matrix an owner and a stage.

    Args:
        params: Parameters whose layouts have the same set of ranks.
        max_stage_bytes: Most work memory of one owner in one stage; a matrix that alone needs more
            gets a stage of its own.

    Raises:
        ValueError: The parameters lie on different sets of ranks.
    """
    ranks = tuple(sorted(params[0].layout.ranks))
    for param in params:
        if tuple(sorted(param.layout.ranks)) != ranks:
            raise ValueError(f"{param.name} lies on other ranks than {params[0].name}")
    drafts = _drafts(params)
    loads = dict.fromkeys(ranks, 0.0)
    owners = _choose_owners(drafts, loads)
    travels = [len(draft.homes) > 1 for draft in drafts]
    stage_of, stages = cut_queues(drafts, owners, max_stage_bytes, overlap=any(travels))
    units = tuple(
        Unit(d.param, d.index, d.rows, d.columns, owners[i], stage_of[i], travels[i])
        for i, d in enumerate(drafts)
    )
    return Plan(tuple(params), ranks, units, stages, tuple(loads[r] for r in ranks))


@dataclass(frozen=True)
class _Draft:
    param: int
    index: int
    rows: int
    columns: int
    homes: tuple[int, ...]
    cost: float
    work_bytes: int


def _drafts(params: Sequence[PlanParam]) -> list[_Draft]:
    drafts = []
    for number, param in enumerate(params):
        sizes = [sum(r.count for r in ranges) for ranges in block_rows(param.rule)]
        columns = param.rule.stack[2]
        for index, homes in enumerate(geometry(param.layout, param.rule).homes):
            block = index % len(sizes)
            if sizes[block] * columns:
                drafts.append(
                    _Draft(
                        number,
                        index,
                        sizes[block],
                        columns,
                        homes,
                        param.costs[block],
                        param.work_bytes[block],
                    )
                )
    return drafts


def _choose_owners(drafts: Sequence[_Draft], loads: dict[int, float]) -> list[int]:
    """Give each unit to the home with the least work, the most expensive units first.

    Units with one home come first: their load is not a choice.
    """
    owners = [-1] * len(drafts)
    order = sorted(range(len(drafts)), key=lambda i: (-drafts[i].cost, i))
    for i in order:
        if len(drafts[i].homes) == 1:
            owners[i] = drafts[i].homes[0]
            loads[owners[i]] += drafts[i].cost
    heaps: dict[int, list[tuple[float, int]]] = {}
    for i in order:
        homes = drafts[i].homes
        if len(homes) == 1:
            continue
        # Equal homes of one geometry are one object; hashing thousands of ranks is slow.
        heap = heaps.get(id(homes))
        if heap is None:
            heap = heaps[id(homes)] = [(loads[rank], rank) for rank in homes]
            heapq.heapify(heap)
        # A stale entry understates its rank's load: put the true one back and look again.
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owners[i] = heap[0][1]
        loads[owners[i]] += drafts[i].cost
    improve(drafts, owners, loads)
    return owners
