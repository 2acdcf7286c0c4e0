"""The Muon-family parameters that lie on the same ranks: their plan, and the parts of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.exchange import Exchange, Message
from titan_muon.distributed.groups import agree_on_plan, group_of
from titan_muon.distributed.indices import OwnIndex, StageIndex
from titan_muon.distributed.layout import is_dtensor
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.distributed.plan import make_plan
from titan_muon.distributed.tables import rank_tables
from titan_muon.distributed.tensors import compute_device, mesh_of
from titan_muon.distributed.wire import Back, columns, read_headers, write_headers
from titan_muon.optim.algorithms.base import get_algorithm
from titan_muon.optim.batches import Batch, assemble, cut, pack_back, write_own
from titan_muon.optim.groups import full_names, planned_options
from titan_muon.optim.kinds import Kind, number_kinds
from titan_muon.optim.loans import Transfers
from titan_muon.optim.matrix_math import batch_update
from titan_muon.optim.members import Member
from titan_muon.optim.rounding import STEP
from titan_muon.optim.step_shards import StepShards

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
    for number, group in enumerate(groups):
        if not get_algorithm(group["algorithm"]).is_matrix:
            continue
        for param, name in zip(group["params"], full_names(number, group), strict=True):
            member = Member(param, name, group, rules[id(param)], state)
            device = compute_device(param)
            key = (tuple(sorted(member.layout.ranks)), str(device), is_dtensor(param))
            by_ranks.setdefault(key, []).append(member)
    return [MatrixWork(by_ranks[key], key[0], distributed=key[2]) for key in sorted(by_ranks)]


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
        numbers = number_kinds(members)
        self.plan = make_plan(
            [m.plan_param(number) for m, number in zip(members, numbers, strict=True)],
            max_stage_bytes=max(m.group["max_stage_bytes"] for m in members),
        )
        meshes = [mesh_of(m.param) for m in members] if distributed else []
        process_group = group_of(ranks, meshes) if distributed else None
        agree_on_plan(self.plan, _options(members), process_group, self.device)
        rank = dist.get_rank() if distributed else ranks[0]
        self.tables = rank_tables(self.plan, rank)
        self.exchange = Exchange(self.plan, rank, process_group, self.device)
        self.stages = range(self.plan.stages)
        self._own = OwnIndex(self.plan, self.tables, self.device)
        count = len(self.tables.own_units)
        self._indices = [StageIndex(stage, count, self.device) for stage in self.tables.stages]
        self._transfers = Transfers(self.device)
        self._kinds = {
            number: Kind(member, members, self._transfers)
            for number, member in dict(zip(numbers, members, strict=True)).items()
        }
        self._state_ids = self._ids()
        self._rounded = [m for m in members if m.is_rounded]
        self._replicated = any(m.layout.replicated for m in members)
        self._shards: StepShards | None = None

    def begin(self, take: Tensor | None) -> None:
        """Advance the momentum of the parameters that travel in stage 0, so that they can leave.

        Args:
            take: 0-d, 0 for a step that must not write anything; None for 1.
        """
        if take is not None:
            take = take.to(self.device, non_blocking=True)
        for member in self._rounded:
            steps = member.state[STEP]
            steps.add_(1.0 if take is None else take.to(steps.device))
        self._shards = StepShards(self.members, self._kinds, self._own, take)
        if self.exchange.travels[0]:
            self._shards.advance(self.tables.own[0])

    def take_states(self) -> None:
        """Take over state tensors that were replaced since the last step."""
        ids = self._ids()
        if ids == self._state_ids:
            return
        for member in self.members:
            member.take_state()
        for kind in self._kinds.values():
            kind.take_states(self.members)
        self._state_ids = ids

    def _ids(self) -> list[int]:
        # The tensors of the last step are still held, so that no other has the id of one.
        return [id(tensor) for member in self.members for tensor in member.state.values()]

    def advance(self) -> None:
        """Advance the momentum of all other parameters, while stage 0 travels."""
        if self.tables.own[1] or not self.exchange.travels[0]:
            self.shards.advance(self.tables.own[1])

    def send(self, stage: int) -> Message | None:
        """Pack this rank's shards of a stage and start their way to the owners.

        Collective: all ranks of the set.
        """
        if not self.exchange.travels[stage]:
            return None
        tables, index, shards = self.tables.stages[stage], self._indices[stage], self.shards
        packets = self.exchange.outbox(tables, "there")
        for (number, channel), table in tables.send.items():
            kind = self._kinds[number]
            flat = packets.view(kind.dtype(channel))
            if channel:
                kind.ops.copy_to_flat(kind.states[channel], flat, table)
                continue
            kind.ops.emit(
                shards.gradients.grads,
                shards.gradients.momenta,
                flat,
                table,
                shards.measured.sent_factors if flat.dtype.itemsize <= 2 else None,
                **kind.momentum_options(),
            )
        write_headers(packets, index.sent, shards.measured.headers[index.pieces])
        return self.exchange.start(stage, tables, "there")

    def receive(self, stage: int, message: Message | None) -> list[Batch]:
        """Return the whole matrices that this rank computes in a stage."""
        index = self._indices[stage]
        packets = headers = None
        if message is not None:
            packets = message.wait()
            headers = read_headers(packets, index.received)
        batches = []
        for tables, batch in zip(self.tables.stages[stage].batches, index.batches, strict=True):
            kind = self._kinds[tables.kind]
            units = [self.plan.units[u] for u in tables.units]
            if not tables.travels:
                if self.shards.gradients.any_present(unit.param for unit in units):
                    batches.append(cut(tables, batch, units, kind, self.shards))
            elif packets is not None and headers is not None:
                batches.append(assemble(tables, batch, units, kind, packets, headers))
        self.exchange.traffic.matrices += sum(len(b.tables.units) for b in batches)
        return batches

    def compute(self, batches: Sequence[Batch]) -> None:
        """Turn the directions of every batch into updates."""
        for batch in batches:
            batch.stack, batch.lengths = batch_update(
                batch.stack,
                batch.buffers,
                batch.square_sums,
                batch.kind.algorithm,
                batch.kind.group,
                normalized=batch.normalized,
            )

    def write(self, batches: Sequence[Batch]) -> None:
        """Write the updates and buffers of matrices that stay on this rank."""
        for batch in batches:
            if not batch.tables.travels:
                write_own(batch, self.shards)

    def send_back(self, stage: int, batches: Sequence[Batch]) -> Message | None:
        """Pack the updates and buffers of all other matrices and start their way back.

        Collective: all ranks of the set.
        """
        if not self.exchange.travels[stage]:
            return None
        tables = self.tables.stages[stage]
        packets = self.exchange.outbox(tables, "back")
        for batch in batches:
            if batch.tables.travels:
                pack_back(batch, packets)
        return self.exchange.start(stage, tables, "back")

    def land(self, message: Message | None) -> None:
        """Write the updates and buffers that come back into this rank's shards.

        Whether a matrix moves at all is what its owner found in its own replica, so that replicas
        stay equal even where one of them lacks a gradient that another has.
        """
        if message is None:
            return
        packets, shards = message.wait(), self.shards
        back = columns(Back, read_headers(packets, self._indices[message.stage].landed))
        factors = back.scale * back.length
        certain = shards.flags is None and not self._replicated
        keep = None if certain else back.flag.contiguous()
        for (number, channel), table in self.tables.stages[message.stage].land.items():
            kind = self._kinds[number]
            flat = packets.view(kind.dtype(channel))
            if channel:
                kind.ops.copy_to_tensors(flat, kind.states[channel], table, None, keep)
                continue
            kind.ops.write(shards.params, flat, table, factors, **kind.write_options(), keep=keep)
            if keep is not None and shards.flags is not None:
                shards.gradients.commit(table, keep, kind.ops)

    def finish(self) -> None:
        """Write back what had to be copied, and let go of the step's tensors."""
        self._transfers.finish()
        self.shards.restore()
        self._shards = None

    @property
    def shards(self) -> StepShards:
        """This rank's tensors of the step under way."""
        if self._shards is None:
            raise AssertionError("no step is under way")
        return self._shards


def _options(members: Sequence[Member]) -> list[dict[str, str]]:
    """Return what the groups of some parameters say, but for the lr, which schedules change."""
    groups = {id(member.group): member for member in members}.values()
    return [
        {key: repr(value) for key, value in planned_options(member.group).items()}
        for member in groups
    ]
