"""Process groups of pipeline stages are made on all ranks alike."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from titan_muon import Muon
from titan_muon.distributed.groups import create_groups, group_of

_RECORDS: dict[int, list] = {}
_NEW_GROUP = dist.new_group


def _recording(ranks, use_local_synchronization=False):
    if dist.get_rank() in _RECORDS:
        _RECORDS[dist.get_rank()].append((tuple(ranks), use_local_synchronization))
    return _NEW_GROUP(ranks, use_local_synchronization=use_local_synchronization)


@contextmanager
def created_groups():
    """Yield a list that collects what this rank passes to ``new_group``."""
    record = _RECORDS[dist.get_rank()] = []
    # The ranks are threads of one process: all set and reset the same attribute.
    dist.new_group = _recording
    dist.barrier()
    yield record
    dist.barrier()
    dist.new_group = _NEW_GROUP
    del _RECORDS[dist.get_rank()]


class GroupsTest(DTensorOpTestBase):
    @property
    def world_size(self):
        return 4

    def build_device_mesh(self):
        return init_device_mesh("cpu", (4,))

    def test_all_ranks_create_the_same_groups(self):
        with created_groups() as created:
            create_groups([(0, 1)] if dist.get_rank() < 2 else [])
            create_groups([(0, 1), (2, 3)])
        everywhere = [None] * 4
        dist.all_gather_object(everywhere, created)
        # Also on ranks outside a set, and once: the next group has the same name everywhere.
        assert everywhere == [[((0, 1), False), ((2, 3), False)]] * 4

    def test_created_group_is_the_one_that_is_used(self):
        ranks = (0, 2) if dist.get_rank() in (0, 2) else (1, 3)
        create_groups([ranks])
        with created_groups() as created:
            group = group_of(ranks, [])
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert created == []

    def test_rank_sets_of_an_optimizer(self):
        mesh = init_device_mesh("cpu", (2, 2))
        weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
        plain = torch.nn.Parameter(torch.ones(3, 3))
        bias = torch.nn.Parameter(distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0, 1, 2, 3])))
        optimizer = Muon(
            [
                {"params": [torch.nn.Parameter(weight), plain]},
                {"params": [bias], "algorithm": "adamw"},
            ]
        )
        assert optimizer.rank_sets() == [(0, 1, 2, 3)]


if __name__ == "__main__":
    run_tests()
