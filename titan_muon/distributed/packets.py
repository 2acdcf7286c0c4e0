"""What one rank packs for whom, byte by byte. Pure: both ends of a message agree on offsets.

[Note: packets]
A packet is what one rank sends to another in one stage and direction: parcels one after another,
by unit, then by channel. A parcel is what the sender holds of one matrix in one channel, its
rectangles packed row by row, at a multiple of 32 bytes, after a header of float32 numbers: the
exponent of the body's scale; 1 if there was a gradient; on the way there the sum of squares of the
weights, the largest magnitude and the sum of squares of the direction, on the way back the scale of
the update; nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from titan_muon.distributed.geometry import Segment, coordinate_of, segments
from titan_muon.distributed.layout import Layout
from titan_muon.distributed.matrices import MatrixRule, by_row
from titan_muon.distributed.plan import Plan, PlanParam, Unit

__all__ = ["HEADER", "Parcel", "Route", "route"]

# Multiples of 8 elements of every dtype that travels, so that kernels may load them in vectors.
HEADER = 32
_ALIGN = 32


@dataclass(frozen=True)
class Parcel:
    """One matrix's share of one packet.

    Args:
        unit: Index in ``plan.units``.
        channel: Index in the channels of the unit's parameter.
        peer: Position in ``plan.ranks`` of the rank at the other end.
        offset: First byte, from the start of the buffer with all packets of one end.
        segments: The rectangles, in packed order.
    """

    unit: int
    channel: int
    peer: int
    offset: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Route:
    """All packets of one rank in one stage and direction.

    Args:
        sends, receives: Parcels.
        send_bytes, receive_bytes: Bytes to and from each of ``plan.ranks``.
    """

    sends: tuple[Parcel, ...]
    send_bytes: tuple[int, ...]
    receives: tuple[Parcel, ...]
    receive_bytes: tuple[int, ...]


def route(plan: Plan, rank: int, stage: int) -> tuple[Route, Route]:
    """Return the packets of one rank in one stage: to the owners, and back.

    Args:
        plan: The plan.
        rank: Global rank.
        stage: Stage number.
    """
    units = [(i, u) for i, u in enumerate(plan.units) if u.stage == stage and u.travels]
    position = {r: p for p, r in enumerate(plan.ranks)}
    count = len(plan.ranks)
    there = _Side(count), _Side(count)
    back = _Side(count), _Side(count)
    for index, unit in units:
        param = plan.params[unit.param]
        for channel, pieces in enumerate(_pieces(param, unit, rank)):
            if pieces and _sends(param, channel, rank, unit.owner):
                there[0].add(plan, index, channel, position[unit.owner], pieces)
            if pieces:
                back[1].add(plan, index, channel, position[unit.owner], pieces)
        if unit.owner != rank:
            continue
        for peer in param.layout.ranks:
            for channel, pieces in enumerate(_pieces(param, unit, peer)):
                if pieces and _sends(param, channel, peer, rank):
                    there[1].add(plan, index, channel, position[peer], pieces)
                if pieces:
                    back[0].add(plan, index, channel, position[peer], pieces)
    return _join(*there), _join(*back)


def channel_layout(param: PlanParam, channel: int) -> tuple[Layout, MatrixRule]:
    """Return layout and rule of what one channel of a parameter holds."""
    if not param.channels[channel].by_row:
        return param.layout, param.rule
    rule = by_row(param.rule)
    return param.layout.by_row(rule.shape), rule


def parcel_bytes(dtype: str, pieces: Sequence[Segment]) -> int:
    """Return the bytes of a parcel, header and alignment included."""
    itemsize = getattr(torch, dtype).itemsize
    body = sum(s.rows * s.columns for s in pieces) * itemsize
    return HEADER + -(-body // _ALIGN) * _ALIGN


def _pieces(param: PlanParam, unit: Unit, rank: int) -> Iterator[tuple[Segment, ...]]:
    for channel in range(len(param.channels)):
        layout, rule = channel_layout(param, channel)
        yield segments(layout, rule, coordinate_of(layout, rank), unit.index)


def _sends(param: PlanParam, channel: int, sender: int, owner: int) -> bool:
    """Whether a rank is the one of its replicas that sends: the one in the owner's replica."""
    layout, _ = channel_layout(param, channel)
    mine, theirs = coordinate_of(layout, sender), coordinate_of(layout, owner)
    return all(
        cut.dim is not None or a == b for cut, a, b in zip(layout.cuts, mine, theirs, strict=True)
    )


class _Side:
    """Parcels of one end, collected for each peer in the order in which units come."""

    def __init__(self, peers: int) -> None:
        self.parcels: list[list[tuple[int, int, int, tuple[Segment, ...]]]] = [
            [] for _ in range(peers)
        ]
        self.used = [0] * peers

    def add(
        self, plan: Plan, unit: int, channel: int, peer: int, pieces: tuple[Segment, ...]
    ) -> None:
        self.parcels[peer].append((unit, channel, self.used[peer], pieces))
        param = plan.params[plan.units[unit].param]
        self.used[peer] += parcel_bytes(param.channels[channel].dtype, pieces)

    def placed(self) -> Iterator[Parcel]:
        start = 0
        for peer, parcels in enumerate(self.parcels):
            for unit, channel, offset, pieces in parcels:
                yield Parcel(unit, channel, peer, start + offset, pieces)
            start += self.used[peer]


def _join(sends: _Side, receives: _Side) -> Route:
    return Route(
        tuple(sends.placed()), tuple(sends.used), tuple(receives.placed()), tuple(receives.used)
    )
