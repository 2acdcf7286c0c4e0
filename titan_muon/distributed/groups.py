"""Process groups for sets of ranks, and the one check that all ranks made the same plan."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from titan_muon.distributed.plan import Plan

__all__ = ["agree_on_plan", "create_groups", "group_of"]


def group_of(ranks: tuple[int, ...], meshes: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks; None for a single rank.

    Args:
        ranks: Global ranks, ascending.
        meshes: Device meshes of these ranks; one with a single axis has such a group already.

    Collective: all of ``ranks`` call; a group that is not the world's is created once and kept.
    """
    if len(ranks) == 1:
        return None
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    for mesh in meshes:
        axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        if len(axes) == 1:
            return mesh.get_group(axes[0])
    return _subgroup(ranks)


def create_groups(sets: Iterable[tuple[int, ...]]) -> None:
    """Create, on all ranks alike, the process groups that any of them will ask for.

    A group made by its own ranks alone advances torch's count of groups there and not elsewhere;
    the next group or device mesh would get one name here and another there, and hang.

    Args:
        sets: This rank's sets of ranks, each ascending.

    Collective: all ranks of the world, at construction of an optimizer whose ranks differ (pipeline
    stages).
    """
    if not dist.is_initialized():
        return
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(set(sets)))
    groups = _SUBGROUPS.setdefault(dist.group.WORLD, {})
    everyone = tuple(range(dist.get_world_size()))
    for ranks in sorted({ranks for mine in gathered for ranks in mine}):
        if 1 < len(ranks) and ranks != everyone and ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))


# Groups live as long as the process group of the world, not by its id, which a new one may get.
_SUBGROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def _subgroup(ranks: tuple[int, ...]) -> Any:
    groups = _SUBGROUPS.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


def agree_on_plan(
    plan: Plan,
    options: Sequence[Mapping[str, str]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Check that all ranks of a plan made the same one, and will compute alike.

    Args:
        plan: This rank's plan.
        options: What else must be alike: each param group's options by name, written out.
        group: Process group of the plan's ranks.
        device: A device that the group communicates on.

    Raises:
        RuntimeError: On every rank alike; names the first parameter that differs.

    Collective: all ranks of the group; two all-reduces, once for each plan.
    """
    if group is None:
        return
    text = repr((plan.fingerprint(), *(sorted(o.items()) for o in options))).encode()
    digest = int(hashlib.sha256(text).hexdigest()[:15], 16)
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, negative_lowest = extremes.tolist()
    if highest == -negative_lowest:
        return
    summaries: list[Any] = [None] * len(plan.ranks)
    mine = [(p.name, p.layout.shape, p.layout.mesh_shape, p.kind) for p in plan.params]
    dist.all_gather_object(summaries, (dist.get_rank(), list(options), mine), group=group)
    raise RuntimeError(_difference(summaries))


def _difference(summaries: list[Any]) -> str:
    rank0, options, first = summaries[0]
    for rank, others, _ in summaries[1:]:
        for a, b in zip(options, others, strict=False):
            for key in sorted({*a, *b}):
                if a.get(key) != b.get(key):
                    return (
                        f"ranks disagree on an option: {key} = {a.get(key)} on rank {rank0} and "
                        f"{b.get(key)} on rank {rank}; say the same on all ranks"
                    )
    for rank, _, other in summaries[1:]:
        if other == first:
            continue
        for position, (a, b) in enumerate(zip(first, other, strict=False)):
            if a != b:
                return (
                    f"ranks disagree on the Muon parameters: number {position} is {a} on rank "
                    f"{rank0} and {b} on rank {rank}; build model and param groups alike on all "
                    "ranks"
                )
        return (
            f"ranks disagree on the Muon parameters: rank {rank0} has {len(first)}, rank {rank} "
            f"has {len(other)}; build model and param groups alike on all ranks"
        )
    return (
        "ranks disagree on the plan of the exchange although their parameters are alike; use the "
        "same versions, options and kind of device on all ranks"
    )
