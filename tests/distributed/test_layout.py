"""Regions by arithmetic against what DTensor and FSDP2 really hold."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from titan_muon.distributed.layout import (
    Layout,
    Region,
    is_dtensor,
    layout_of,
    local_region,
    region_shape,
)
from titan_muon.distributed.tensors import zeros_by_row


def _numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(*shape)


def _held(whole: Tensor, region: Region) -> Tensor:
    """Cut a region out of the whole tensor, element by element along each dim."""
    for dim, intervals in enumerate(region):
        index = [i for start, stop in intervals for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.long))
    return whole


def _mesh(shape: Sequence[int], rank: int) -> DeviceMesh:
    """Return the mesh as one rank sees it; no process group, since nothing is sent."""
    ranks = torch.arange(math.prod(shape)).view(*shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def _distributed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    # Without a source rank every rank cuts its own copy: torch's arithmetic, no messages.
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


def _check_every_rank(mesh_shape, shape, placements) -> list[Region]:
    whole = _numbered(shape)
    regions = []
    for rank in range(math.prod(mesh_shape)):
        mesh = _mesh(mesh_shape, rank)
        tensor = _distributed(whole, mesh, placements)
        layout = layout_of(tensor)
        assert layout.shape == tuple(shape)
        assert layout.mesh_shape == tuple(mesh_shape)
        assert layout.ranks == tuple(range(math.prod(mesh_shape)))
        region = local_region(layout, tuple(mesh.get_coordinate()))
        local = tensor.to_local()
        assert region_shape(region) == tuple(local.shape)
        assert torch.equal(_held(whole, region), local)
        regions.append(region)
    return regions


S = _StridedShard
# name: mesh shape, placements, global shape
LAYOUTS = {
    "fsdp": ((4,), [Shard(0)], (8, 6)),
    "fsdp uneven": ((4,), [Shard(0)], (10, 6)),
    "fsdp empty": ((8,), [Shard(0)], (18, 6)),  # 6 ranks hold 3 rows, 2 hold none
    "fsdp fewer rows than ranks": ((4,), [Shard(0)], (3, 6)),
    "fsdp columns": ((4,), [Shard(1)], (8, 6)),
    "fsdp last dim by negative number": ((4,), [Shard(-1)], (8, 6)),
    "hsdp": ((2, 3), [Replicate(), Shard(0)], (8, 6)),
    "ddp": ((4,), [Replicate()], (8, 6)),
    "column": ((2, 2), [S(0, split_factor=2), Shard(0)], (8, 6)),
    "column uneven": ((2, 2), [S(0, split_factor=2), Shard(0)], (10, 6)),
    "column, 3 by 4, uneven": ((3, 4), [S(0, split_factor=4), Shard(0)], (29, 2)),
    "column, empty": ((4, 4), [S(0, split_factor=4), Shard(0)], (9, 2)),
    "row": ((2, 2), [Shard(0), Shard(1)], (9, 7)),
    "nested": ((2, 2), [Shard(0), Shard(0)], (11, 2)),
    "three axes on one dim": (
        (2, 2, 2),
        [S(0, split_factor=4), S(0, split_factor=2), Shard(0)],
        (19,),
    ),
    "hsdp with tp": ((2, 2, 2), [Replicate(), S(0, split_factor=2), Shard(0)], (10, 6)),
    "experts": ((2, 2), [S(0, split_factor=2), Shard(0)], (8, 4, 6)),
    "experts cut by rows": ((2, 2), [Shard(1), Shard(0)], (3, 5, 6)),
    "axes of size 1": ((1, 4, 1), [Shard(1), Shard(0), Replicate()], (8, 6)),
    "no elements": ((2,), [Shard(0)], (0, 6)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_region_is_what_dtensor_holds(name):
    mesh_shape, placements, shape = LAYOUTS[name]
    _check_every_rank(mesh_shape, shape, placements)


@st.composite
def _layouts(draw):
    mesh_shape = draw(
        st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 12)
    )
    shape = draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))
    dim = st.integers(-len(shape), len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dim),
        st.builds(
            lambda d, f: _StridedShard(d % len(shape), split_factor=f), dim, st.integers(1, 4)
        ),
    )
    placements = draw(st.lists(placement, min_size=len(mesh_shape), max_size=len(mesh_shape)))
    return mesh_shape, shape, placements


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_layouts())
def test_any_layout(layout):
    mesh_shape, shape, placements = layout
    regions = _check_every_rank(mesh_shape, shape, placements)
    # Every element lies on as many ranks as the replicating axes have.
    copies = math.prod(
        size for size, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)
    )
    count = torch.zeros(math.prod(shape), dtype=torch.long)
    for region in regions:
        count[_held(_numbered(shape), region).flatten()] += 1
    assert (count == copies).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(_layouts().filter(lambda x: len(x[1]) >= 2))
def test_buffer_by_row_lies_beside_the_rows(layout):
    mesh_shape, shape, placements = layout
    whole = _numbered(shape)
    rows = _numbered((*shape[:-1], 1))
    for rank in range(math.prod(mesh_shape)):
        mesh = _mesh(mesh_shape, rank)
        param = _distributed(whole, mesh, placements)
        buffer = zeros_by_row(param, (*shape[:-1], 1), torch.float32)
        assert buffer.dtype == torch.float32
        assert tuple(buffer.shape) == tuple(rows.shape)
        assert buffer.to_local().shape[:-1] == param.to_local().shape[:-1]
        coordinate = tuple(mesh.get_coordinate())
        own = _held(rows, local_region(layout_of(buffer), coordinate))
        assert tuple(own.shape) == tuple(buffer.to_local().shape)
        columns_cut = [isinstance(p, Replicate) for p in buffer.placements]
        for p, replicated in zip(param.placements, columns_cut, strict=True):
            cuts_columns = not isinstance(p, Replicate) and p.dim % len(shape) == len(shape) - 1
            assert replicated == (cuts_columns or isinstance(p, Replicate))


def test_plain_tensor_is_one_region():
    layout = layout_of(torch.zeros(3, 4))
    assert layout == Layout((3, 4))
    assert local_region(layout, ()) == (((0, 3),), ((0, 4),))
    assert not is_dtensor(torch.zeros(3))


def test_partial_is_refused_by_name():
    tensor = DTensor.from_local(torch.zeros(3, 4), _mesh((2,), 0), [Partial()], run_check=False)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.w: shape \(3, 4\) has placement"):
        layout_of(tensor, "layers.0.w")


def test_neighbouring_pieces_are_one_interval():
    mesh = _mesh((1, 2), 0)
    tensor = _distributed(_numbered((8, 2)), mesh, [_StridedShard(0, split_factor=4), Shard(0)])
    assert local_region(layout_of(tensor), (0, 0)) == (((0, 4),), ((0, 2),))


def test_layouts_are_keys():
    mesh = _mesh((2, 2), 0)
    left, right = (
        layout_of(_distributed(_numbered((8, 2)), mesh, [Replicate(), Shard(0)])) for _ in range(2)
    )
    assert left == right
    assert hash(left) == hash(right)
    assert left != layout_of(_distributed(_numbered((8, 2)), mesh, [Shard(0), Replicate()]))


class Block(nn.Module):
    """Sizes of which only the 8 can be divided by 4 ranks."""

    def __init__(self):
        super().__init__()
        self.column = nn.Linear(8, 10, bias=False)
        self.row = nn.Linear(10, 9, bias=False)
        self.whole = nn.Linear(9, 3, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.arange(p.numel()).view_as(p))


class TestWhatFullyShardHolds(DTensorOpTestBase):
    """Thread ranks: layouts as FSDP2 and tensor parallelism make them."""

    def _check(self, block: nn.Module) -> None:
        for name, whole in Block().named_parameters():
            param = block.get_parameter(name)
            assert is_dtensor(param), name
            region = local_region(layout_of(param), tuple(param.device_mesh.get_coordinate()))
            assert torch.equal(_held(whole.detach(), region), param.to_local().detach()), name

    def test_fsdp(self):
        block = Block()
        fully_shard(block, mesh=init_device_mesh("cpu", (self.world_size,)))
        self._check(block)

    def test_fsdp_on_dim_1(self):
        block = Block()
        fully_shard(
            block,
            mesh=init_device_mesh("cpu", (self.world_size,)),
            shard_placement_fn=lambda p: Shard(1) if p.shape[1] % self.world_size == 0 else None,
        )
        assert block.column.weight.placements == (Shard(1),)
        self._check(block)

    def test_hsdp(self):
        block = Block()
        mesh = init_device_mesh(
            "cpu", (2, self.world_size // 2), mesh_dim_names=("replicate", "shard")
        )
        fully_shard(block, mesh=mesh)
        self._check(block)

    def test_fsdp_with_tensor_parallelism(self):
        for tp in (2, self.world_size):
            mesh = init_device_mesh(
                "cpu", (self.world_size // tp, tp), mesh_dim_names=("fsdp", "tp")
            )
            block = Block()
            parallelize_module(
                block, mesh["tp"], {"column": ColwiseParallel(), "row": RowwiseParallel()}
            )
            block.whole.register_parameter(
                "weight",
                nn.Parameter(_distributed(block.whole.weight.detach(), mesh["tp"], [Replicate()])),
            )
            fully_shard(block, mesh=mesh["fsdp"])
            kinds = {type(p) for x in block.parameters() for p in x.placements}
            if tp == 2:
                assert _StridedShard in kinds
            self._check(block)

    def test_regions_are_the_same_on_every_rank(self):
        mesh = init_device_mesh("cpu", (self.world_size,))
        tensor = distribute_tensor(_numbered((10, 3)), mesh, [Shard(0)])
        layout = layout_of(tensor)
        parts: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(parts, (layout, tensor.to_local()))
        for (other, local), coordinate in zip(
            parts, itertools.product(range(self.world_size)), strict=True
        ):
            assert other == layout
            assert torch.equal(_held(_numbered((10, 3)), local_region(layout, coordinate)), local)
