"""Gate and up as a dim of one weight, (..., M, 2, N), step like two weights on every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.thread_ranks import (
    COLUMN,
    cut,
    deviation,
    differing_replicas,
    region_of,
    shard,
)
from titan_muon import Muon
from titan_muon.distributed.tensors import local_of

SPLIT = {"kind": "fused_dim"}
OPTIONS = {"lr": 0.05, "wire_dtype": "float32"}
LAYOUTS: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
    "fsdp": ((4,), [Shard(0)], (12, 2, 8)),
    "fsdp uneven": ((4,), [Shard(0)], (9, 2, 8)),
    "fsdp empty": ((4,), [Shard(0)], (3, 2, 8)),
    "gate and up apart": ((4,), [Shard(1)], (6, 2, 8)),
    "columns": ((4,), [Shard(2)], (6, 2, 9)),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (12, 2, 8)),
    "fsdp tp": ((2, 2), COLUMN, (12, 2, 8)),
    "fsdp columns": ((2, 2), [Shard(0), Shard(2)], (10, 2, 7)),
    "experts": ((4,), [Shard(0)], (4, 6, 2, 8)),
    "experts along rows": ((2, 2), [Shard(1), Shard(0)], (4, 6, 2, 8)),
    "experts without ep": ((4,), [Shard(1)], (3, 6, 2, 8)),
    "three in one": ((4,), [Shard(0)], (8, 3, 5)),
}


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _apart(shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Train the matrices as weights of their own; return weight and momentum put together."""
    parts = [nn.Parameter(w.contiguous()) for w in _draw(shape, 0).unbind(-2)]
    optimizer = Muon([{"params": parts, **options}], **OPTIONS)
    for seed in (1, 2, 3):
        for part, grad in zip(parts, _draw(shape, seed).unbind(-2), strict=True):
            part.grad = grad.contiguous()
        optimizer.step()
    key = "second_moment_buffer" if options["algorithm"] == "normuon" else "momentum_buffer"
    states = [optimizer.state[p][key] for p in parts]
    return torch.stack([p.detach() for p in parts], -2), torch.stack(states, -2)


class TestFusedDim(ThreadRanks):
    def test_step_of_one_weight_is_that_of_several(self):
        for name, (mesh, placements, shape) in LAYOUTS.items():
            for options in (
                {"algorithm": "muon", "adjust_lr_fn": "match_param_rms"},
                {"algorithm": "normuon", "adjust_lr_fn": "original"},
            ):
                device_mesh = init_device_mesh("cpu", mesh)
                param = nn.Parameter(shard(_draw(shape, 0), device_mesh, placements))
                optimizer = Muon([{"params": [param], "split": SPLIT, **options}], **OPTIONS)
                for seed in (1, 2, 3):
                    param.grad = shard(_draw(shape, seed), device_mesh, placements)
                    optimizer.step()
                want, state = _apart(shape, options)
                # Only batched products, and sums over shards, may add in another order.
                moved = want - _draw(shape, 0)
                assert deviation(param, want, moved) < 1e-5, (name, options)
                *_, value = optimizer.state[param].values()
                assert deviation(value, state, state) < 1e-5, (name, options)
                assert differing_replicas([param, value]) == []
                matrices = sum(len(w.plan.units) for w in optimizer._matrix_works())
                assert matrices == want[..., 0].numel() // want.shape[-3]
                assert local_of(param).shape == cut(want, region_of(param)).shape


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 6), {}, r"'fused_dim' takes \(\.\.\., M, n, N\), three dims or more"),
        ((4, 2, 6), {"flatten": True}, "not flattened; got shape .* with flatten = True"),
        ((4, 2, 6), {"split": {"kind": "fused_dim", "count": 2}}, "got {'count': 2}"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.zeros(shape))], "split": SPLIT, **options}])
