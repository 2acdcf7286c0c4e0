"""Index tensors of one stage on one device, made once: which header belongs to what."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_muon.distributed.plan import Plan
from titan_muon.distributed.tables import BatchTables, RankTables, StageTables
from titan_muon.distributed.wire import Back, There

__all__ = ["BatchIndex", "OwnIndex", "StageIndex"]


class OwnIndex:
    """What is known of this rank's own pieces before any step.

    Args:
        plan: The plan.
        tables: This rank's tables.
        device: Where statistics lie.

    Attributes:
        params: (own pieces,), their parameters.
        roots: (own pieces,) float32, roots of their numbers of elements.
    """

    def __init__(self, plan: Plan, tables: RankTables, device: torch.device) -> None:
        self.params = _index([plan.units[unit].param for unit in tables.own_units]).to(device)
        elements = torch.zeros(len(self.params), dtype=torch.float32, device=device)
        for part in tables.own:
            for table in part.values():
                # Every own piece is in one table.
                elements += table.on(device).elements
        self.roots = elements.sqrt_()


class StageIndex:
    """Indices of one stage.

    Args:
        tables: The stage's tables.
        own_pieces: Number of own pieces of the rank.
        device: Where packets and statistics lie.

    Attributes:
        sent, received, returned, landed: (parcels, fields), float32 elements of the headers of the
            parcels sent there, received there, sent back, received back.
        pieces: (parcels,), own piece of each parcel sent there.
        batches: One entry a batch.
    """

    def __init__(self, tables: StageTables, own_pieces: int, device: torch.device) -> None:
        there, back = len(There._fields), len(Back._fields)
        counts = (there, there, back, back)
        self.sent, self.received, self.returned, self.landed = (
            (_index(starts).view(-1, 1) + torch.arange(count)).to(device)
            for starts, count in zip(tables.headers, counts, strict=True)
        )
        self.pieces = _index(tables.send_pieces).to(device)
        self.batches = [BatchIndex(batch, self, own_pieces) for batch in tables.batches]


class BatchIndex:
    """Indices of one batch of B matrices.

    Args:
        tables: The batch's tables.
        stage: Indices of its stage.
        own_pieces: Number of own pieces of the rank.

    Attributes:
        own_pieces: (B,), own piece of each matrix; empty where they travel.
        by_piece, by_parcel: (own pieces,) and (parcels received there,), the matrix of each; 0
            where it is not of this batch.
        padded, there: (B, K), arriving parcels with directions by matrix, and which places hold
            one.
        back_parcels, back_matrices: (P,), all parcels that leave, and their matrices.
        returned: (P, fields), where the headers of these are.
    """

    def __init__(self, tables: BatchTables, stage: StageIndex, own_pieces: int) -> None:
        device = stage.received.device
        self.own_pieces = _index(tables.own_pieces).to(device)
        self.by_piece = _inverse([(p,) for p in tables.own_pieces], own_pieces).to(device)
        self.by_parcel = _inverse(tables.parcels, len(stage.received)).to(device)
        width = max((len(numbers) for numbers in tables.parcels), default=0)
        rows = [[*numbers, *[-1] * (width - len(numbers))] for numbers in tables.parcels]
        padded = torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
        self.there = (padded >= 0).unsqueeze(-1).to(device)
        self.padded = padded.clamp_min(0).to(device)
        leaving = [(n, b) for b, numbers in enumerate(tables.back_parcels) for n in numbers]
        pairs = torch.tensor(leaving, dtype=torch.int64).view(-1, 2).to(device)
        self.back_parcels, self.back_matrices = pairs.unbind(dim=1)
        self.returned = stage.returned[self.back_parcels]


def _inverse(numbers: Sequence[Sequence[int]], count: int) -> Tensor:
    """Return (count,), the position of the sequence in which each number is, or 0."""
    result = torch.zeros(count, dtype=torch.int64)
    for position, group in enumerate(numbers):
        result[list(group)] = position
    return result


def _index(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
