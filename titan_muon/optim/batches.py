"""Whole matrices of one shape and kind on their owner: filled, and emptied again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_muon.distributed.indices import BatchIndex
from titan_muon.distributed.plan import Unit
from titan_muon.distributed.tables import BatchTables
from titan_muon.distributed.wire import Back, There, columns, parcel_scales, rows, write_headers
from titan_muon.optim.kinds import Kind
from titan_muon.optim.matrix_math import inverse_norms, stack_dtype, start_of
from titan_muon.optim.step_shards import StepShards

__all__ = ["Batch", "assemble", "cut", "pack_back", "write_own"]


@dataclass
class Batch:
    """A batch between its arrival and its departure.

    Args:
        tables, index: Where its matrices come from and go to.
        kind: Their kind.
        stack: (B, M, N): directions, then updates.
        normalized: Whether the directions have the norm at which the iteration starts.
        buffers: State buffers by name, (B, M, N) or (B, M, 1).
        square_sums: (B,), sums of squares of the weights; None where no option needs them.
        flags: (B,), 1 where some rank had a gradient; None where that is certain.
        lengths: (B,), how far the updates go; set by the arithmetic.
    """

    tables: BatchTables
    index: BatchIndex
    kind: Kind
    stack: Tensor
    normalized: bool
    buffers: dict[str, Tensor]
    square_sums: Tensor | None
    flags: Tensor | None
    lengths: Tensor | None = None

    @property
    def reach(self) -> Tensor:
        """(B,), how far the updates go, once that is known."""
        if self.lengths is None:
            raise AssertionError("the batch has not been computed")
        return self.lengths

    @property
    def moves(self) -> Tensor:
        """(B,), 1 where some rank had a gradient."""
        return torch.ones_like(self.reach) if self.flags is None else self.flags


def cut(
    tables: BatchTables, index: BatchIndex, units: Sequence[Unit], kind: Kind, shards: StepShards
) -> Batch:
    """Fill a batch from this rank's own shards."""
    ops, device, measured = kind.ops, index.own_pieces.device, shards.measured
    stack, normalized = _empty_stack(units, kind, kind.state_dtype, device)
    ops.emit(
        shards.gradients.grads,
        shards.gradients.momenta,
        stack.view(-1),
        tables.inward[0],
        measured.inverse_norms * start_of(stack, kind.group) if normalized else None,
        **kind.momentum_options(),
    )
    buffers = {}
    for channel, spec in enumerate(kind.channels[1:], start=1):
        value = _empty_buffer(units, kind, channel, device)
        ops.copy_to_flat(kind.states[channel], value.view(-1), tables.inward[channel])
        buffers[spec.name] = value
    squares = measured.squares[index.own_pieces] if kind.reads_weights else None
    return Batch(tables, index, kind, stack, normalized, buffers, squares, None)


def assemble(
    tables: BatchTables,
    index: BatchIndex,
    units: Sequence[Unit],
    kind: Kind,
    packets: Tensor,
    headers: Tensor,
) -> Batch:
    """Fill a batch from parcels: with the norm at which the iteration starts, or at one scale.

    Args:
        tables, index, units, kind: What the batch consists of.
        packets: Bytes that arrived.
        headers: (parcels, fields), their headers.
    """
    wire = kind.dtype(0)
    stack, normalized = _empty_stack(units, kind, wire, packets.device)
    by_matrix = headers[index.padded].where(index.there, 0.0)
    most, total = (columns(There, x) for x in (by_matrix.amax(dim=1), by_matrix.sum(dim=1)))
    is_scaled = wire.itemsize <= 2
    factors = None
    if normalized:
        inverse = inverse_norms(most.largest, total.squares, stack[0].numel() ** 0.5)
        factors = inverse.mul_(start_of(stack, kind.group))[index.by_parcel]
    elif is_scaled:
        # Only the scales within one matrix matter: it is orthogonalized.
        factors = most.scale.reciprocal()[index.by_parcel]
    if factors is not None and is_scaled:
        factors = factors * columns(There, headers).scale
    kind.ops.copy_to_tensors(packets.view(wire), [stack], tables.inward[0], factors)
    buffers = {}
    for channel, spec in enumerate(kind.channels[1:], start=1):
        value = _empty_buffer(units, kind, channel, packets.device)
        kind.ops.copy_to_tensors(packets.view(value.dtype), [value], tables.inward[channel])
        buffers[spec.name] = value
    square_sums = total.weights if kind.reads_weights else None
    return Batch(tables, index, kind, stack, normalized, buffers, square_sums, most.flag)


def write_own(batch: Batch, shards: StepShards) -> None:
    """Write the updates and buffers of a batch that stays on this rank."""
    kind, tables = batch.kind, batch.tables
    kind.ops.write(
        shards.params,
        batch.stack.view(-1),
        tables.inward[0],
        batch.reach.to(kind.wide)[batch.index.by_piece],
        **kind.write_options(),
        keep=shards.flags,
    )
    for channel, spec in enumerate(kind.channels[1:], start=1):
        value, table = batch.buffers[spec.name].view(-1), tables.inward[channel]
        kind.ops.copy_to_tensors(value, kind.states[channel], table, None, shards.flags)


def pack_back(batch: Batch, packets: Tensor) -> None:
    """Pack the updates and buffers of a batch for the ranks that hold its matrices.

    Args:
        batch: Computed.
        packets: Bytes to send; modified.
    """
    kind, tables, index = batch.kind, batch.tables, batch.index
    flat = packets.view(kind.dtype(0))
    scales, factors = torch.ones_like(index.back_parcels, dtype=torch.float32), None
    # In its own dtype an update travels as it is.
    if flat.dtype.itemsize <= 2 and flat.dtype != batch.stack.dtype:
        scales = parcel_scales(kind.ops.statistics([batch.stack], tables.outward[0])[:, 0])
        scales, factors = scales[index.back_parcels], scales.reciprocal()
    kind.ops.copy_to_flat([batch.stack], flat, tables.outward[0], factors)
    for channel, spec in enumerate(kind.channels[1:], start=1):
        value = batch.buffers[spec.name]
        kind.ops.copy_to_flat([value], packets.view(value.dtype), tables.outward[channel])
    flags, lengths = (x[index.back_matrices] for x in (batch.moves, batch.reach))
    write_headers(packets, index.returned, rows(Back(scales, flags, lengths)))


def _empty_stack(
    units: Sequence[Unit], kind: Kind, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, bool]:
    """Return an empty stack, and whether its directions are normalized as they are written to it.

    Args:
        units, kind: What it is for.
        dtype: Of the directions; they become the iteration's where they are normalized.
        device: Where.
    """
    normalized = kind.ops.FUSES_NORM and not kind.algorithm.reads_directions
    if normalized:
        dtype = stack_dtype(kind.group, device, dtype)
    return torch.empty(_shape(units), dtype=dtype, device=device), normalized


def _shape(units: Sequence[Unit]) -> tuple[int, int, int]:
    return len(units), units[0].rows, units[0].columns


def _empty_buffer(units: Sequence[Unit], kind: Kind, channel: int, device: torch.device) -> Tensor:
    count, rows, columns = _shape(units)
    shape = (count, rows, 1 if kind.channels[channel].by_row else columns)
    return torch.empty(shape, dtype=kind.dtype(channel), device=device)
