"""The packets of one rank on their way: the only file that communicates in a step."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.plan import Plan
from titan_muon.distributed.tables import StageTables

__all__ = ["Exchange", "Message", "Traffic"]

Direction = Literal["there", "back"]


@dataclass
class Traffic:
    """What one rank really did; tests hold it against the plan.

    Args:
        bytes_sent: To other ranks.
        collectives: All-to-alls.
        matrices: Matrices computed.
    """

    bytes_sent: int = 0
    collectives: int = 0
    matrices: int = 0


@dataclass
class Message:
    """An exchange under way.

    Args:
        stage: Its stage.
        packets: Bytes that arrive; valid after :meth:`wait`.
        work: Handle of the collective.
    """

    stage: int
    packets: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Return the arrived bytes; later work on the current stream comes after their arrival."""
        self.work.wait()
        return self.packets


class Exchange:
    """Persistent packet buffers of one rank and the all-to-alls between them.

    Args:
        plan: The plan.
        rank: This rank's global number.
        group: Process group of ``plan.ranks``; None where nothing travels.
        device: Where packets lie.
    """

    def __init__(
        self, plan: Plan, rank: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._own = plan.ranks.index(rank)
        self._buffers: dict[str, Tensor] = {}
        self.traffic = Traffic()
        self.travels = [False] * plan.stages
        for unit in plan.units:
            self.travels[unit.stage] |= unit.travels

    def outbox(self, tables: StageTables, direction: Direction) -> Tensor:
        """Return the buffer that holds what this rank sends, to be filled before :meth:`start`."""
        route = tables.there if direction == "there" else tables.back
        return self._buffer(f"send {direction}", sum(route.send_bytes))

    def start(self, stage: int, tables: StageTables, direction: Direction) -> Message:
        """Send the outbox.

        Collective: all ranks of the plan, in the same order of stages and directions.
        """
        route = tables.there if direction == "there" else tables.back
        packets = self._buffer(f"receive {direction}", sum(route.receive_bytes))
        work = dist.all_to_all_single(
            packets,
            self.outbox(tables, direction),
            list(route.receive_bytes),
            list(route.send_bytes),
            group=self._group,
            async_op=True,
        )
        self.traffic.collectives += 1
        self.traffic.bytes_sent += sum(route.send_bytes) - route.send_bytes[self._own]
        return Message(stage, packets, work)

    def _buffer(self, name: str, size: int) -> Tensor:
        """Return a persistent byte buffer; a stage is through with it before the next fills it."""
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size]
