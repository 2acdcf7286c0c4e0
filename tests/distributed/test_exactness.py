"""On every layout the sharded update equals the unsharded one, at the planned cost."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from titan_muon import Muon
from titan_muon.distributed.layout import layout_of, local_region

QKV = {"kind": "interleaved_qkv", "n_kv_heads": 2, "heads_per_kv": 2, "head_dim": 4}
STEPS = 3

# name: mesh shape, placements, global shape, options
LAYOUTS = {
    "fsdp shard 0": ((4,), [Shard(0)], (32, 12), {}),
    "fsdp shard 1": ((4,), [Shard(1)], (32, 12), {}),
    "fsdp uneven": ((4,), [Shard(0)], (18, 7), {}),
    "fsdp fewer rows than ranks": ((4,), [Shard(0)], (3, 8), {}),
    "fsdp uneven columns": ((4,), [Shard(1)], (5, 6), {}),
    "ddp": ((4,), [Replicate()], (16, 12), {}),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (16, 12), {}),
    "hsdp uneven": ((2, 2), [Replicate(), Shard(0)], (7, 12), {}),
    "tp column": ((4,), [Shard(0)], (16, 12), {}),
    "fsdp tp column": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (16, 12), {}),
    "fsdp tp column uneven": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (10, 6), {}),
    "fsdp tp row": ((2, 2), [Shard(0), Shard(1)], (16, 12), {}),
    "fsdp tp row uneven": ((2, 2), [Shard(0), Shard(1)], (7, 5), {}),
    "fsdp tp replicated": ((2, 2), [Shard(0), Replicate()], (16, 12), {}),
    "hsdp tp": ((1, 2, 2), [Replicate(), Shard(0), Shard(1)], (16, 12), {}),
    "experts efsdp strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 6, 5), {}),
    "experts efsdp shard 1": ((2, 2), [Shard(1), Shard(0)], (4, 6, 5), {}),
    "experts without ep": ((4,), [Shard(1)], (3, 6, 8), {}),
    "experts whole": ((4,), [Shard(0)], (8, 6, 8), {}),
    "experts fewer than ranks": ((4,), [Shard(0)], (3, 6, 8), {}),
    "experts replicated": ((2, 2), [Replicate(), Shard(0)], (4, 6, 8), {}),
    "qkv fsdp": ((4,), [Shard(0)], (32, 6), {"split": QKV}),
    "qkv fsdp tp": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (32, 6), {"split": QKV}),
    "gate up fsdp": ((4,), [Shard(0)], (20, 6), {"split": [10, 10]}),
    "heads fsdp": ((4,), [Shard(0)], (24, 6), {"split": {"kind": "blocks", "rows": 4}}),
    "strided experts": (
        (2, 2),
        [Shard(1), Shard(0)],
        (4, 12, 5),
        {"split": {"kind": "strided", "count": 2}},
    ),
    "convolution": ((4,), [Shard(0)], (6, 3, 2, 2), {"flatten": True}),
    "convolution input channels": ((2, 2), [Shard(0), Shard(1)], (6, 3, 2, 2), {"flatten": True}),
}


def shard(whole, mesh, placements):
    """Cut a whole tensor by the layout's own arithmetic; ``distribute_tensor`` needs even shards."""
    like = torch.empty(whole.shape, device="meta")
    empty = DTensor.from_local(
        torch.empty(0), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    region = local_region(layout_of(empty), tuple(mesh.get_coordinate()))
    local = whole
    for dim, intervals in enumerate(region):
        index = torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long)
        local = local.index_select(dim, index)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def gathered(dtensor):
    """Return the whole tensor by all-gathering every rank's region."""
    whole = torch.full(dtensor.shape, float("nan"), dtype=dtensor.dtype)
    layout = layout_of(dtensor)
    mesh = dtensor.device_mesh
    parts = [None] * mesh.size()
    torch.distributed.all_gather_object(parts, (mesh.get_coordinate(), dtensor.to_local()))
    for coordinate, local in parts:
        index = [
            torch.tensor([i for a, b in dim for i in range(a, b)], dtype=torch.long)
            for dim in local_region(layout, tuple(coordinate))
        ]
        if local.numel():
            grid = torch.meshgrid(*index, indexing="ij")
            seen = whole[grid]
            fresh = seen.isnan()
            assert torch.equal(torch.where(fresh, local, seen), local), "replicas differ"
            whole[grid] = local
    assert not whole.isnan().any()
    return whole


def unsharded(weights, grads, options):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = Muon([{"params": params, **options}])
    for step_grads in grads:
        for param, grad in zip(params, step_grads):
            param.grad = grad.clone()
        optimizer.step()
    return params, optimizer


class ExactnessTest(DTensorOpTestBase):
    @property
    def world_size(self):
        return 4

    def build_device_mesh(self):
        return init_device_mesh("cpu", (4,))

    def sharded(self, name, options, weights, grads):
        shape, placements, _, extra = LAYOUTS[name]
        mesh = init_device_mesh("cpu", shape)
        params = [torch.nn.Parameter(shard(w, mesh, placements)) for w in weights]
        optimizer = Muon([{"params": params, **options, **extra}])
        for step_grads in grads:
            for param, grad in zip(params, step_grads):
                param.grad = shard(grad, mesh, placements)
            optimizer.step()
        return params, optimizer

    def data(self, name, count=3):
        generator = torch.Generator().manual_seed(hash(name) % 1000)
        shape = LAYOUTS[name][2]
        draw = lambda: torch.randn(shape, generator=generator)  # noqa: E731
        weights = [draw() for _ in range(count)]
        return weights, [[draw() for _ in range(count)] for _ in range(STEPS)]

    def compare(self, name, options, tolerance):
        extra = LAYOUTS[name][3]
        weights, grads = self.data(name)
        want, reference = unsharded(weights, grads, {**options, **extra})
        params, optimizer = self.sharded(name, options, weights, grads)
        for param, expected, start in zip(params, want, weights):
            moved = (expected - start).norm()
            error = (gathered(param.detach()) - expected).norm() / moved
            assert error <= tolerance, f"{name} {options}: {error:.2e}"
            for key, value in optimizer.state[param].items():
                target = reference.state[expected][key]
                difference = (gathered(value) - target).norm() / target.norm()
                assert difference <= tolerance, f"{name} {options} {key}: {difference:.2e}"
        return optimizer

    def test_float32_wire_equals_unsharded(self):
        for name in LAYOUTS:
            for algorithm in ("muon", "normuon"):
                for adjust in ("original", "match_param_rms"):
                    options = {
                        "algorithm": algorithm,
                        "wire_dtype": "float32",
                        "lr": 0.05,
                        "adjust_lr_fn": adjust,
                    }
                    # The same numbers in the same order, but for the sums of match_param_rms
                    # and the batch size of the products.
                    self.compare(name, options, 1e-6)


if __name__ == "__main__":
    run_tests()
