"""From plan and packets to the tables by which one rank moves its pieces in one stage. Pure.

[Note: numbers]
Tensors of a table are numbered like the plan's parameters, or 0 for the one stack of a batch.
An own piece is what this rank holds of one unit; own pieces are numbered over all stages. Parcels
of one stage, direction and end are numbered in packet order.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from titan_muon.distributed.geometry import Segment, coordinate_of, segments
from titan_muon.distributed.packets import HEADER, Parcel, Route, channel_layout, route
from titan_muon.distributed.plan import Plan, PlanParam, Unit
from titan_muon.kernels.pieces import PieceTable, Row

__all__ = ["BatchTables", "RankTables", "StageTables", "rank_tables"]


@dataclass(frozen=True)
class BatchTables:
    """Units of one shape and kind that this rank computes in one stage.

    Args:
        units: Indices in ``plan.units``; position b of the stack is ``units[b]``.
        kind: Kind of their parameters.
        travels: Whether they arrive in packets; otherwise they are cut from this rank's tensors.
        inward: For each channel the table that fills the stack: flat side the packet, or this
            rank's tensors on the tensor side and the stack on the flat side.
        outward: For each channel the table from stack to packet; empty where nothing travels.
        parcels: Numbers of the arriving parcels of channel 0, by position in the stack.
        back_parcels: For each position in the stack the numbers of all parcels that leave.
        own_pieces: Own piece of each position; empty where the units travel.
    """

    units: tuple[int, ...]
    kind: int
    travels: bool
    inward: tuple[PieceTable, ...]
    outward: tuple[PieceTable, ...]
    parcels: tuple[tuple[int, ...], ...]
    back_parcels: tuple[tuple[int, ...], ...]
    own_pieces: tuple[int, ...]


@dataclass(frozen=True)
class StageTables:
    """Everything one rank moves in one stage.

    Args:
        there, back: Packets to the owners and back.
        send: By kind and channel, from this rank's tensors to the packet; pieces are own pieces.
        land: By kind and channel, from the packet to this rank's tensors; pieces are parcels.
        batches: What this rank computes.
        send_pieces: Own piece of each parcel of channel 0 that is sent there.
        headers: First float32 of the header of each parcel, for each of sent there (channel 0),
            received there, sent back, received back.
    """

    there: Route
    back: Route
    send: dict[tuple[int, int], PieceTable]
    land: dict[tuple[int, int], PieceTable]
    batches: tuple[BatchTables, ...]
    send_pieces: tuple[int, ...]
    headers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankTables:
    """All tables of one rank.

    Args:
        stages: One entry a stage.
        own: By kind, every element of this rank's shards once: first those of the parameters that
            travel in stage 0, then all others. Pieces are own pieces.
        own_units: Unit of each own piece.
    """

    stages: tuple[StageTables, ...]
    own: tuple[dict[int, PieceTable], dict[int, PieceTable]]
    own_units: tuple[int, ...]


def rank_tables(plan: Plan, rank: int) -> RankTables:
    """Return the tables of one rank.

    Args:
        plan: The plan.
        rank: Global rank.
    """
    builder = _Builder(plan, rank)
    stages = tuple(builder.stage(number) for number in range(plan.stages))
    return RankTables(stages, builder.own_tables(), tuple(builder.own_units))


class _Builder:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.own_units = [i for i in range(len(plan.units)) if self.pieces(i, 0)]
        self.own_piece = {unit: piece for piece, unit in enumerate(self.own_units)}

    def param(self, unit: int) -> PlanParam:
        return self.plan.params[self.plan.units[unit].param]

    def pieces(self, unit: int, channel: int) -> tuple[Segment, ...]:
        """Return what this rank holds of a unit in a channel."""
        layout, rule = channel_layout(self.param(unit), channel)
        coordinate = coordinate_of(layout, self.rank)
        return segments(layout, rule, coordinate, self.plan.units[unit].index)

    def own_tables(self) -> tuple[dict[int, PieceTable], dict[int, PieceTable]]:
        leaving = {u.param for u in self.plan.units if u.travels and u.stage == 0}
        rows: tuple[dict[int, list[Row]], ...] = ({}, {})
        for piece, unit in enumerate(self.own_units):
            is_later = self.plan.units[unit].param not in leaving
            target = rows[is_later].setdefault(self.param(unit).kind, [])
            target += self.local_rows(unit, 0, piece, _NoFlat())
        count = len(self.own_units)
        first, later = ({k: PieceTable(r, count) for k, r in part.items()} for part in rows)
        return first, later

    def stage(self, number: int) -> StageTables:
        there, back = route(self.plan, self.rank, number)
        # On the way there only these are read: a rank may hold rows of a buffer and no column.
        directions = [parcel for parcel in there.sends if parcel.channel == 0]
        return StageTables(
            there,
            back,
            self.by_kind(there.sends, lambda _, parcel: self.own_piece.get(parcel.unit, 0)),
            self.by_kind(back.receives, lambda number, _: number),
            tuple(self.batch(units, there, back) for units in self.grouped(number)),
            tuple(self.own_piece[p.unit] for p in directions),
            tuple(
                tuple(p.offset // 4 for p in parcels)
                for parcels in (directions, there.receives, back.sends, back.receives)
            ),
        )

    def by_kind(
        self, parcels: Sequence[Parcel], piece: Callable[[int, Parcel], int]
    ) -> dict[tuple[int, int], PieceTable]:
        """Return tables between this rank's tensors and its packet."""
        rows: dict[tuple[int, int], list[Row]] = {}
        for number, parcel in enumerate(parcels):
            target = rows.setdefault((self.param(parcel.unit).kind, parcel.channel), [])
            body = _Body(self.body_offset(parcel))
            target += self.local_rows(parcel.unit, parcel.channel, piece(number, parcel), body)
        count = max(len(parcels), len(self.own_units))
        return {key: PieceTable(r, count) for key, r in rows.items()}

    def grouped(self, stage: int) -> list[tuple[int, ...]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, unit in enumerate(self.plan.units):
            if unit.stage == stage and unit.owner == self.rank:
                key = (self.param(index).kind, unit.rows, unit.columns, unit.travels)
                groups.setdefault(key, []).append(index)
        return [tuple(units) for units in groups.values()]

    def batch(self, units: tuple[int, ...], there: Route, back: Route) -> BatchTables:
        first = self.plan.units[units[0]]
        position = {unit: p for p, unit in enumerate(units)}
        channels = range(len(self.param(units[0]).channels))
        if not first.travels:
            return BatchTables(
                units,
                self.param(units[0]).kind,
                False,
                tuple(self.local_table(units, channel) for channel in channels),
                (),
                (),
                (),
                tuple(self.own_piece[u] for u in units),
            )
        arriving = [(n, p) for n, p in enumerate(there.receives) if p.unit in position]
        leaving = [(n, p) for n, p in enumerate(back.sends) if p.unit in position]
        return BatchTables(
            units,
            self.param(units[0]).kind,
            True,
            tuple(self.stack_table(position, arriving, c, len(there.receives)) for c in channels),
            tuple(self.stack_table(position, leaving, c, len(back.sends)) for c in channels),
            _by_position(position, [(n, p) for n, p in arriving if p.channel == 0]),
            _by_position(position, leaving),
            (),
        )

    def local_table(self, units: Sequence[int], channel: int) -> PieceTable:
        rows: list[Row] = []
        for place, unit in enumerate(units):
            flat = _InStack(place, self.plan.units[unit], self.columns(unit, channel))
            rows += self.local_rows(unit, channel, self.own_piece[unit], flat)
        return PieceTable(rows, len(self.own_units))

    def stack_table(
        self,
        position: dict[int, int],
        parcels: Iterable[tuple[int, Parcel]],
        channel: int,
        count: int,
    ) -> PieceTable:
        """Return the table between a stack (tensor side) and a packet (flat side)."""
        rows = []
        for number, parcel in parcels:
            if parcel.channel != channel:
                continue
            unit, columns = self.plan.units[parcel.unit], self.columns(parcel.unit, channel)
            stack, body = _InStack(position[parcel.unit], unit, columns), self.body_offset(parcel)
            for s in parcel.segments:
                offset, stride = stack.place(s)
                rows.append(Row(0, s.rows, s.columns, offset, stride, body, s.columns, number))
                body += s.rows * s.columns
        return PieceTable(rows, count)

    def local_rows(self, unit: int, channel: int, piece: int, flat: "_Flat") -> list[Row]:
        rows = []
        for s in self.pieces(unit, channel):
            offset, stride = flat.place(s)
            rows.append(
                Row(
                    self.plan.units[unit].param,
                    s.rows,
                    s.columns,
                    s.local_offset,
                    s.local_stride,
                    offset,
                    stride,
                    piece,
                )
            )
        return rows

    def columns(self, unit: int, channel: int) -> int:
        by_row = self.param(unit).channels[channel].by_row
        return 1 if by_row else self.plan.units[unit].columns

    def body_offset(self, parcel: Parcel) -> int:
        channel = self.param(parcel.unit).channels[parcel.channel]
        return (parcel.offset + HEADER) // getattr(torch, channel.dtype).itemsize


class _Flat:
    """Where the flat side of a segment is; called once for each segment, in order."""

    def place(self, segment: Segment) -> tuple[int, int]:
        """Return offset and row stride."""
        raise NotImplementedError


class _NoFlat(_Flat):
    def place(self, segment: Segment) -> tuple[int, int]:
        # As on the tensor side, so that one long run stays one.
        return segment.local_offset, segment.local_stride


class _Body(_Flat):
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def place(self, segment: Segment) -> tuple[int, int]:
        start = self.offset
        self.offset += segment.rows * segment.columns
        return start, segment.columns


class _InStack(_Flat):
    def __init__(self, position: int, unit: Unit, columns: int) -> None:
        self.start, self.columns = position * unit.rows * columns, columns

    def place(self, segment: Segment) -> tuple[int, int]:
        return self.start + segment.unit_offset, self.columns


def _by_position(
    position: dict[int, int], parcels: Iterable[tuple[int, Parcel]]
) -> tuple[tuple[int, ...], ...]:
    numbers: list[list[int]] = [[] for _ in position]
    for number, parcel in parcels:
        numbers[position[parcel.unit]].append(number)
    return tuple(tuple(n) for n in numbers)
