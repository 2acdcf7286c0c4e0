"""Moves and swaps that take work from the rank that has most of it. Pure and deterministic."""

import heapq
from collections.abc import Sequence
from typing import Protocol

__all__ = ["improve", "load_bound"]

# Ranks that are tried as partners of the busiest one, and changes in all: enough for every model
# in the scale table, and a bound on the time of a plan.
_PARTNERS = 64
_CHANGES = 4096


class Job(Protocol):
    """What is assigned.

    Args:
        homes: Ranks that may own it.
        cost: Its share of an owner's load.
    """

    @property
    def homes(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def cost(self) -> float: ...  # noqa: D102


def improve(jobs: Sequence[Job], owners: list[int], loads: dict[int, float]) -> None:
    """Lower the largest load by moving one job, or swapping two, at a time.

    Args:
        jobs: What is assigned.
        owners: Owner of each job; modified.
        loads: Load of each rank; modified.
    """
    search = _Search(jobs, owners, loads)
    bound = load_bound(jobs, loads)
    for _ in range(_CHANGES):
        busiest = search.busiest()
        if loads[busiest] <= bound or not search.relieve(busiest):
            return


def load_bound(jobs: Sequence[Job], loads: dict[int, float]) -> float:
    """Return a load that some rank has in every assignment.

    It is the largest of: the mean; what a rank must do since it alone can; the most expensive job;
    and what crowding costs, see :func:`_crowded`.

    Args:
        jobs: What is assigned.
        loads: Loads of any assignment; only their sum is read.
    """
    fixed = dict.fromkeys(loads, 0.0)
    free = []
    for job in jobs:
        if len(job.homes) == 1:
            fixed[job.homes[0]] += job.cost
        else:
            free.append(job.cost)
    free.sort(reverse=True)
    least, ranks = min(fixed.values()), len(loads)
    bound = max(sum(loads.values()) / ranks, max(fixed.values()), least + max(free, default=0.0))
    for count in _class_ends(free):
        bound = max(bound, least + _crowded(free[:count], ranks))
    return bound


def _class_ends(costs: Sequence[float]) -> list[int]:
    """Return how many costs, in descending order, are at least as large as each distinct one."""
    return [i for i in range(1, len(costs) + 1) if i == len(costs) or costs[i] != costs[i - 1]]


def _crowded(costs: Sequence[float], ranks: int) -> float:
    """Return a load that some rank has since there are more jobs than ranks.

    Of ``k * ranks + 1`` jobs some rank gets ``k + 1``, at least the cheapest ones. Where no rank
    gets three, so many share a rank as there are too many jobs, at best the cheapest with the most
    expensive of the cheapest.

    Args:
        costs: In descending order.
        ranks: Number of ranks.
    """
    most, extra = (len(costs) - 1) // ranks, len(costs) - ranks
    bound = sum(costs[most * ranks - most : most * ranks + 1])
    if 0 < extra <= ranks:
        sharing = costs[len(costs) - 2 * extra :]
        pairs = max(sharing[j] + sharing[-1 - j] for j in range(extra))
        bound = max(bound, min(pairs, sum(costs[-3:]) if len(costs) > 2 else pairs))
    return bound


class _Search:
    def __init__(self, jobs: Sequence[Job], owners: list[int], loads: dict[int, float]) -> None:
        self.jobs, self.owners, self.loads = jobs, owners, loads
        # One job stands for all of a rank with the same cost and homes.
        self.owned: dict[int, dict[tuple[float, int], list[int]]] = {rank: {} for rank in loads}
        for job in range(len(jobs)):
            if len(jobs[job].homes) > 1:
                self._add(owners[job], job)
        self.homes: dict[int, frozenset[int]] = {}
        self.heap = [(-load, rank) for rank, load in loads.items()]
        heapq.heapify(self.heap)

    def busiest(self) -> int:
        """Return the rank with the largest load, the lowest number among equals."""
        while -self.heap[0][0] != self.loads[self.heap[0][1]]:
            heapq.heappop(self.heap)
        return self.heap[0][1]

    def relieve(self, rank: int) -> bool:
        """Make the change after which the larger load of the two ranks is least, if any helps."""
        partners = heapq.nsmallest(_PARTNERS, self.loads, key=lambda r: (self.loads[r], r))
        best, change = self.loads[rank], None
        for mine in self.owned[rank].values():
            job = mine[-1]
            for partner in partners:
                if partner == rank or not self._allowed(job, partner):
                    continue
                for other in (None, *(theirs[-1] for theirs in self.owned[partner].values())):
                    if other is not None and not self._allowed(other, rank):
                        continue
                    shift = self._cost(job) - self._cost(other)
                    after = max(self.loads[rank] - shift, self.loads[partner] + shift)
                    if after < best * (1 - 1e-9):
                        best, change = after, (job, other, partner)
        if change is None:
            return False
        job, other, partner = change
        self._move(job, partner)
        if other is not None:
            self._move(other, rank)
        return True

    def _cost(self, job: int | None) -> float:
        return 0.0 if job is None else self.jobs[job].cost

    def _allowed(self, job: int, rank: int) -> bool:
        homes = self.jobs[job].homes
        if len(homes) == len(self.loads):
            return True
        if id(homes) not in self.homes:
            self.homes[id(homes)] = frozenset(homes)
        return rank in self.homes[id(homes)]

    def _add(self, rank: int, job: int) -> None:
        key = (self.jobs[job].cost, id(self.jobs[job].homes))
        self.owned[rank].setdefault(key, []).append(job)

    def _move(self, job: int, rank: int) -> None:
        before = self.owners[job]
        key = (self.jobs[job].cost, id(self.jobs[job].homes))
        self.owned[before][key].remove(job)
        if not self.owned[before][key]:
            del self.owned[before][key]
        self._add(rank, job)
        self.owners[job] = rank
        for changed, sign in ((before, -1.0), (rank, 1.0)):
            self.loads[changed] += sign * self.jobs[job].cost
            heapq.heappush(self.heap, (-self.loads[changed], changed))
