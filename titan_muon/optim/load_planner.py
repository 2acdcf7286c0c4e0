"""A DCP load planner by which quantised state is resharded, and changes its format.

DCP cuts what it reads out of saved shards, and copies it into a part of the live one. A block of
quantised values can be cut in neither. So where a live or saved tensor is quantised, saved shards
are read whole, cut as values, and collected; the live shard is encoded once, when it is complete.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from titan_muon.distributed.tensors import local_of
from titan_muon.optim.quantized import allow_loading, dequantized, is_quantized
from titan_muon.optim.state_tensors import copy_state

__all__ = ["StateLoadPlanner"]

Key = tuple[str, tuple[int, ...], tuple[int, ...]]


class StateLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, for optimizer state of any ``state_dtype`` on any layout.

    Give it to ``torch.distributed.checkpoint.load`` as ``planner``. On the layout and in the format
    that were saved all bits are kept; otherwise values are rounded once more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted: dict[Key, ReadItem] = {}
        self._targets: dict[str, _Target] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return DCP's plan; shards of which DCP can take no part are read whole."""
        return self.with_whole_shards(super().create_local_plan())

    def with_whole_shards(self, plan: LoadPlan) -> LoadPlan:
        """Return a plan that reads shards whole wherever quantised state is involved."""
        metadata = self.metadata
        if metadata is None:
            raise AssertionError("set_up_planner comes first")
        self._wanted, self._targets = {}, {}
        items = []
        for item in plan.items:
            target = self._tensor(item)
            chunk = None if target is None else _chunk_of(item, metadata)
            if target is None or chunk is None:
                items.append(item)
                continue
            if chunk.quantized:
                allow_loading()
            if not chunk.quantized and not is_quantized(target):
                items.append(item)
                continue
            zeros = torch.Size([0] * len(item.lengths))
            whole = dataclasses.replace(item, storage_offsets=zeros, lengths=chunk.size)
            items.append(whole)
            self._wanted[_key(whole)] = item
            collected = self._targets.setdefault(item.dest_index.fqn, _Target(target))
            collected.missing += 1
        return dataclasses.replace(plan, items=items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return where DCP puts what it read."""
        if _key(read_item) in self._wanted:
            return _receiver(read_item.lengths)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Take over what DCP has read."""
        wanted = self._wanted.get(_key(read_item))
        if wanted is None or not isinstance(tensor, _Receiver):
            super().commit_tensor(read_item, tensor)
            return
        self._targets[wanted.dest_index.fqn].take(wanted, tensor.received)

    def _tensor(self, item: ReadItem) -> Tensor | None:
        """Return the live local tensor of an item, None for anything but optimizer state."""
        value = self.state_dict.get(item.dest_index.fqn)
        if item.type != LoadItemType.TENSOR or not isinstance(value, Tensor):
            return None
        local = local_of(value)
        return local if local.is_floating_point() else None


class _Target:
    """A live local tensor, and what has been read of it.

    Args:
        live: Modified when all items have come.
    """

    def __init__(self, live: Tensor) -> None:
        self.live, self.missing = live, 0
        self._values: Tensor | None = None

    def take(self, item: ReadItem, shard: Tensor) -> None:
        """Take one item out of the saved shard that holds it."""
        if item.lengths == self.live.shape == shard.shape:
            copy_state(self.live, shard)
            return
        if self._values is None:
            self._values = torch.zeros(self.live.shape, dtype=torch.float32)
        part, place = dequantized(shard), self._values
        for dim, length in enumerate(item.lengths):
            part = part.narrow(dim, item.storage_offsets[dim], length)
            place = place.narrow(dim, item.dest_offsets[dim], length)
        place.copy_(part)
        self.missing -= 1
        if not self.missing:
            copy_state(self.live, self._values)


@dataclass(frozen=True)
class _Chunk:
    size: torch.Size
    quantized: bool


def _chunk_of(item: ReadItem, metadata: Metadata) -> _Chunk | None:
    """Return the saved shard that an item is read from, None where nothing is known of it."""
    entry = metadata.state_dict_metadata.get(item.storage_index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    for chunk in entry.chunks:
        if chunk.offsets == item.storage_index.offset:
            stored = (metadata.storage_data or {}).get(item.storage_index)
            plain = chunk.sizes.numel() * entry.properties.dtype.itemsize
            # The format is in the file itself, but a quantised shard is shorter than its values.
            return _Chunk(chunk.sizes, getattr(stored, "length", plain) < plain)
    return None


def _key(item: ReadItem) -> Key:
    offset = item.storage_index.offset or ()
    return item.dest_index.fqn, tuple(item.dest_offsets), tuple(offset)


class _Receiver(Tensor):
    """Keeps what is copied into it as it is."""

    received: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.copy_:
            args[0].received = args[1]
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _receiver(size: torch.Size) -> Tensor:
    return torch.empty((), dtype=torch.float32).expand(size).as_subclass(_Receiver)
