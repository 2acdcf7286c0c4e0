"""On every layout the sharded update equals the unsharded one."""

import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from tests.helpers.optimizers import register_averaged
from tests.helpers.spectra import SPECTRA, matrix
from tests.helpers.thread_ranks import (
    COLUMN,
    LAYOUTS,
    ROW,
    SPLITS,
    WORLD,
    deviation,
    differing_replicas,
    like,
    mesh_of,
    rows_of,
    shard,
)
from titan_muon import Muon

STEPS = 3
FLOAT32 = {"wire_dtype": "float32", "lr": 0.05}
ALGORITHMS = (
    {"algorithm": "muon"},
    {"algorithm": "normuon", "adjust_lr_fn": "match_param_rms"},
)

# Name of the layout, and the options of the group.
Entry = tuple[str, dict[str, Any]]


def entries(*algorithms: dict[str, Any]) -> list[Entry]:
    """Return every layout with every split rule and algorithm."""
    return [
        (name, {**algorithm, "split": split, "flatten": case.flatten})
        for name, case in LAYOUTS.items()
        for split in SPLITS[rows_of(case)]
        for algorithm in algorithms
    ]


def draw(chosen: list[Entry], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUTS[name].shape, generator=generator) for name, _ in chosen]


def optimizer_of(params: list[nn.Parameter], chosen: list[Entry], options: dict[str, Any]) -> Muon:
    """Return one optimizer; parameters with equal options share a group."""
    groups: dict[str, dict[str, Any]] = {}
    for param, (_, extra) in zip(params, chosen, strict=True):
        group = groups.setdefault(repr(extra), {"params": [], **extra})
        group["params"].append(param)
    return Muon(list(groups.values()), **options)


def train(params: list[nn.Parameter], optimizer: Muon, chosen: list[Entry]) -> None:
    for step in range(STEPS):
        for param, grad in zip(params, draw(chosen, 1 + step), strict=True):
            param.grad = like(param, grad)
        optimizer.step()


_LOCK = threading.Lock()


@functools.cache
def _unsharded(key: str) -> tuple[list[nn.Parameter], Muon]:
    chosen, options = _KEYS[key]
    params = [nn.Parameter(w) for w in draw(chosen, 0)]
    optimizer = optimizer_of(params, chosen, options)
    train(params, optimizer, chosen)
    return params, optimizer


_KEYS: dict[str, tuple[list[Entry], dict[str, Any]]] = {}


def unsharded(chosen: list[Entry], options: dict[str, Any]) -> tuple[list[nn.Parameter], Muon]:
    """Train plain tensors; once for all thread ranks."""
    with _LOCK:
        key = repr((chosen, options))
        _KEYS[key] = (chosen, options)
        return _unsharded(key)


class ThreadRanks(DTensorOpTestBase):
    @property
    def world_size(self) -> int:
        return WORLD

    def build_device_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (WORLD,))

    def sharded(
        self, chosen: list[Entry], options: dict[str, Any]
    ) -> tuple[list[nn.Parameter], Muon]:
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        params = [
            nn.Parameter(shard(w, mesh_of(LAYOUTS[name].mesh, meshes), LAYOUTS[name].placements))
            for w, (name, _) in zip(draw(chosen, 0), chosen, strict=True)
        ]
        optimizer = optimizer_of(params, chosen, options)
        train(params, optimizer, chosen)
        return params, optimizer

    def compare(
        self, chosen: list[Entry], options: dict[str, Any], tolerance: float, **reference: Any
    ) -> Muon:
        """Train both ways and compare parameters and state; replicas are equal bit by bit."""
        expected, plain = unsharded(chosen, {**options, **reference})
        params, optimizer = self.sharded(chosen, options)
        tensors: list[Tensor] = []
        for param, want, start, entry in zip(
            params, expected, draw(chosen, 0), chosen, strict=True
        ):
            error = deviation(param, want.detach(), want.detach() - start)
            assert error <= tolerance, f"{entry}: {error:.2e}"
            for key, value in optimizer.state[param].items():
                whole = plain.state[want][key]
                error = deviation(value, whole, whole)
                assert error <= tolerance, f"{entry} {key}: {error:.2e}"
                tensors.append(value)
            tensors.append(param)
        assert differing_replicas(tensors) == []
        return optimizer


class TestExactness(ThreadRanks):
    def test_every_layout_with_every_split(self):
        # The same numbers; only batched products, and the sums of match_param_rms over shards,
        # may add in another order. Relative to the rms of the movement, worst element.
        self.compare(entries(*ALGORITHMS), FLOAT32, 1e-5)

    def test_one_matrix_at_a_time_is_bitwise_equal(self):
        # Then every product has the same operands, whatever the layout.
        chosen = [e for e in entries({"algorithm": "normuon"}) if e[1]["split"] is None]
        self.compare(chosen, {**FLOAT32, "batch_size": 1}, 0.0)

    def test_one_stage_a_matrix(self):
        chosen = [e for e in entries(*ALGORITHMS) if e[1]["split"] is None]
        optimizer = self.compare(chosen, {**FLOAT32, "max_stage_bytes": 1}, 1e-5)
        (work,) = optimizer._works
        assert work.plan.stages > 4
        units = [(u.owner, u.stage) for u in work.plan.units]
        assert len(set(units)) == len(units)

    def test_algorithm_from_outside(self):
        chosen = entries({"algorithm": register_averaged()})
        self.compare(chosen, FLOAT32, 1e-5)

    def test_other_options(self):
        options = {
            **FLOAT32,
            "nesterov": False,
            "maximize": True,
            "weight_decay": 0.3,
            "cautious_weight_decay": False,
            "ns_method": "newton_schulz",
            "adjust_lr_fn": "spectral_unclamped",
        }
        chosen = [e for e in entries({"algorithm": "normuon"}) if e[1]["split"] is None]
        self.compare(chosen, options, 1e-5)


class TestMixedMeshes(ThreadRanks):
    def test_all_kinds_of_meshes_in_one_optimizer(self):
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        generator = torch.Generator().manual_seed(3)
        places = [
            (whole, [Shard(0)]),
            (square, ROW),
            (square["dp"], [Shard(0)]),
            (square["tp"], [Shard(1)]),
            (init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "one"))["one"], [Shard(0)]),
            None,
        ]
        starts = [torch.randn(12, 10, generator=generator) for _ in range(2 * len(places))]
        grads = [torch.randn(12, 10, generator=generator) for _ in starts]
        plain = [nn.Parameter(w.clone()) for w in starts]
        params = [
            nn.Parameter(w.clone() if place is None else shard(w, *place))
            for w, place in zip(starts, [*places, *places], strict=True)
        ]
        reference, optimizer = Muon(plain, **FLOAT32), Muon(params, **FLOAT32)
        for _ in range(STEPS):
            for param, other, grad in zip(params, plain, grads, strict=True):
                param.grad, other.grad = like(param, grad), grad
            optimizer.step()
            reference.step()
        assert len(optimizer._works) == 5
        for param, want, start in zip(params, plain, starts, strict=True):
            assert deviation(param, want.detach(), want.detach() - start) <= 1e-5


class TestTorchMuon(ThreadRanks):
    def test_agrees_with_torch_on_the_same_dtensors(self):
        layouts = {"fsdp": ((4,), [Shard(0)]), "columns": ((4,), [Shard(1)]), "row": ((2, 2), ROW)}
        generator = torch.Generator().manual_seed(5)
        start, grad = (torch.randn(24, 12, generator=generator) for _ in range(2))
        for name, (shape, placements) in layouts.items():
            mesh = init_device_mesh("cpu", shape)
            ours, theirs = (
                nn.Parameter(distribute_tensor(start, mesh, placements, src_data_rank=None))
                for _ in range(2)
            )
            options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
            optimizers = (
                Muon(
                    [ours],
                    ns_method="newton_schulz",
                    cautious_weight_decay=False,
                    ns_dtype="bfloat16",
                    **options,
                ),
                torch.optim.Muon([theirs], **options),
            )
            for _ in range(2):
                for param, optimizer in zip((ours, theirs), optimizers, strict=True):
                    param.grad = like(param, grad)
                    optimizer.step()
            difference = (ours - theirs).detach().full_tensor().norm()
            moved = (theirs.detach().full_tensor() - start).norm()
            # Both iterate in bfloat16, ours from a float32 norm, theirs from a bfloat16 one.
            assert difference <= 2e-2 * moved, f"{name}: {difference / moved:.1e}"


# Largest relative error (Frobenius) that the wire adds to an update: two roundings, of direction
# and update. A direction rounded by eps moves the polar factor by eps times what the polynomial
# amplifies of the small singular values (at most its slope at 0, 3.5e3 for five steps), less the
# more the spectrum is spread evenly; so the bound grows with the share of tiny singular values.
WIRE_BOUNDS = {
    "float32": {"gaussian": 1e-5, "condition 1e6": 1e-5, "power law": 1e-5},
    "float16": {"gaussian": 1e-3, "condition 1e6": 2e-2, "power law": 4e-3},
    "bfloat16": {"gaussian": 8e-3, "condition 1e6": 1.6e-1, "power law": 3e-2},
}


class TestWire(ThreadRanks):
    def test_error_of_each_wire_on_each_spectrum(self):
        mesh = init_device_mesh("cpu", (2, 2))
        for wire, bounds in WIRE_BOUNDS.items():
            for scale in (1.0, 1e-12, 1e12):
                params, grads = [], []
                for kind in SPECTRA:
                    grads.append(matrix(kind, 96, 128).float() * scale)
                    params.append(nn.Parameter(shard(torch.zeros_like(grads[-1]), mesh, COLUMN)))
                plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
                sharded = Muon(params, lr=1.0, wire_dtype=wire)
                reference = Muon(plain, lr=1.0)
                for param, other, grad in zip(params, plain, grads, strict=True):
                    param.grad, other.grad = like(param, grad), grad
                sharded.step()
                reference.step()
                for kind, param, want in zip(SPECTRA, params, plain, strict=True):
                    got = param.detach().full_tensor()
                    error = ((got - want.detach()).norm() / want.detach().norm()).item()
                    assert error <= bounds[kind], f"{wire} {kind} {scale}: {error:.1e}"
