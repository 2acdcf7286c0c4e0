"""Moves shards to the owners of whole matrices, and updates back: the only file that communicates.

One exchange serves all parameters that lie on the same ranks. What travels where is decided by the
plan; what is sent and what happens to it is decided by the caller.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.geometry import Segment, coordinate_of, segments
from titan_muon.distributed.packets import HEADER, Parcel, Route, channel_layout, route
from titan_muon.distributed.plan import Channel, Plan
from titan_muon.distributed.wire import (
    body_views,
    header_of,
    local_views,
    pack,
    power_of_two,
    unit_views,
)

__all__ = ["Arrival", "Batch", "Exchange", "Sources", "Traffic"]


class Sources(Protocol):
    """Local tensors of one stage, as the caller provides them."""

    def tensor(self, param: int, channel: int) -> Tensor:
        """Return the flat local tensor of one channel."""
        ...

    def present(self, param: int) -> bool:
        """Whether this rank has a gradient for the parameter."""
        ...

    def square_sum(self, param: int, pieces: Sequence[Segment]) -> Tensor | None:
        """Return the sum of squares of the weights in the rectangles, or None if unused."""
        ...


@dataclass
class Batch:
    """Matrices of one shape and group, whole, on their owner.

    Args:
        units: Indices in ``plan.units``.
        group: The parameters' group.
        stack: (B, M, N).
        buffers: State buffers by name, (B, M, N) or (B, M, 1).
        square_sums: (B,) float32, sums of squares of the weights; None if unused.
        flags: (B,) float32, 1 where some rank had a gradient; None where that is certain.
    """

    units: tuple[int, ...]
    group: int
    stack: Tensor
    buffers: dict[str, Tensor]
    square_sums: Tensor | None
    flags: Tensor | None


@dataclass(frozen=True)
class Arrival:
    """One rectangle set of one update or buffer, back on a rank that holds it.

    Args:
        param: Index of the parameter.
        channel: 0 for the update, else the index of the buffer's channel.
        pieces: Where it goes in the flat local tensor.
        values: The rectangles.
        scale: 0-d factor of the values.
        flag: 0-d, 1 where some rank had a gradient; None where that is certain.
    """

    param: int
    channel: int
    pieces: tuple[Segment, ...]
    values: list[Tensor]
    scale: Tensor | None
    flag: Tensor | None


@dataclass
class Traffic:
    """What one rank really did; the tests hold it against the plan.

    Args:
        bytes_sent: To other ranks.
        collectives: All-to-alls.
        matrices: Matrices computed.
    """

    bytes_sent: int = 0
    collectives: int = 0
    matrices: int = 0


@dataclass
class _Message:
    stage: int
    received: Tensor
    sent: Tensor
    work: Any
    local: list[Arrival] = field(default_factory=list)


class Exchange:
    """The packets of one rank under one plan, with persistent buffers.

    Args:
        plan: The plan.
        rank: This rank's global number.
        group: Process group of ``plan.ranks``; None where nothing travels.
        device: Where matrices are computed.
    """

    def __init__(
        self, plan: Plan, rank: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.plan, self.rank, self.group, self.device = plan, rank, group, device
        self.routes = [route(plan, rank, stage) for stage in range(plan.stages)]
        self.traffic = Traffic()
        self._travels = [False] * plan.stages
        self._batches: list[list[tuple[int, ...]]] = [[] for _ in range(plan.stages)]
        self._slots: dict[int, tuple[int, int]] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}
        for unit in plan.units:
            self._travels[unit.stage] |= unit.travels
        for stage in range(plan.stages):
            self._batches[stage] = self._group_units(stage)

    def stage_params(self, stage: int) -> list[int]:
        """Return the parameters of which this rank sends or computes something in a stage."""
        units = {p.unit for p in self.routes[stage][0].sends}
        units.update(u for batch in self._batches[stage] for u in batch)
        travelling = {self.plan.units[u].param for u in units if self._is_source(u)}
        return sorted(travelling)

    def send(self, stage: int, sources: Sources) -> _Message | None:
        """Pack this rank's shards of a stage and start the exchange.

        Args:
            stage: Stage number; stages are sent in order.
            sources: Local tensors. Not modified.

        Collective: all ranks of the plan, in the same order of stages.
        """
        if not self._travels[stage]:
            return None
        there = self.routes[stage][0]
        buffer = self._buffer("send", stage, sum(there.send_bytes))
        for parcel in there.sends:
            param = self.plan.units[parcel.unit].param
            flat = sources.tensor(param, parcel.channel)
            header = self._pack(buffer, parcel, local_views(flat, parcel.segments))
            header[1] = float(sources.present(param))
            if parcel.channel == 0:
                square_sum = sources.square_sum(param, parcel.segments)
                header[2] = 0.0 if square_sum is None else square_sum
        return self._start(stage, "receive", buffer, there)

    def receive(self, stage: int, message: _Message | None, sources: Sources) -> list[Batch]:
        """Wait for a stage and return the whole matrices that this rank computes.

        Args:
            stage: Stage number.
            message: What :meth:`send` returned.
            sources: Local tensors, for matrices that did not have to travel. Not modified.

        Returns:
            Batches in a fixed order; parameters without a gradient are left out where this rank
            alone holds them.
        """
        arrived: dict[tuple[int, int], list[Parcel]] = {}
        if message is not None:
            message.work.wait()
            for parcel in self.routes[stage][0].receives:
                arrived.setdefault((parcel.unit, parcel.channel), []).append(parcel)
        batches = []
        for units in self._batches[stage]:
            if not self.plan.units[units[0]].travels:
                units = tuple(u for u in units if sources.present(self.plan.units[u].param))
                if units:
                    batches.append(self._local_batch(units, sources))
            elif message is not None:
                batches.append(self._arrived_batch(units, arrived, message.received))
            if units:
                self.traffic.matrices += len(units)
        return batches

    def send_back(
        self, stage: int, batches: Sequence[Batch], scales: Sequence[Tensor]
    ) -> _Message | None:
        """Pack the updates and buffers of a stage and start their way back.

        Args:
            stage: Stage number.
            batches: What :meth:`receive` returned, with ``stack`` replaced by the update.
            scales: (B,) float32 for each batch: factor of each update.

        Collective: all ranks of the plan, in the same order of stages.
        """
        local, whole = [], {}
        for batch, scale in zip(batches, scales, strict=True):
            for position, unit in enumerate(batch.units):
                if self.plan.units[unit].travels:
                    whole[unit] = (batch, position, scale)
                else:
                    local += self._local_arrivals(batch, position, scale)
        if not self._travels[stage]:
            empty = torch.empty(0, dtype=torch.uint8)
            return _Message(stage, empty, empty, None, local)
        back = self.routes[stage][1]
        buffer = self._buffer("send back", stage, sum(back.send_bytes))
        for parcel in back.sends:
            batch, position, scale = whole[parcel.unit]
            name = self._channel(parcel).name
            matrix = batch.stack[position] if parcel.channel == 0 else batch.buffers[name][position]
            header = self._pack(buffer, parcel, unit_views(matrix, parcel.segments))
            header[1] = 1.0 if batch.flags is None else batch.flags[position]
            header[2] = scale[position]
        message = self._start(stage, "receive back", buffer, back)
        message.local = local
        return message

    def receive_back(self, message: _Message | None) -> list[Arrival]:
        """Wait for updates and return everything that goes into this rank's shards.

        Args:
            message: What :meth:`send_back` returned.
        """
        if message is None:
            return []
        arrivals = list(message.local)
        if message.work is None:
            return arrivals
        message.work.wait()
        for parcel in self.routes[message.stage][1].receives:
            header = header_of(message.received, parcel.offset)
            scale = power_of_two(header[0]) * header[2] if parcel.channel == 0 else None
            values = list(self._bodies(message.received, parcel))
            param = self.plan.units[parcel.unit].param
            arrivals.append(
                Arrival(param, parcel.channel, parcel.segments, values, scale, header[1])
            )
        return arrivals

    def _pack(self, buffer: Tensor, parcel: Parcel, views: Sequence[Tensor]) -> Tensor:
        """Write a parcel's body and exponent; return its header for the caller to complete."""
        header = header_of(buffer, parcel.offset)
        scaled = parcel.channel == 0 and self._dtype(parcel).itemsize <= 2
        pack(views, list(self._bodies(buffer, parcel)), header, scaled=scaled)
        return header

    def _bodies(self, buffer: Tensor, parcel: Parcel) -> Iterator[Tensor]:
        return body_views(buffer, parcel.offset + HEADER, self._dtype(parcel), parcel.segments)

    def _start(self, stage: int, name: str, buffer: Tensor, packets: Route) -> _Message:
        received = self._buffer(name, stage, sum(packets.receive_bytes))
        work = dist.all_to_all_single(
            received,
            buffer,
            list(packets.receive_bytes),
            list(packets.send_bytes),
            group=self.group,
            async_op=True,
        )
        own = self.plan.ranks.index(self.rank)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += sum(packets.send_bytes) - packets.send_bytes[own]
        return _Message(stage, received, buffer, work)

    def _arrived_batch(
        self,
        units: tuple[int, ...],
        arrived: Mapping[tuple[int, int], list[Parcel]],
        buffer: Tensor,
    ) -> Batch:
        first = self.plan.units[units[0]]
        param = self.plan.params[first.param]
        shape = (len(units), first.rows, first.columns)
        dtype = getattr(torch, param.channels[0].dtype)
        stack = torch.empty(shape, dtype=dtype, device=self.device)
        sums, flags = [], []
        for position, unit in enumerate(units):
            headers = self._assemble(stack[position], arrived[unit, 0], buffer)
            flags.append(headers[:, 1].amax())
            sums.append(headers[:, 2].sum())
        buffers = {}
        for channel, spec in enumerate(param.channels[1:], start=1):
            columns = 1 if spec.by_row else first.columns
            value = torch.empty(
                (len(units), first.rows, columns),
                dtype=getattr(torch, spec.dtype),
                device=self.device,
            )
            for position, unit in enumerate(units):
                for parcel in arrived[unit, channel]:
                    views = unit_views(value[position], parcel.segments)
                    for view, body in zip(views, self._bodies(buffer, parcel), strict=True):
                        view.copy_(body)
            buffers[spec.name] = value
        return Batch(units, param.group, stack, buffers, torch.stack(sums), torch.stack(flags))

    def _assemble(self, matrix: Tensor, parcels: Sequence[Parcel], buffer: Tensor) -> Tensor:
        """Fill a whole matrix from its parcels, all at the scale of the largest; return headers."""
        headers = torch.stack([header_of(buffer, p.offset) for p in parcels])
        scaled = matrix.dtype.itemsize <= 2
        # The matrix is orthogonalized, so only the scales relative to each other matter.
        factors = power_of_two(headers[:, 0] - headers[:, 0].amax()) if scaled else None
        for number, parcel in enumerate(parcels):
            views = unit_views(matrix, parcel.segments)
            for view, body in zip(views, self._bodies(buffer, parcel), strict=True):
                view.copy_(body if factors is None else body * factors[number])
        return headers

    def _local_batch(self, units: tuple[int, ...], sources: Sources) -> Batch:
        first = self.plan.units[units[0]]
        param = self.plan.params[first.param]
        tensors: list[Tensor] = []
        for channel, spec in enumerate(param.channels):
            flats = [sources.tensor(self.plan.units[u].param, channel) for u in units]
            columns = 1 if spec.by_row else first.columns
            value = torch.empty(
                (len(units), first.rows, columns), dtype=flats[0].dtype, device=self.device
            )
            for position, (unit, flat) in enumerate(zip(units, flats, strict=True)):
                pieces = self._own_pieces(unit, channel)
                for view, piece in zip(
                    unit_views(value[position], pieces), local_views(flat, pieces), strict=True
                ):
                    view.copy_(piece)
            tensors.append(value)
        sums = [sources.square_sum(self.plan.units[u].param, self._own_pieces(u, 0)) for u in units]
        known = [s for s in sums if s is not None]
        names = [spec.name for spec in param.channels[1:]]
        return Batch(
            units,
            param.group,
            tensors[0],
            dict(zip(names, tensors[1:], strict=True)),
            torch.stack(known) if known else None,
            None,
        )

    def _local_arrivals(self, batch: Batch, position: int, scale: Tensor) -> list[Arrival]:
        unit = batch.units[position]
        param = self.plan.units[unit].param
        arrivals = []
        for channel, spec in enumerate(self.plan.params[param].channels):
            matrix = (batch.stack if channel == 0 else batch.buffers[spec.name])[position]
            pieces = self._own_pieces(unit, channel)
            factor = scale[position] if channel == 0 else None
            arrivals.append(
                Arrival(param, channel, pieces, unit_views(matrix, pieces), factor, None)
            )
        return arrivals

    def _own_pieces(self, unit: int, channel: int) -> tuple[Segment, ...]:
        param = self.plan.params[self.plan.units[unit].param]
        layout, rule = channel_layout(param, channel)
        coordinate = coordinate_of(layout, self.rank)
        return segments(layout, rule, coordinate, self.plan.units[unit].index)

    def _group_units(self, stage: int) -> list[tuple[int, ...]]:
        grouped: dict[tuple[Any, ...], list[int]] = {}
        for index, unit in enumerate(self.plan.units):
            if unit.stage == stage and unit.owner == self.rank:
                param = self.plan.params[unit.param]
                key = (param.group, unit.rows, unit.columns, unit.travels, param.channels)
                grouped.setdefault(key, []).append(index)
        return [tuple(units) for units in grouped.values()]

    def _is_source(self, unit: int) -> bool:
        return bool(self._own_pieces(unit, 0))

    def _channel(self, parcel: Parcel) -> Channel:
        return self.plan.params[self.plan.units[parcel.unit].param].channels[parcel.channel]

    def _dtype(self, parcel: Parcel) -> torch.dtype:
        return getattr(torch, self._channel(parcel).dtype)

    def _buffer(self, name: str, stage: int, size: int) -> Tensor:
        """Return a persistent byte buffer; stages alternate between two of each kind."""
        key = (name, stage % 2)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffers[key][:size]
