"""What a plan says, as plain values: the content of ``titan-muon plan``."""

from dataclasses import dataclass
from typing import Any

from titan_muon.cli.rates import Rates, Times

__all__ = ["GroupReport", "LayoutReport", "ParameterReport", "Report", "SetReport"]


@dataclass(frozen=True)
class LayoutReport:
    """Parameters of one group with the same mesh and placements.

    Args:
        layout: Placements and the mesh axes that they are on.
        tensors, parameters: Tensors and their elements.
    """

    layout: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class GroupReport:
    """One param group, over all pipeline stages.

    Args:
        algorithm: Its title.
        options: All of them.
        tensors, parameters: Tensors and their elements.
        layouts: Where they lie.
        matrices: Orthogonalized a step; 0 for an elementwise algorithm.
        owners: Ranks that compute one or more.
        fewest, most: Matrices of the rank with the fewest and the most.
        bytes_sent: A step, mean over the ranks.
        most_bytes_sent: A step, of the rank that sends most.
        flops: A step, all ranks together; symmetric products counted half.
        most_flops: A step, of the rank with most work.
        state_bytes: Of the rank with the largest state.
    """

    algorithm: str
    options: dict[str, Any]
    tensors: int
    parameters: int
    layouts: list[LayoutReport]
    matrices: int
    owners: int
    fewest: int
    most: int
    bytes_sent: float
    most_bytes_sent: int
    flops: float
    most_flops: float
    state_bytes: int


@dataclass(frozen=True)
class ParameterReport:
    """One parameter; fields as in :class:`GroupReport`.

    Args:
        name: Canonical name.
        group: Index of its group.
        reason: Why it is there.
        shape: Global shape.
        sizes: Of its matrices: count, rows, columns.
        stages: Those in which its matrices are computed.
    """

    name: str
    group: int
    algorithm: str
    reason: str
    shape: list[int]
    layout: str
    matrices: int
    sizes: list[list[int]]
    owners: int
    stages: list[int]
    bytes_sent: float
    flops: float
    state_bytes: int


@dataclass(frozen=True)
class SetReport:
    """Matrices that are planned together: those on the same ranks.

    Args:
        pipeline_stage: Whose ranks they are.
        first_rank, ranks: The lowest of the ranks, and how many they are.
        matrices, idle: Matrices, and ranks that compute none.
        stages: Of the step.
        collectives: All-to-alls of a step.
        balance: Mean work over the largest; 1 is perfect.
        best_balance: No assignment of whole matrices has a better one.
        bytes_sent, most_bytes_sent, most_flops: As in :class:`GroupReport`.
        work_bytes: Work memory of the fullest stage of a rank.
        buffer_bytes: Packet buffers of a rank.
    """

    pipeline_stage: int
    first_rank: int
    ranks: int
    matrices: int
    idle: int
    stages: int
    collectives: int
    balance: float
    best_balance: float
    bytes_sent: float
    most_bytes_sent: int
    most_flops: float
    work_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything.

    Args:
        run: What was planned: model, optimizer, parallelism.
        world_size: Number of ranks.
        groups, sets, parameters: In the order of the model.
        state_bytes: Of the rank with the largest optimizer state.
        milliseconds: Modelled, of the slowest rank.
        rates: That the model assumes.
        warnings: What to look at before the run.
        notes: What else to know.
    """

    run: dict[str, Any]
    world_size: int
    groups: list[GroupReport]
    sets: list[SetReport]
    parameters: list[ParameterReport]
    state_bytes: int
    milliseconds: Times
    rates: Rates
    warnings: list[str]
    notes: list[str]
