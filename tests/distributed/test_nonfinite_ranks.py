"""A NaN on one rank: all ranks skip the step or raise, on every layout."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.thread_ranks import LAYOUTS, WORLD, differing_replicas, like, mesh_of, shard
from titan_muon import Muon
from titan_muon.distributed.tensors import local_of

# A stage holds a few matrices only, so that exchanges overlap writes.
EXACT = {"lr": 0.1, "max_stage_bytes": 1 << 12}


def _draw(shape: Any, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _bits(optimizer: Muon) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in params for v in optimizer.state[p].values()]
    return [local_of(t.detach()).clone() for t in [*params, *state]]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class TestEveryLayout(ThreadRanks):
    def _build(self, case: Any, meshes: dict[Any, DeviceMesh], mode: str) -> Muon:
        mesh = mesh_of(case.mesh, meshes)
        params = [
            nn.Parameter(shard(_draw(case.shape, seed), mesh, case.placements)) for seed in range(5)
        ]
        bias = nn.Parameter(shard(_draw((7,), 9), mesh_of((WORLD,), meshes), [Shard(0)]))
        adamw = {"algorithm": "adamw", "params": [("e", params[4]), ("bias", bias)]}
        return Muon(
            [
                {"algorithm": "normuon", "params": [("a", params[0]), ("b", params[1])]},
                {"algorithm": "adamuon", "params": [("c", params[2])]},
                {"algorithm": "muon", "params": [("d", params[3])]},
                adamw,
            ],
            nonfinite=mode,
            flatten=case.flatten,
            **EXACT,
        )

    def _give(self, optimizer: Muon, seed: int) -> list[nn.Parameter]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for index, param in enumerate(params):
            param.grad = like(param, _draw(param.shape, 100 * seed + index))
        return params

    def _poison(self, params: list[nn.Parameter], rank: int, guilty: int) -> str:
        """Put a NaN into what one rank holds, or into the bias where that is nothing."""
        names = "abcdef"
        if self.rank == rank:
            gradient = local_of(params[guilty].grad)
            gradient.view(-1)[-1:] = float("nan")
        held = torch.tensor(local_of(params[guilty]).numel())
        sizes = [torch.zeros_like(held) for _ in range(WORLD)]
        dist.all_gather(sizes, held)
        return names[guilty] if sizes[rank] else ""

    def test_all_ranks_skip_together_and_go_on(self):
        meshes: dict[Any, DeviceMesh] = {}
        for number, (name, case) in enumerate(LAYOUTS.items()):
            optimizer = self._build(case, meshes, "skip")
            undisturbed = self._build(case, meshes, "propagate")
            for one in (optimizer, undisturbed):
                self._give(one, 1)
                one.step()
            before = _bits(optimizer)
            held = self._poison(self._give(optimizer, 2), rank=number % WORLD, guilty=number % 5)
            optimizer.step()
            assert optimizer.skipped_steps == (1 if held else 0), name
            assert _same(before, _bits(optimizer)) == bool(held), name
            if held:
                for one in (optimizer, undisturbed):
                    self._give(one, 3)
                    one.step()
                assert _same(_bits(optimizer), _bits(undisturbed)), name
            params = [p for group in optimizer.param_groups for p in group["params"]]
            assert differing_replicas(params) == [], name

    def test_all_ranks_raise_together_and_name_it(self):
        meshes: dict[Any, DeviceMesh] = {}
        for number, (name, case) in enumerate(LAYOUTS.items()):
            optimizer = self._build(case, meshes, "error")
            params = self._give(optimizer, 1)
            optimizer.step()
            before = _bits(optimizer)
            held = self._poison(params, rank=(number + 1) % WORLD, guilty=number % 5)
            expected = (
                pytest.raises(FloatingPointError, match=rf"1 of 6 parameters .*: {held} \(nan\)")
                if held
                else contextlib.nullcontext()
            )
            with expected:
                optimizer.step()
            assert _same(before, _bits(optimizer)) == bool(held), name

    def test_skip_with_a_missing_gradient_and_replicas(self):
        for case in (LAYOUTS["hsdp"], LAYOUTS["ddp"], LAYOUTS["fsdp tp row"]):
            meshes: dict[Any, DeviceMesh] = {}
            optimizer = self._build(case, meshes, "skip")
            params = self._give(optimizer, 1)
            optimizer.step()
            before = _bits(optimizer)
            self._give(optimizer, 2)
            if self.rank == 2:
                params[1].grad = None
            if self.rank == 3:
                local_of(params[3].grad).view(-1)[0] = float("inf")
            optimizer.step()
            assert _same(before, _bits(optimizer))
            assert optimizer.skipped_steps == 1


class TestRanksThatDecide(ThreadRanks):
    def test_pipeline_stages_decide_together_by_name(self):
        stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        mesh = stages["dp"]
        for together in (False, True):
            param = nn.Parameter(shard(_draw((8, 6), self.rank // 2), mesh, [Shard(0)]))
            optimizer = Muon([param], nonfinite="skip")
            if together:
                optimizer.agree_over(dist.group.WORLD)
            param.grad = like(param, _draw((8, 6), 7))
            before = _bits(optimizer)
            if self.rank == 1:
                local_of(param.grad)[0, 0] = float("nan")
            optimizer.step()
            skipped = together or self.rank < 2
            assert optimizer.skipped_steps == skipped
            assert _same(before, _bits(optimizer)) == skipped

    def test_crossing_meshes_ask_for_a_group(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        params = [nn.Parameter(shard(_draw((8, 6), 1), mesh[n], [Shard(0)])) for n in ("a", "b")]
        optimizer = Muon([{"params": params, "algorithm": "adamw"}], nonfinite="skip")
        for param in params:
            param.grad = like(param, _draw((8, 6), 7))
        with pytest.raises(NotImplementedError, match="name their process group with agree_over"):
            optimizer.step()
        optimizer.agree_over(dist.group.WORLD)
        optimizer.step()

    def test_ranks_are_found_again_when_parameters_come(self):
        mesh = init_device_mesh("cpu", (4,))
        alone = nn.Parameter(_draw((8, 6), 1))
        optimizer = Muon([alone], nonfinite="skip")
        alone.grad = _draw((8, 6), 2)
        optimizer.step()
        param = nn.Parameter(shard(_draw((8, 6), 1), mesh, [Shard(0)]))
        optimizer.add_param_group({"params": [param]})
        param.grad = like(param, _draw((8, 6), 7))
        if self.rank == 1:
            local_of(param.grad)[0, 0] = float("nan")
        optimizer.step()
        assert optimizer.skipped_steps == 1
