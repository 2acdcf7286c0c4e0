"""Stochastic rounding draws the same noise for an element on every layout, so on every replica."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.test_exactness import ThreadRanks, draw, train
from tests.helpers.thread_ranks import (
    LAYOUTS,
    cut,
    differing_replicas,
    mesh_of,
    region_of,
    shard,
)
from titan_muon import Muon
from titan_muon.distributed.tensors import local_of

CHOSEN = [(name, {"flatten": case.flatten}) for name, case in LAYOUTS.items()]


def _optimizer(params: list[nn.Parameter], algorithm: str, rounds: bool) -> Muon:
    groups = []
    for flatten in (False, True):
        chosen = zip(CHOSEN, params, strict=True)
        named = [(name, p) for (name, extra), p in chosen if extra["flatten"] == flatten]
        groups.append({"params": named, "algorithm": algorithm, "flatten": flatten})
    options = {"wire_dtype": "float32", "stochastic_rounding": rounds}
    return Muon(groups, lr=0.05, **options)


class TestLayouts(ThreadRanks):
    def _both(self, algorithm: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        whole = [w.bfloat16() for w in draw(CHOSEN, 0)]
        sharded = [
            nn.Parameter(shard(w, mesh_of(LAYOUTS[name].mesh, meshes), LAYOUTS[name].placements))
            for w, (name, _) in zip(whole, CHOSEN, strict=True)
        ]
        plain = [nn.Parameter(w) for w in whole]
        for params in (sharded, plain):
            for param in params:
                param.grad_dtype = torch.float32
            train(params, _optimizer(params, algorithm, True), CHOSEN)
        assert differing_replicas(sharded) == []
        return sharded, plain

    def test_elementwise_steps_are_those_of_one_rank(self):
        for got, want in zip(*self._both("adamw"), strict=True):
            assert torch.equal(local_of(got.detach()), cut(want.detach(), region_of(got)))

    def test_matrices_are_rounded_as_on_one_rank(self):
        different = total = 0
        for got, want in zip(*self._both("normuon"), strict=True):
            local, expected = local_of(got.detach()), cut(want.detach(), region_of(got))
            different += (local != expected).sum().item()
            total += local.numel()
            # Never apart by more than neighbours are; a value near 0 by the rounding of a step.
            gap = (local.float() - expected.float()).abs()
            assert (gap <= expected.float().abs() * 2**-7 + 1e-5).all()
        # A product summed in another order moves a value by 1e-7 of itself: hardly one in a
        # thousand then falls on the other side of its noise. Other noise would change half.
        assert different <= total // 100
