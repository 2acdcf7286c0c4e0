"""Who computes which matrix, and when. Pure: the same on every rank, no process is asked.

[Note: terms]
unit: one matrix. home: a rank that may compute a unit. owner: the home that does. queue: the units
of one owner, most expensive first. stage: the units that travel and are computed together.
"""

import hashlib
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from titan_muon.distributed.balance import improve
from titan_muon.distributed.geometry import geometry
from titan_muon.distributed.layout import Layout
from titan_muon.distributed.matrices import MatrixRule, block_rows

__all__ = ["Channel", "Plan", "PlanParam", "Unit", "make_plan"]

# A host needs about two milliseconds to enqueue a stage; on an H200 that is this much arithmetic.
# With less in each, stages would make a step wait for the host.
STAGE_FLOPS = 1.2e12
_OVERLAP_STAGES = 6


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
    stage_of, stages = _cut_queues(drafts, owners, max_stage_bytes, overlap=any(travels))
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


def _cut_queues(
    drafts: Sequence[_Draft], owners: Sequence[int], max_stage_bytes: int, *, overlap: bool
) -> tuple[list[int], int]:
    """Cut every owner's queue into the same number of stages, by position in the queue.

    The exchange to the first stage and that from the last one run under no arithmetic. Where there
    are three stages or more, those two are the smallest.
    """
    queues: dict[int, list[int]] = {}
    for i in sorted(range(len(drafts)), key=lambda i: (-drafts[i].cost, drafts[i].columns, i)):
        queues.setdefault(owners[i], []).append(i)
    count = _overlap_stages(drafts, queues) if overlap else 1
    stage_of = [0] * len(drafts)
    while True:
        for queue in queues.values():
            for stage, part in enumerate(_parts(drafts, queue, count)):
                for i in part:
                    stage_of[i] = stage
        for queue in queues.values():
            queue.sort(key=lambda i: stage_of[i])
        needed = max((_needed(drafts, q, max_stage_bytes) for q in queues.values()), default=1)
        if needed <= count:
            return _tighten(drafts, queues, stage_of, count, max_stage_bytes)
        count = needed


def _overlap_stages(drafts: Sequence[_Draft], queues: dict[int, list[int]]) -> int:
    """Return in how many stages the exchange is worth hiding."""
    longest = max((len(q) for q in queues.values()), default=0)
    work = max((sum(drafts[i].cost for i in q) for q in queues.values()), default=0.0)
    by_work = int(work / STAGE_FLOPS) if STAGE_FLOPS else longest
    return max(1, min(_OVERLAP_STAGES, longest, by_work))


def _parts(drafts: Sequence[_Draft], queue: Sequence[int], count: int) -> list[list[int]]:
    """Cut a queue into parts: cheap units first and last, the most expensive in the second."""
    queue = sorted(queue, key=lambda i: (-drafts[i].cost, drafts[i].columns, i))
    if len(queue) <= count:
        return [queue[p : p + 1] for p in range(count)]
    last = first = []
    if count > 2:
        share = sum(drafts[i].cost for i in queue) / (2 * (count - 1))
        last = _cheapest(drafts, queue, share, keep=count - 1)
        first = _cheapest(drafts, queue, share, keep=count - 2)
    middle = count - 2 if count > 2 else count
    cuts = [position * len(queue) // middle for position in range(middle + 1)]
    inner = [queue[i:j] for i, j in itertools.pairwise(cuts)]
    return [first, *inner, last] if count > 2 else inner


def _cheapest(drafts: Sequence[_Draft], queue: list[int], share: float, *, keep: int) -> list[int]:
    """Take units off the cheap end of a queue, as close to a share of the work as they come."""
    taken = [queue.pop()]
    work = drafts[taken[0]].cost
    while len(queue) > keep and work + drafts[queue[-1]].cost / 2 <= share:
        taken.insert(0, queue.pop())
        work += drafts[taken[0]].cost
    return taken


def _needed(drafts: Sequence[_Draft], queue: Sequence[int], limit: int) -> int:
    """Return how many stages a queue needs so that none exceeds the limit."""
    stages, used = 1, 0
    for i in queue:
        if used and used + drafts[i].work_bytes > limit:
            stages, used = stages + 1, 0
        used += drafts[i].work_bytes
    return stages


def _tighten(
    drafts: Sequence[_Draft],
    queues: dict[int, list[int]],
    stage_of: list[int],
    count: int,
    limit: int,
) -> tuple[list[int], int]:
    """Where an even cut leaves a stage over the limit, fill stages up to the limit instead."""
    for queue in queues.values():
        used = [0] * count
        for i in queue:
            used[stage_of[i]] += drafts[i].work_bytes
        alone = {stage_of[i] for i in queue if drafts[i].work_bytes > limit}
        if all(bytes_ <= limit or stage in alone for stage, bytes_ in enumerate(used)):
            continue
        stage, filled = 0, 0
        for i in queue:
            if filled and filled + drafts[i].work_bytes > limit:
                stage, filled = stage + 1, 0
            stage_of[i] = stage
            filled += drafts[i].work_bytes
    return stage_of, count
