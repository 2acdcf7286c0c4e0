"""FSDP2 and DDP as users drive them: micro-steps without reduction, replicas that stay equal."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.thread_ranks import WORLD, differing_replicas
from titan_muon import Muon, param_groups
from titan_muon.distributed.tensors import local_of

STEPS, MICRO_STEPS = 3, 2


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Linear(7, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return model


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + rank
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def _build(model: nn.Module) -> Muon:
    return Muon(param_groups(model, "normuon"), lr=0.05, wire_dtype="float32")


class TestAccumulation(ThreadRanks):
    def _reference(self) -> nn.Module:
        model = _model()
        optimizer = _build(model)
        for step in range(STEPS):
            for micro in range(MICRO_STEPS):
                for rank in range(WORLD):
                    (model(_batch(step, micro, rank)).square().mean() / WORLD).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def test_micro_steps_without_reduction(self):
        want = dict(self._reference().named_parameters())
        start = dict(_model().named_parameters())
        for shape, names in (((WORLD,), ("dp",)), ((2, 2), ("replicate", "shard"))):
            model = copy.deepcopy(_model())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            fully_shard(model, mesh=mesh)
            optimizer = _build(model)
            for step in range(STEPS):
                for micro in range(MICRO_STEPS):
                    is_last = micro == MICRO_STEPS - 1
                    model.set_requires_gradient_sync(is_last)
                    model(_batch(step, micro, self.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor)
                whole, moved = p.full_tensor(), (want[name] - start[name]).norm()
                # Gradients are summed in another order, and orthogonalizing enlarges it.
                assert (whole - want[name]).norm() <= 1e-4 * moved, name
            assert differing_replicas(list(model.parameters())) == []

    def test_step_without_any_reduction_changes_nothing(self):
        # Gradients that were not reduced are not in .grad yet: no rank has one.
        model = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = _build(model)
        before = [local_of(p.detach()).clone() for p in model.parameters()]
        model.set_requires_gradient_sync(False)
        model(_batch(0, 0, self.rank)).square().mean().backward()
        optimizer.step()
        after = [local_of(p.detach()) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def test_plain_replicas_stay_equal(self):
        model = _model()
        optimizer = _build(model)
        for step in range(STEPS):
            model(_batch(step, 0, self.rank)).square().mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        for p in model.parameters():
            others = [torch.empty_like(p) for _ in range(WORLD)]
            dist.all_gather(others, p.detach())
            assert all(torch.equal(others[0], other) for other in others)
