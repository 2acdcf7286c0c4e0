"""How the matrices of every owner are cut into stages. Pure and deterministic."""

import itertools
from collections.abc import Sequence
from typing import Protocol

__all__ = ["STAGE_FLOPS", "cut_queues"]

# A host needs one to two milliseconds to enqueue a stage; on an H200 the two are this much work.
# With less in each, stages would make a step wait for the host.
STAGE_FLOPS = 1.2e12
_OVERLAP_STAGES = 6


class Queued(Protocol):
    """What is computed.

    Args:
        columns: Of the matrix.
        cost: FLOPs.
        work_bytes: Memory it takes while it is computed.
    """

    @property
    def columns(self) -> int: ...  # noqa: D102

    @property
    def cost(self) -> float: ...  # noqa: D102

    @property
    def work_bytes(self) -> int: ...  # noqa: D102


def cut_queues(
    jobs: Sequence[Queued], owners: Sequence[int], max_stage_bytes: int, *, overlap: bool
) -> tuple[list[int], int]:
    """Cut every owner's queue into the same number of stages, by position in the queue.

    The exchange to the first stage and that from the last one run under no arithmetic. Where there
    are three stages or more, those two are the smallest.

    Args:
        jobs: All matrices.
        owners: Owner of each.
        max_stage_bytes: Most work memory of one owner in one stage; a matrix that alone needs more
            gets a stage of its own.
        overlap: Whether anything travels.

    Returns:
        Stage of each matrix, and the number of stages.
    """
    queues: dict[int, list[int]] = {}
    for i in sorted(range(len(jobs)), key=lambda i: (-jobs[i].cost, jobs[i].columns, i)):
        queues.setdefault(owners[i], []).append(i)
    count = _overlap_stages(jobs, queues) if overlap else 1
    stage_of = [0] * len(jobs)
    while True:
        for queue in queues.values():
            for stage, part in enumerate(_parts(jobs, queue, count)):
                for i in part:
                    stage_of[i] = stage
        for queue in queues.values():
            queue.sort(key=lambda i: stage_of[i])
        needed = max((_needed(jobs, q, max_stage_bytes) for q in queues.values()), default=1)
        if needed <= count:
            return _tighten(jobs, queues, stage_of, count, max_stage_bytes)
        count = needed


def _overlap_stages(jobs: Sequence[Queued], queues: dict[int, list[int]]) -> int:
    """Return in how many stages the exchange is worth hiding."""
    longest = max((len(q) for q in queues.values()), default=0)
    work = max((sum(jobs[i].cost for i in q) for q in queues.values()), default=0.0)
    by_work = int(work / STAGE_FLOPS) if STAGE_FLOPS else longest
    return max(1, min(_OVERLAP_STAGES, longest, by_work))


def _parts(jobs: Sequence[Queued], queue: Sequence[int], count: int) -> list[list[int]]:
    """Cut a queue into parts: cheap units first and last, the most expensive in the second."""
    queue = sorted(queue, key=lambda i: (-jobs[i].cost, jobs[i].columns, i))
    if len(queue) <= count:
        return [queue[p : p + 1] for p in range(count)]
    last = first = []
    if count > 2:
        share = sum(jobs[i].cost for i in queue) / (2 * (count - 1))
        last = _cheapest(jobs, queue, share, keep=count - 1)
        first = _cheapest(jobs, queue, share, keep=count - 2)
    middle = count - 2 if count > 2 else count
    cuts = [position * len(queue) // middle for position in range(middle + 1)]
    inner = [queue[i:j] for i, j in itertools.pairwise(cuts)]
    return [first, *inner, last] if count > 2 else inner


def _cheapest(jobs: Sequence[Queued], queue: list[int], share: float, *, keep: int) -> list[int]:
    """Take units off the cheap end of a queue, as close to a share of the work as they come."""
    taken = [queue.pop()]
    work = jobs[taken[0]].cost
    while len(queue) > keep and work + jobs[queue[-1]].cost / 2 <= share:
        taken.insert(0, queue.pop())
        work += jobs[taken[0]].cost
    return taken


def _needed(jobs: Sequence[Queued], queue: Sequence[int], limit: int) -> int:
    """Return how many stages a queue needs so that none exceeds the limit."""
    stages, used = 1, 0
    for i in queue:
        if used and used + jobs[i].work_bytes > limit:
            stages, used = stages + 1, 0
        used += jobs[i].work_bytes
    return stages


def _tighten(
    jobs: Sequence[Queued],
    queues: dict[int, list[int]],
    stage_of: list[int],
    count: int,
    limit: int,
) -> tuple[list[int], int]:
    """Where an even cut leaves a stage over the limit, fill stages up to the limit instead."""
    for queue in queues.values():
        used = [0] * count
        for i in queue:
            used[stage_of[i]] += jobs[i].work_bytes
        alone = {stage_of[i] for i in queue if jobs[i].work_bytes > limit}
        if all(bytes_ <= limit or stage in alone for stage, bytes_ in enumerate(used)):
            continue
        stage, filled = 0, 0
        for i in queue:
            if filled and filled + jobs[i].work_bytes > limit:
                stage, filled = stage + 1, 0
            stage_of[i] = stage
            filled += jobs[i].work_bytes
    return stage_of, count
