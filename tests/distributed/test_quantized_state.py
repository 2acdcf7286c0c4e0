"""Quantised state on sharded parameters: exact where blocks allow it, refused by name elsewhere."""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.optimizers import register_averaged
from tests.helpers.quantized import bits, values
from tests.helpers.thread_ranks import COLUMN, ROW, cut, like, region_of, shard
from titan_muon import Muon
from titan_muon.distributed.tensors import local_of
from titan_muon.optim.load_planner import StateLoadPlanner

pytest.importorskip("torchao", reason="quantised state needs torchao")
FORMATS = ("int8", "int4", "float8")
ALGORITHMS = ("muon", "normuon", "adamuon", "adamw")
OPTIONS = {"lr": 0.05, "wire_dtype": "float32"}
# Name: mesh, placements, shape. A row is a whole number of blocks of each format.
BY_ROWS: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
    "fsdp": ((4,), [Shard(0)], (16, 256)),
    "fsdp uneven": ((4,), [Shard(0)], (18, 256)),
    "fsdp empty shard": ((4,), [Shard(0)], (17, 256)),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (16, 256)),
    "fsdp tp column": ((2, 2), COLUMN, (16, 256)),
    "experts": ((4,), [Shard(0)], (4, 6, 256)),
    "experts along rows": ((2, 2), [Shard(1), Shard(0)], (2, 16, 256)),
}


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _step(optimizer: Muon, seed: int, missing: bool = False) -> None:
    for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        grad = like(param, _draw(tuple(param.shape), 100 * seed + index))
        param.grad = None if missing else grad
    optimizer.step()


def _optimizer(params: list[nn.Parameter], algorithm: str, state_dtype: str, **options) -> Muon:
    options = {**OPTIONS, "state_dtype": state_dtype, **options}
    return Muon([{"params": params, "algorithm": algorithm}], **options)


class TestQuantizedState(ThreadRanks):
    def _params(self, mesh: tuple[int, ...], placements: Any, shape: Any) -> list[nn.Parameter]:
        whole = _draw(shape, 0)
        return [nn.Parameter(shard(whole, init_device_mesh("cpu", mesh), placements))]

    def test_whole_rows_equal_the_unsharded_run(self):
        for name, (mesh, placements, shape) in BY_ROWS.items():
            for algorithm in ALGORITHMS:
                for state_dtype in FORMATS:
                    params = self._params(mesh, placements, shape)
                    plain = [nn.Parameter(_draw(shape, 0))]
                    ours = _optimizer(params, algorithm, state_dtype)
                    reference = _optimizer(plain, algorithm, state_dtype)
                    for seed in (1, 2, 3):
                        _step(ours, seed)
                        _step(reference, seed)
                    case = (name, algorithm, state_dtype)
                    want = cut(plain[0].detach(), region_of(params[0]))
                    # The same blocks hold the same codes. One matrix of each shape, so even the
                    # order of sums is the same.
                    assert torch.equal(local_of(params[0].detach()), want), case
                    for key, value in ours.state[params[0]].items():
                        if isinstance(value, DTensor) and key != "second_moment_buffer":
                            whole = values(reference.state[plain[0]][key])
                            assert torch.equal(values(value), cut(whole, region_of(value))), case

    def test_cut_columns_cost_the_rounding_of_other_blocks(self):
        # Blocks differ, so values are rounded otherwise; 3 steps, relative to the movement.
        bounds = {"int8": 0.05, "float8": 0.1, "int4": 0.35}
        for mesh, placements in (((4,), [Shard(1)]), ((2, 2), ROW)):
            for state_dtype, bound in bounds.items():
                params = self._params(mesh, placements, (16, 1024))
                plain = [nn.Parameter(_draw((16, 1024), 0))]
                runs = _optimizer(params, "muon", state_dtype), _optimizer(plain, "muon", "float32")
                for seed in (1, 2, 3):
                    for run in runs:
                        _step(run, seed)
                moved = plain[0].detach() - _draw((16, 1024), 0)
                error = local_of(params[0].detach()) - cut(plain[0].detach(), region_of(params[0]))
                scale = moved.square().mean().sqrt()
                assert 0 < error.square().mean().sqrt() / scale < bound, (placements, state_dtype)

    def test_replicas_hold_the_same_codes(self):
        mesh = init_device_mesh("cpu", (2, 2))
        for algorithm in ALGORITHMS:
            params = [nn.Parameter(shard(_draw((16, 256), 0), mesh, [Replicate(), Shard(0)]))]
            optimizer = _optimizer(params, algorithm, "int8")
            for seed in (1, 2):
                # Both holders of the lower rows lack them: they count as zero there.
                missing = self.rank % 2 == 1 and seed == 2
                _step(optimizer, seed, missing)
            gathered: list[Any] = [None] * 4
            dist.all_gather_object(gathered, [bits(v) for v in optimizer.state[params[0]].values()])
            for rank in (0, 1):
                assert gathered[rank][-1][0].any()
                torch.testing.assert_close(gathered[rank], gathered[rank + 2], rtol=0, atol=0)

    def test_missing_gradient_keeps_the_bits(self):
        for algorithm in ALGORITHMS:
            params = self._params((4,), [Shard(0)], (16, 256))
            optimizer = _optimizer(params, algorithm, "int8", nonfinite="skip")
            _step(optimizer, 1)
            before = [bits(v) for v in optimizer.state[params[0]].values()]
            _step(optimizer, 2, missing=True)
            params[0].grad = like(params[0], torch.full((16, 256), float("nan")))
            optimizer.step()
            after = [bits(v) for v in optimizer.state[params[0]].values()]
            torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_matrices_in_several_stages_are_rounded_once(self):
        # Eight experts on four owners land in two stages; what lands must not round the others
        # again. Signed values: of those, encoding is not the inverse of decoding.
        algorithm, shape = register_averaged(), (8, 8, 128)
        params = self._params((4,), [Shard(1)], shape)
        plain = [nn.Parameter(_draw(shape, 0))]
        runs = _optimizer(params, algorithm, "int8"), _optimizer(plain, algorithm, "int8")
        for seed in (1, 2, 3):
            for run in runs:
                _step(run, seed)
        for key in ("momentum_buffer", "average_buffer"):
            got = runs[0].state[params[0]][key]
            whole = values(runs[1].state[plain[0]][key])
            assert torch.equal(values(got), cut(whole, region_of(got))), key

    def test_shards_that_fit_no_block_are_refused_alike(self):
        mesh = init_device_mesh("cpu", (4,))
        param = nn.Parameter(shard(_draw((64, 100), 0), mesh, [Shard(0)]))
        with pytest.raises(
            ValueError, match=r"parameter 0: shape \(64, 100\) leaves 1600 elements"
        ):
            _optimizer([param], "muon", "int8")
        assert _optimizer([param], "muon", "bfloat16").state[param]


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole values of a state tensor cut along dim 0. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values(tensor))
    return torch.cat(gathered)


class TestCheckpoint(ThreadRanks):
    def _save(self, algorithm: str, state_dtype: str, placement: Any) -> tuple[str, Any]:
        mesh = init_device_mesh("cpu", (4,))
        param = nn.Parameter(shard(_draw((16, 1024), 0), mesh, [placement]))
        optimizer = _optimizer([param], algorithm, state_dtype)
        _step(optimizer, 1)
        folder = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        dcp.save({"state": optimizer.state_dict()["state"]}, checkpoint_id=folder[0])
        return folder[0], (param, optimizer)

    def test_same_mesh_keeps_the_bits(self):
        for algorithm in ALGORITHMS:
            for state_dtype in FORMATS:
                folder, (param, optimizer) = self._save(algorithm, state_dtype, Shard(0))
                twin = nn.Parameter(param.detach().clone())
                loaded = _optimizer([twin], algorithm, state_dtype)
                dcp.load({"state": loaded.state_dict()["state"]}, checkpoint_id=folder)
                for key, value in optimizer.state[param].items():
                    got = loaded.state[twin][key]
                    torch.testing.assert_close(bits(got), bits(value), rtol=0, atol=0)
                    assert bits(got)[-1].any(), key

    def test_another_layout_is_rounded_once_more(self):
        # One more rounding of values that were rounded, relative to the norm.
        bounds = {"int8": 0.02, "float8": 0.05, "int4": 0.2, "float32": 1e-6}
        layouts: list[tuple[Any, Any]] = [((4,), [Shard(1)]), ((2, 2), [Replicate(), Shard(0)])]
        for mesh, placements in layouts:
            for state_dtype in FORMATS:
                folder, (param, optimizer) = self._save("adamuon", state_dtype, Shard(0))
                wanted = {key: whole_of(value) for key, value in optimizer.state[param].items()}
                for other, bound in bounds.items():
                    twin = nn.Parameter(
                        shard(_draw((16, 1024), 0), init_device_mesh("cpu", mesh), placements)
                    )
                    loaded = _optimizer([twin], "adamuon", other)
                    state = {"state": loaded.state_dict()["state"]}
                    dcp.load(state, checkpoint_id=folder, planner=StateLoadPlanner())
                    for key, whole in wanted.items():
                        want = cut(whole, region_of(loaded.state[twin][key]))
                        got = values(loaded.state[twin][key])
                        error = (got - want).norm() / want.norm()
                        assert error <= bound, (mesh, state_dtype, other, key, error)

    def test_plain_dcp_takes_whole_blocks_and_refuses_others(self):
        for placements, fits in (([Shard(0)], True), ([Shard(1)], False)):
            folder, (param, optimizer) = self._save("muon", "int8", Shard(0))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
            twin = nn.Parameter(shard(_draw((16, 1024), 0), mesh, [Replicate(), *placements]))
            loaded = _optimizer([twin], "muon", "int8")
            state = {"state": loaded.state_dict()["state"]}
            if fits:
                dcp.load(state, checkpoint_id=folder)
                got = loaded.state[twin]["momentum_buffer"]
                whole = whole_of(optimizer.state[param]["momentum_buffer"])
                assert torch.equal(values(got), cut(whole, region_of(got)))
            else:
                with pytest.raises(CheckpointException, match="aten.slice along the first dim"):
                    dcp.load(state, checkpoint_id=folder)
