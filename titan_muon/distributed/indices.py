"""Index tensors of one stage on one device, made once: which header belongs to what."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_muon.distributed.tables import BatchTables, StageTables
from titan_muon.distributed.wire import FIELDS_BACK, FIELDS_THERE

__all__ = ["BatchIndex", "StageIndex"]


class StageIndex:
    """Indices of one stage.

    Args:
        tables: The stage's tables.
        device: Where packets and statistics lie.

    Attributes:
        sent, received, returned, landed: (parcels, fields), float32 elements of the headers of the
            parcels sent there, received there, sent back, received back.
        pieces: (parcels,), own piece of each parcel sent there.
        batches: One entry a batch.
    """

    def __init__(self, tables: StageTables, device: torch.device) -> None:
        counts = (FIELDS_THERE, FIELDS_THERE, FIELDS_BACK, FIELDS_BACK)
        self.sent, self.received, self.returned, self.landed = (
            (_index(starts).view(-1, 1) + torch.arange(count)).to(device)
            for starts, count in zip(tables.headers, counts, strict=True)
        )
        self.pieces = _index(tables.send_pieces).to(device)
        self.batches = [BatchIndex(batch, device) for batch in tables.batches]


class BatchIndex:
    """Indices of one batch of B matrices.

    Args:
        tables: The batch's tables.
        device: Where.

    Attributes:
        own_pieces: (B,), own piece of each matrix; empty where they travel.
        parcels, positions: (P,), arriving parcels with directions, and their matrices.
        padded, there: (B, K), the same parcels by matrix, and which places hold one.
        back_parcels, back_positions: All parcels that leave, and their matrices.
    """

    def __init__(self, tables: BatchTables, device: torch.device) -> None:
        self.own_pieces = _index(tables.own_pieces).to(device)
        self.parcels, self.positions = _by_position(tables.parcels, device)
        self.back_parcels, self.back_positions = _by_position(tables.back_parcels, device)
        width = max((len(numbers) for numbers in tables.parcels), default=0)
        rows = [[*numbers, *[-1] * (width - len(numbers))] for numbers in tables.parcels]
        padded = torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
        self.there = (padded >= 0).to(device)
        self.padded = padded.clamp_min(0).to(device)


def _by_position(numbers: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    flat = [number for group in numbers for number in group]
    positions = [position for position, group in enumerate(numbers) for _ in group]
    return _index(flat).to(device), _index(positions).to(device)


def _index(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
