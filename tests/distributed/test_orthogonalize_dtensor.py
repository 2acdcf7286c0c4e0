"""``orthogonalize`` keeps the placements of a DTensor and gives the result of the whole matrix."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from titan_muon import orthogonalize


class FunctionalTest(DTensorOpTestBase):
    @property
    def world_size(self):
        return 4

    def build_device_mesh(self):
        return init_device_mesh("cpu", (4,))

    def test_placements_are_kept(self):
        whole = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
        want = orthogonalize(whole)
        for shape, placements in (
            ((4,), [Shard(0)]),
            ((4,), [Shard(1)]),
            ((2, 2), [Shard(0), Shard(1)]),
            ((2, 2), [Replicate(), Shard(0)]),
        ):
            x = distribute_tensor(whole, init_device_mesh("cpu", shape), placements)
            got = orthogonalize(x)
            assert got.placements == x.placements
            assert torch.equal(got.full_tensor(), want)


if __name__ == "__main__":
    run_tests()
