"""The Muon-family parameters that lie on the same ranks: their plan, and the parts of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.exchange import Exchange, Message
from titan_muon.distributed.groups import agree_on_plan, group_of
from titan_muon.distributed.indices import BatchIndex, StageIndex
from titan_muon.distributed.layout import is_dtensor
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.distributed.plan import make_plan
from titan_muon.distributed.tables import BatchTables, rank_tables
from titan_muon.distributed.tensors import compute_device, local_of
from titan_muon.distributed.wire import exponents, power_of_two, read_headers, write_headers
from titan_muon.kernels.pieces import TensorList
from titan_muon.kernels.pieces_dispatch import select_piece_operations
from titan_muon.optim.algorithms.base import get_algorithm
from titan_muon.optim.groups import group_names
from titan_muon.optim.matrix_math import batch_update, normalizers, stack_dtype
from titan_muon.optim.members import Gradients, Member, kinds_of
from titan_muon.optim.state import MOMENTUM

__all__ = ["MatrixWork", "matrix_works"]


def matrix_works(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Tensor]],
    rules: Mapping[int, MatrixRule],
) -> list["MatrixWork"]:
    """Sort all Muon-family parameters by the ranks they lie on and plan each set.

    Args:
        groups: All param groups, complete.
        state: Optimizer state.
        rules: Matrix rule of each Muon-family parameter by ``id``.

    Returns:
        One entry for each set of ranks, in an order that all ranks share.

    Raises:
        NotImplementedError: A parameter has a ``Partial`` placement.
        RuntimeError: Ranks made different plans.

    Collective: all ranks of each set, where it is more than one.
    """
    by_ranks: dict[tuple[Any, ...], list[Member]] = {}
    for group in groups:
        if not get_algorithm(group["algorithm"]).is_matrix:
            continue
        names = group_names(group, group["params"])
        for param, name in zip(group["params"], names, strict=True):
            member = Member(param, name, group, rules[id(param)], state[param])
            device = compute_device(param)
            key = (tuple(sorted(member.layout.ranks)), str(device), is_dtensor(param))
            by_ranks.setdefault(key, []).append(member)
    return [MatrixWork(by_ranks[key], key[0], distributed=key[2]) for key in sorted(by_ranks)]


@dataclass
class Batch:
    """Whole matrices of one shape and kind on their owner.

    Args:
        tables, index: Where they come from and go to.
        stack: (B, M, N): directions, then updates.
        normalized: Whether the directions are divided by safety times their norm already.
        buffers: State buffers by name, (B, M, N) or (B, M, 1).
        square_sums: (B,), sums of squares of the weights; None where no option needs them.
        flags: (B,), 1 where some rank had a gradient; None where that is certain.
        scales: (B,), how far the updates go; set by the arithmetic.
    """

    tables: BatchTables
    index: BatchIndex
    stack: Tensor
    normalized: bool
    buffers: dict[str, Tensor]
    square_sums: Tensor | None
    flags: Tensor | None
    scales: Tensor | None = None


class MatrixWork:
    """One set of parameters; its methods are the parts of a step, in order.

    Args:
        members: Parameters on these ranks, in an order that all ranks share.
        ranks: Global ranks, ascending.
        distributed: Whether the parameters are DTensors.

    Collective: all of ``ranks``.
    """

    def __init__(
        self, members: Sequence[Member], ranks: tuple[int, ...], *, distributed: bool
    ) -> None:
        self.members = list(members)
        self.device = compute_device(members[0].param)
        self.kinds = kinds_of(self.members)
        limit = max(m.group["max_stage_bytes"] for m in members)
        self.plan = make_plan(
            [m.plan_param(kind) for m, kind in zip(members, self.kinds, strict=True)],
            max_stage_bytes=limit,
        )
        process_group = group_of(ranks) if distributed else None
        agree_on_plan(self.plan, process_group, self.device)
        rank = dist.get_rank() if distributed else ranks[0]
        self.tables = rank_tables(self.plan, rank)
        self.exchange = Exchange(self.plan, rank, process_group, self.device)
        self.stages = range(self.plan.stages)
        self._indices = [StageIndex(stage, self.device) for stage in self.tables.stages]
        self._states: dict[tuple[int, int], TensorList] = {}
        own = self.tables.own_units
        own_params = [self.plan.units[u].param for u in own]
        self._own_params = torch.tensor(own_params, dtype=torch.int64, device=self.device)
        self._nothing = torch.zeros((len(own), 2), device=self.device)
        # One member stands for its kind: all have the same options and dtypes.
        self._of_kind = {kind: m for kind, m in zip(self.kinds, members, strict=True)}
        self._ops = {
            kind: select_piece_operations(self.device, m.dtypes())
            for kind, m in self._of_kind.items()
        }

    def begin(self) -> None:
        """Advance the momentum of every parameter and measure its direction."""
        self._grads = Gradients(self.members)
        self._params = TensorList(m.shard() for m in self.members)
        measured = [
            self._ops[kind]
            .advance(self._grads.grads, self._grads.momenta, table, **self._momentum_options(kind))
            .to(self.device)
            for kind, table in self.tables.own.items()
        ]
        # Every own piece has one kind and is zero in the others.
        self._statistics = sum(measured[1:], start=measured[0]) if measured else self._nothing
        self._factors = {
            kind: normalizers(self._statistics[:, 1], self._of_kind[kind].group)
            for kind in self.tables.own
        }
        self._sent = exponents(self._statistics[:, 0])
        flags = self._grads.flags(self.device)[self._own_params]
        self._squares = self._weight_squares()
        self._headers = torch.stack([self._sent, flags, self._squares], dim=1).float()
        self._flags = None if self._grads.all_present else flags

    def send(self, stage: int) -> Message | None:
        """Pack this rank's shards of a stage and start their way to the owners.

        Collective: all ranks of the set.
        """
        if not self.exchange.travels[stage]:
            return None
        tables = self.tables.stages[stage]
        packets = self.exchange.outbox(stage, tables, "there")
        for (kind, channel), table in tables.send.items():
            flat = packets.view(self._dtype(kind, channel))
            if channel == 0:
                factors = power_of_two(-self._sent) if flat.dtype.itemsize <= 2 else None
                options = self._momentum_options(kind)
                self._ops[kind].emit(
                    self._grads.grads, self._grads.momenta, flat, table, factors, **options
                )
            else:
                self._ops[kind].copy_to_flat(self._state(kind, channel), flat, table)
        index = self._indices[stage]
        write_headers(packets, index.sent, self._headers[index.pieces])
        return self.exchange.start(stage, tables, "there")

    def receive(self, stage: int, message: Message | None) -> list[Batch]:
        """Return the whole matrices that this rank computes in a stage."""
        tables, indices = self.tables.stages[stage], self._indices[stage]
        packets = headers = None
        if message is not None:
            packets = message.wait()
            headers = read_headers(packets, indices.received)
        batches = []
        for batch, index in zip(tables.batches, indices.batches, strict=True):
            if not batch.travels:
                if self._grads.any_present(self.plan.units[u].param for u in batch.units):
                    batches.append(self._cut(batch, index))
            elif packets is not None and headers is not None:
                batches.append(self._assemble(batch, index, packets, headers))
        self.exchange.traffic.matrices += sum(len(b.tables.units) for b in batches)
        return batches

    def compute(self, batches: Sequence[Batch]) -> None:
        """Turn the directions of every batch into updates."""
        for batch in batches:
            member = self._of_kind[batch.tables.kind]
            batch.stack, batch.scales = batch_update(
                batch.stack,
                batch.buffers,
                batch.square_sums,
                member.algorithm,
                member.group,
                normalized=batch.normalized,
            )

    def send_back(self, stage: int, batches: Sequence[Batch]) -> Message | None:
        """Write what stays on this rank, and start the way back of everything else.

        Collective: all ranks of the set.
        """
        tables = self.tables.stages[stage]
        for batch in batches:
            if not batch.tables.travels:
                self._write_own(batch)
        if not self.exchange.travels[stage]:
            return None
        packets = self.exchange.outbox(stage, tables, "back")
        for batch in batches:
            if batch.tables.travels:
                self._pack_back(batch, packets, self._indices[stage].returned)
        return self.exchange.start(stage, tables, "back")

    def land(self, message: Message | None) -> None:
        """Write the updates and buffers that come back into this rank's shards."""
        if message is None:
            return
        tables = self.tables.stages[message.stage]
        packets = message.wait()
        headers = read_headers(packets, self._indices[message.stage].landed)
        factors = power_of_two(headers[:, 0]) * headers[:, 2]
        keep = None if self._grads.all_present else headers[:, 1].contiguous()
        for (kind, channel), table in tables.land.items():
            member, flat = self._of_kind[kind], packets.view(self._dtype(kind, channel))
            if channel:
                state = self._state(kind, channel)
                self._ops[kind].copy_to_tensors(flat, state, table, None, keep)
                continue
            self._ops[kind].write(
                self._params, flat, table, factors, **member.write_options(self.device), keep=keep
            )
            if keep is not None:
                self._grads.commit(table, keep)

    def finish(self) -> None:
        """Write back what had to be copied, and let go of the step's tensors."""
        for member, flat in zip(self.members, self._params, strict=True):
            member.restore(flat)
        del self._grads, self._params, self._statistics, self._factors
        del self._sent, self._squares, self._headers, self._flags

    def _cut(self, tables: BatchTables, index: BatchIndex) -> Batch:
        """Fill a batch from this rank's own tensors."""
        kind = tables.kind
        member, ops = self._of_kind[kind], self._ops[kind]
        units = [self.plan.units[u] for u in tables.units]
        shape = (len(units), units[0].rows, units[0].columns)
        dtype = member.state[MOMENTUM].dtype
        if ops.FUSES_NORM:
            dtype = stack_dtype(member.group, self.device, dtype)
        stack = torch.empty(shape, dtype=dtype, device=self.device)
        ops.emit(
            self._grads.grads,
            self._grads.momenta,
            stack.view(-1),
            tables.inward[0],
            self._factors[kind] if ops.FUSES_NORM else None,
            **self._momentum_options(kind),
        )
        buffers = {}
        for channel, spec in enumerate(member.channels[1:], start=1):
            value = self._buffer_stack(shape, kind, channel)
            ops.copy_to_flat(self._state(kind, channel), value.view(-1), tables.inward[channel])
            buffers[spec.name] = value
        squares = self._squares[index.own_pieces]
        return Batch(tables, index, stack, ops.FUSES_NORM, buffers, squares, None)

    def _assemble(
        self, tables: BatchTables, index: BatchIndex, packets: Tensor, headers: Tensor
    ) -> Batch:
        """Fill a batch from parcels, each matrix at the scale of its largest parcel."""
        kind = tables.kind
        member, ops = self._of_kind[kind], self._ops[kind]
        units = [self.plan.units[u] for u in tables.units]
        shape = (len(units), units[0].rows, units[0].columns)
        stack = torch.empty(shape, dtype=self._dtype(kind, 0), device=self.device)
        factors = _relative_scales(headers, index) if stack.dtype.itemsize <= 2 else None
        ops.copy_to_tensors(packets.view(stack.dtype), [stack], tables.inward[0], factors)
        buffers = {}
        for channel, spec in enumerate(member.channels[1:], start=1):
            value = self._buffer_stack(shape, kind, channel)
            ops.copy_to_tensors(packets.view(value.dtype), [value], tables.inward[channel])
            buffers[spec.name] = value
        by_matrix = headers[index.padded].where(index.there.unsqueeze(-1), 0.0)
        flags, squares = by_matrix[..., 1].amax(dim=1), by_matrix[..., 2].sum(dim=1)
        return Batch(tables, index, stack, False, buffers, squares, flags)

    def _write_own(self, batch: Batch) -> None:
        kind, tables = batch.tables.kind, batch.tables
        member, ops = self._of_kind[kind], self._ops[kind]
        factors = torch.zeros(
            len(self.tables.own_units), device=self.device, dtype=self._wide(kind)
        )
        factors[batch.index.own_pieces] = _scales(batch).to(factors.dtype)
        keep = self._flags
        ops.write(
            self._params,
            batch.stack.view(-1),
            tables.inward[0],
            factors,
            **member.write_options(self.device),
            keep=keep,
        )
        for channel, spec in enumerate(member.channels[1:], start=1):
            value = batch.buffers[spec.name].view(-1)
            state = self._state(kind, channel)
            ops.copy_to_tensors(value, state, tables.inward[channel], None, keep)

    def _pack_back(self, batch: Batch, packets: Tensor, index: Tensor) -> None:
        kind, tables = batch.tables.kind, batch.tables
        member, ops = self._of_kind[kind], self._ops[kind]
        flat = packets.view(self._dtype(kind, 0))
        sent = torch.zeros(len(index), device=self.device)
        factors = None
        # In its own dtype an update travels as it is.
        if flat.dtype.itemsize <= 2 and flat.dtype != batch.stack.dtype:
            sent = exponents(ops.statistics([batch.stack], tables.outward[0])[:, 0])
            factors = power_of_two(-sent)
        ops.copy_to_flat([batch.stack], flat, tables.outward[0], factors)
        for channel, spec in enumerate(member.channels[1:], start=1):
            value = batch.buffers[spec.name]
            ops.copy_to_flat([value], packets.view(value.dtype), tables.outward[channel])
        parcels, positions = batch.index.back_parcels, batch.index.back_positions
        flags = torch.ones_like(_scales(batch)) if batch.flags is None else batch.flags
        headers = torch.stack([flags, _scales(batch)], dim=1)[positions].float()
        headers = torch.cat([sent[parcels].view(-1, 1), headers], dim=1)
        write_headers(packets, index[parcels], headers)

    def _weight_squares(self) -> Tensor:
        """Return the sum of squares of the weights of each own piece; zeros where not needed."""
        result = self._nothing[:, 0]
        for kind, table in self.tables.own.items():
            if self._of_kind[kind].group["adjust_lr_fn"] == "match_param_rms":
                squares = self._ops[kind].statistics(self._params, table)[:, 1]
                result = result + squares.to(self.device)
        return result

    def _buffer_stack(self, shape: tuple[int, int, int], kind: int, channel: int) -> Tensor:
        columns = 1 if self._of_kind[kind].channels[channel].by_row else shape[2]
        return torch.empty(
            (*shape[:2], columns), dtype=self._dtype(kind, channel), device=self.device
        )

    def _state(self, kind: int, channel: int) -> TensorList:
        """Return the local buffers of one channel; only those of the kind are ever used."""
        if (kind, channel) not in self._states:
            name = self._of_kind[kind].channels[channel].name
            self._states[kind, channel] = TensorList(
                local_of(m.state[name]) if name in m.state else m.momentum for m in self.members
            )
        return self._states[kind, channel]

    def _momentum_options(self, kind: int) -> dict[str, Any]:
        group = self._of_kind[kind].group
        sign = -1.0 if group["maximize"] else 1.0
        return {"momentum": group["momentum"], "nesterov": group["nesterov"], "sign": sign}

    def _dtype(self, kind: int, channel: int) -> torch.dtype:
        return self._of_kind[kind].channel_dtype(channel)

    def _wide(self, kind: int) -> torch.dtype:
        return torch.promote_types(self._of_kind[kind].param.dtype, torch.float32)


def _relative_scales(headers: Tensor, index: BatchIndex) -> Tensor:
    """Return (parcels of the stage,) factors that bring each matrix to one scale.

    Only the scales within one matrix matter: it is orthogonalized.
    """
    sent = headers[:, 0]
    largest = sent[index.padded].where(index.there, -torch.inf).amax(dim=1)
    factors = torch.ones_like(sent)
    relative = sent[index.parcels] - largest[index.positions]
    factors[index.parcels] = power_of_two(relative)
    return factors


def _scales(batch: Batch) -> Tensor:
    if batch.scales is None:
        raise AssertionError("the batch has not been computed")
    return batch.scales
