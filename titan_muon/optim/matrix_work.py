"""The Muon-family parameters that lie on the same ranks: their plan, and the parts of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.exchange import Exchange, Message
from titan_muon.distributed.groups import agree_on_plan, group_of
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
        tables: Where they come from and go to.
        stack: (B, M, N): directions, then updates.
        normalized: Whether the directions are divided by safety times their norm already.
        buffers: State buffers by name, (B, M, N) or (B, M, 1).
        square_sums: (B,), sums of squares of the weights; None where no option needs them.
        flags: (B,), 1 where some rank had a gradient; None where that is certain.
        scales: (B,), how far the updates go; set by the arithmetic.
    """

    tables: BatchTables
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
        self._index: dict[tuple[int, ...], Tensor] = {}
        self._states: dict[tuple[int, int], TensorList] = {}
        own = self.tables.own_units
        self._own_params = self._tensor(tuple(self.plan.units[u].param for u in own))
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
        self._squares = self._weight_squares()

    def send(self, stage: int) -> Message | None:
        """Pack this rank's shards of a stage and start their way to the owners.

        Collective: all ranks of the set.
        """
        if not self.exchange.travels[stage]:
            return None
        tables = self.tables.stages[stage]
        packets = self.exchange.outbox(stage, tables, "there")
        sent = exponents(self._statistics[:, 0])
        for (kind, channel), table in tables.send.items():
            member = self._of_kind[kind]
            flat = packets.view(member.channel_dtype(channel))
            if channel == 0:
                scaled = flat.dtype.itemsize <= 2
                factors = power_of_two(-sent) if scaled else None
                options = self._momentum_options(kind)
                self._ops[kind].emit(
                    self._grads.grads, self._grads.momenta, flat, table, factors, **options
                )
            else:
                self._ops[kind].copy_to_flat(self._state(kind, channel), flat, table)
        pieces = self._tensor(tables.send_pieces)
        flags = self._grads.flags(self.device)[self._own_params[pieces]]
        write_headers(
            packets, self._tensor(tables.headers[0]), sent[pieces], flags, self._squares[pieces]
        )
        return self.exchange.start(stage, tables, "there")

    def receive(self, stage: int, message: Message | None) -> list[Batch]:
        """Return the whole matrices that this rank computes in a stage."""
        tables = self.tables.stages[stage]
        packets = headers = None
        if message is not None:
            packets = message.wait()
            headers = read_headers(packets, self._tensor(tables.headers[1]))
        batches = []
        for batch in tables.batches:
            if not batch.travels:
                if self._grads.any_present(self.plan.units[u].param for u in batch.units):
                    batches.append(self._cut(batch))
            elif packets is not None and headers is not None:
                batches.append(self._assemble(batch, packets, headers))
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
                self._pack_back(batch, packets, self._tensor(tables.headers[2]))
        return self.exchange.start(stage, tables, "back")

    def land(self, message: Message | None) -> None:
        """Write the updates and buffers that come back into this rank's shards."""
        if message is None:
            return
        tables = self.tables.stages[message.stage]
        packets = message.wait()
        headers = read_headers(packets, self._tensor(tables.headers[3]))
        factors = power_of_two(headers[0]) * headers[2]
        keep = None if self._grads.all_present else headers[1]
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
        del self._grads, self._params, self._statistics, self._factors, self._squares

    def _cut(self, tables: BatchTables) -> Batch:
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
        squares = self._squares[self._tensor(tables.own_pieces)]
        return Batch(tables, stack, ops.FUSES_NORM, buffers, squares, None)

    def _assemble(self, tables: BatchTables, packets: Tensor, headers: Tensor) -> Batch:
        """Fill a batch from parcels, each matrix at the scale of its largest parcel."""
        kind = tables.kind
        member, ops = self._of_kind[kind], self._ops[kind]
        units = [self.plan.units[u] for u in tables.units]
        shape = (len(units), units[0].rows, units[0].columns)
        parcels, there = self._padded(tables.parcels)
        sent = headers[0][parcels].where(there, -torch.inf)
        # Only the scales within one matrix matter: it is orthogonalized.
        relative = sent - sent.amax(dim=1, keepdim=True)
        factors = torch.ones_like(headers[0])
        factors[parcels[there]] = power_of_two(relative[there])
        stack = torch.empty(shape, dtype=self._dtype(kind, 0), device=self.device)
        scaled = stack.dtype.itemsize <= 2
        flat = packets.view(stack.dtype)
        ops.copy_to_tensors(flat, [stack], tables.inward[0], factors if scaled else None)
        buffers = {}
        for channel, spec in enumerate(member.channels[1:], start=1):
            value = self._buffer_stack(shape, kind, channel)
            ops.copy_to_tensors(packets.view(value.dtype), [value], tables.inward[channel])
            buffers[spec.name] = value
        flags = headers[1][parcels].where(there, 0.0).amax(dim=1)
        squares = headers[2][parcels].where(there, 0.0).sum(dim=1)
        return Batch(tables, stack, False, buffers, squares, flags)

    def _write_own(self, batch: Batch) -> None:
        kind, tables = batch.tables.kind, batch.tables
        member, ops = self._of_kind[kind], self._ops[kind]
        pieces = self._tensor(tables.own_pieces)
        factors = torch.zeros(
            len(self.tables.own_units), device=self.device, dtype=self._wide(kind)
        )
        factors[pieces] = _scales(batch).to(factors.dtype)
        keep = None
        if not self._grads.all_present:
            keep = self._grads.flags(self.device)[self._own_params]
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
        numbers = self._tensor(tuple(n for ns in tables.back_parcels for n in ns))
        counts = tuple(b for b, ns in enumerate(tables.back_parcels) for _ in ns)
        position = self._tensor(counts)
        flags = torch.ones_like(sent[numbers]) if batch.flags is None else batch.flags[position]
        scales = _scales(batch)[position].to(torch.float32)
        write_headers(packets, index[numbers], sent[numbers], flags, scales)

    def _weight_squares(self) -> Tensor:
        """Return the sum of squares of the weights of each own piece; zeros where not needed."""
        result = self._nothing[:, 0]
        for kind, table in self.tables.own.items():
            if self._of_kind[kind].group["adjust_lr_fn"] == "match_param_rms":
                squares = self._ops[kind].statistics(self._params, table)[:, 1]
                result = result + squares.to(self.device)
        return result

    def _padded(self, numbers: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
        """Return numbers as a rectangle, and which of its places hold one."""
        width = max((len(n) for n in numbers), default=0)
        flat = tuple(x for n in numbers for x in (*n, *([-1] * (width - len(n)))))
        index = self._tensor(flat).view(len(numbers), width)
        return index.clamp_min(0), index >= 0

    def _tensor(self, numbers: tuple[int, ...]) -> Tensor:
        """Return an index tensor; copied to the device once."""
        if numbers not in self._index:
            self._index[numbers] = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return self._index[numbers]

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


def _scales(batch: Batch) -> Tensor:
    if batch.scales is None:
        raise AssertionError("the batch has not been computed")
    return batch.scales
