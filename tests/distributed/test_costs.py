"""What really ran costs what the plan says, and that is what the layout must cost."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.thread_ranks import LAYOUTS, like, mesh_of, shard
from titan_muon import Muon
from titan_muon.distributed.costs import owner_bound, plan_costs
from titan_muon.distributed.geometry import geometry
from titan_muon.distributed.packets import HEADER, route

MATRICES = 8
# A header, and the end of a body filled up to 32 bytes.
MOST_A_PARCEL = HEADER + 31


def must_cost(name: str, bytes_all: int) -> float | None:
    """Return the bytes that all ranks together send at least, bodies only; None: not even.

    Args:
        name: Layout.
        bytes_all: All matrices in the wire dtype.
    """
    even = {
        # p ranks that shard, R replicas.
        "fsdp shard 0": (4, 1),
        "fsdp shard 1": (4, 1),
        "ddp": (1, 4),
        "hsdp": (2, 2),
        "hsdp shard 1": (2, 2),
        "fsdp tp column": (4, 1),
        "fsdp tp row": (4, 1),
        "fsdp tp replicated": (2, 2),
        "hsdp tp column": (4, 1),
        "hsdp tp row": (2, 2),
        "experts efsdp shard 1": (2, 1),
        "experts without ep": (4, 1),
    }
    if name.startswith("experts whole") or name == "experts efsdp strided":
        return 0.0
    if name not in even:
        return None
    shards, replicas = even[name]
    # To the owner from its replica, and back to everyone.
    return bytes_all * ((1 - 1 / shards) + replicas - 1 / shards)


class TestCosts(ThreadRanks):
    def _step(self, name: str, wire: str) -> Muon:
        case = LAYOUTS[name]
        generator = torch.Generator().manual_seed(1)
        mesh = mesh_of(case.mesh, {})
        params = []
        for _ in range(MATRICES):
            start = torch.randn(case.shape, generator=generator)
            params.append(nn.Parameter(shard(start, mesh, case.placements)))
            params[-1].grad = like(params[-1], start)
        group = {"params": params, "algorithm": "normuon", "flatten": case.flatten}
        optimizer = Muon([group], wire_dtype=wire)
        optimizer.step()
        return optimizer

    def test_counted_is_predicted(self):
        for name, wire in [(n, w) for n in LAYOUTS for w in ("float16", "float32")]:
            (work,) = self._step(name, wire)._works
            costs, traffic = plan_costs(work.plan), work.exchange.traffic
            here = (traffic.bytes_sent, traffic.collectives, traffic.matrices)
            said = (int(costs.bytes_sent[self.rank]), costs.collectives)
            assert here == (*said, int(costs.matrices[self.rank])), name
            buffers = sum(b.numel() for b in work.exchange._buffers.values())
            assert buffers == int(costs.buffer_bytes[self.rank]), name
            assert int(costs.matrices.sum()) == len(work.plan.units), name

    def test_layouts_cost_what_they_must(self):
        for name, case in LAYOUTS.items():
            (work,) = self._step(name, "float16")._works
            plan, costs = work.plan, plan_costs(work.plan)
            all_bytes = 2 * MATRICES * math.prod(case.shape)
            must = must_cost(name, all_bytes)
            rows = 8 * sum(u.rows for u in plan.units)
            if must is None:
                continue
            parcels = sum(
                sum(p.peer != plan.ranks.index(rank) for p in direction.sends)
                for rank in plan.ranks
                for stage in range(plan.stages)
                for direction in route(plan, rank, stage)
            )
            sent = int(costs.bytes_sent.sum())
            # NorMuon's statistic is 4 bytes a row, on no more ways than the matrix.
            most = must + parcels * MOST_A_PARCEL + rows * len(plan.ranks)
            assert must <= sent <= most, f"{name}: {sent} bytes, {must:.0f} bodies"

    def test_edges_are_what_goes_to_the_first_stage_and_comes_from_the_last(self):
        for name in LAYOUTS:
            (work,) = self._step(name, "float16")._works
            plan, costs = work.plan, plan_costs(work.plan)
            if not costs.collectives:
                continue
            here = plan.ranks.index(self.rank)
            there, _ = route(plan, self.rank, 0)
            _, back = route(plan, self.rank, plan.stages - 1)
            counted = sum(sum(r.send_bytes) - r.send_bytes[here] for r in (there, back))
            assert int(costs.edge_bytes[self.rank]) == counted, name

    def test_work_is_divided_among_all_that_can_share_it(self):
        for name, case in LAYOUTS.items():
            (work,) = self._step(name, "float16")._works
            plan, costs = work.plan, plan_costs(work.plan)
            homes = geometry(plan.params[0].layout, plan.params[0].rule).homes
            if len(homes) == 1 and len(homes[0]) == 4:
                assert costs.matrices.tolist() == [MATRICES // 4] * 4, name
            if any(isinstance(p, Replicate) for p in case.placements):
                assert int(costs.matrices.max()) < len(plan.units), name
            assert owner_bound(plan) <= max(plan.loads) + 1e-9
            assert costs.loads.tolist() == pytest.approx(list(plan.loads))


def test_must_cost_is_the_formula_of_the_documentation():
    # u, one rank's shards: FSDP 2u(1-1/p) a rank; HSDP at most (1+1/R)u.
    u = 1000 / 4
    assert must_cost("fsdp shard 0", 1000) == 4 * 2 * u * (1 - 1 / 4)
    u = 1000 / 2
    assert must_cost("hsdp", 1000) <= 4 * (1 + 1 / 2) * u
    assert must_cost("ddp", 1000) == 3 * 1000
    assert must_cost("experts whole", 1000) == 0
