"""Layouts on four thread ranks: whole tensors cut into DTensors, and compared with them again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_muon.distributed.layout import Layout, Region, layout_of, local_region

WORLD = 4


class Case(NamedTuple):
    """One parameter's layout.

    Args:
        mesh: Mesh shape.
        placements: One a mesh axis.
        shape: Global shape.
        flatten: Option of its group.
    """

    mesh: tuple[int, ...]
    placements: Sequence[Any]
    shape: tuple[int, ...]
    flatten: bool = False


COLUMN = (_StridedShard(0, split_factor=2), Shard(0))
ROW = (Shard(0), Shard(1))

# Only rows 24, 21, 6, and 3: SPLITS has rules for them.
LAYOUTS = {
    "fsdp shard 0": Case((4,), [Shard(0)], (24, 12)),
    "fsdp shard 1": Case((4,), [Shard(1)], (24, 12)),
    "fsdp uneven": Case((4,), [Shard(0)], (21, 7)),
    "fsdp empty shard": Case((4,), [Shard(0)], (6, 8)),
    "fsdp fewer rows than ranks": Case((4,), [Shard(0)], (3, 8)),
    "fsdp empty columns": Case((4,), [Shard(1)], (21, 6)),
    "ddp": Case((4,), [Replicate()], (24, 12)),
    "hsdp": Case((2, 2), [Replicate(), Shard(0)], (24, 12)),
    "hsdp uneven": Case((2, 2), [Replicate(), Shard(0)], (21, 12)),
    "hsdp shard 1": Case((2, 2), [Replicate(), Shard(1)], (24, 12)),
    "fsdp tp column": Case((2, 2), COLUMN, (24, 12)),
    "fsdp tp column uneven": Case((2, 2), COLUMN, (21, 6)),
    "fsdp tp row": Case((2, 2), ROW, (24, 12)),
    "fsdp tp row uneven": Case((2, 2), ROW, (21, 5)),
    "fsdp tp replicated": Case((2, 2), [Shard(0), Replicate()], (24, 12)),
    "fsdp tp both on rows": Case((2, 2), [Shard(0), Shard(0)], (21, 6)),
    "hsdp tp column": Case((1, 2, 2), [Replicate(), *COLUMN], (24, 12)),
    "hsdp tp row": Case((2, 1, 2), [Replicate(), *ROW], (24, 12)),
    "experts whole": Case((4,), [Shard(0)], (8, 6, 8)),
    "experts efsdp strided": Case((2, 2), COLUMN, (8, 6, 5)),
    "experts efsdp shard 1": Case((2, 2), [Shard(1), Shard(0)], (4, 24, 5)),
    "experts efsdp shard 1 uneven": Case((2, 2), [Shard(1), Shard(0)], (3, 21, 5)),
    "experts efsdp shard 2": Case((2, 2), [Shard(2), Shard(0)], (4, 6, 5)),
    "experts without ep": Case((4,), [Shard(1)], (3, 24, 8)),
    "experts fewer than ranks": Case((4,), [Shard(0)], (3, 6, 8)),
    "experts replicated": Case((2, 2), [Replicate(), Shard(0)], (4, 6, 8)),
    "experts in two dims": Case((2, 2), [Shard(0), Shard(1)], (2, 3, 6, 5)),
    "convolution": Case((4,), [Shard(0)], (6, 3, 2, 2), True),
    "convolution input channels": Case((2, 2), ROW, (6, 3, 2, 2), True),
    "convolution kernel": Case((2, 2), [Shard(2), Shard(0)], (6, 3, 3, 2), True),
}


def _qkv(n_kv_heads: int, heads_per_kv: int, head_dim: int) -> dict[str, Any]:
    return {
        "kind": "interleaved_qkv",
        "n_kv_heads": n_kv_heads,
        "heads_per_kv": heads_per_kv,
        "head_dim": head_dim,
    }


def _tables(blocks: int, strided: int) -> list[dict[str, Any]]:
    return [{"kind": "blocks", "rows": blocks}, {"kind": "strided", "count": strided}]


# By number of rows: every kind of split.
SPLITS: dict[int, list[Any]] = {
    24: [None, [10, 6, 8], *_tables(4, 3), _qkv(2, 2, 3)],
    21: [None, [10, 11], *_tables(7, 3), _qkv(1, 5, 3)],
    6: [None, [2, 4], *_tables(2, 2), _qkv(2, 1, 1)],
    3: [None, [1, 2], *_tables(1, 3), _qkv(1, 1, 1)],
}


def rows_of(case: Case) -> int:
    return case.shape[0] if case.flatten else case.shape[-2]


def cut(whole: Tensor, region: Region) -> Tensor:
    """Return the local tensor that holds a region, by indexing every dim."""
    for dim, intervals in enumerate(region):
        index = torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long)
        whole = whole.index_select(dim, index)
    return whole.contiguous()


def region_of(tensor: DTensor) -> Region:
    """Return what this rank holds of a DTensor."""
    return local_region(layout_of(tensor), tuple(tensor.device_mesh.get_coordinate() or ()))


def shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Cut a whole tensor; every rank calls with the same one, nothing is sent."""
    like = torch.empty(whole.shape, device="meta")
    shape, stride = like.shape, like.stride()
    empty = DTensor.from_local(
        torch.empty(0), mesh, placements, run_check=False, shape=shape, stride=stride
    )
    local = cut(whole, region_of(empty))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def mesh_of(shape: tuple[int, ...], meshes: dict[tuple[int, ...], DeviceMesh]) -> DeviceMesh:
    """Return the mesh of a shape, made once for each dict. Collective."""
    if shape not in meshes:
        meshes[shape] = init_device_mesh("cpu", shape)
    return meshes[shape]


def like(param: Tensor, whole: Tensor) -> Tensor:
    """Lay a whole tensor out as a parameter is."""
    if not isinstance(param, DTensor):
        return whole.clone()
    return shard(whole, param.device_mesh, param.placements)


def deviation(got: Tensor, whole: Tensor, scale: Tensor) -> float:
    """Return the largest difference of this rank's shard, relative to the rms of ``scale``."""
    local = got.detach().to_local() if isinstance(got, DTensor) else got.detach()
    expected = cut(whole, region_of(got)) if isinstance(got, DTensor) else whole
    if not local.numel():
        return 0.0
    rms = scale.double().square().mean().sqrt()
    return ((local.double() - expected.double()).abs().max() / rms).item()


def differing_replicas(tensors: Sequence[Tensor]) -> list[int]:
    """Return which tensors have two ranks that hold the same region with different bits.

    Collective: all ranks.
    """
    mine = [
        (layout_of(t), region_of(t), t.detach().to_local())
        for t in tensors
        if isinstance(t, DTensor)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(region, local) for _, region, local in mine])
    differing = []
    for index in range(len(mine)):
        seen: dict[Region, Tensor] = {}
        for parts in gathered:
            region, local = parts[index]
            if not torch.equal(seen.setdefault(region, local), local):
                differing.append(index)
                break
    return differing


def replicas(layout: Layout) -> int:
    """Return on how many ranks each element lies."""
    sizes = zip(layout.cuts, layout.mesh_shape, strict=True)
    count = 1
    for axis_cut, size in sizes:
        count *= size if axis_cut.dim is None else 1
    return count
