"""Weights that torchao wraps for float8 and MXFP8 training step like plain ones."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.helpers.optimizers import generator
from titan_muon import Muon, param_groups
from titan_muon.distributed.tensors import local_of

pytest.importorskip("torchao", reason="wrapped weights are torchao's")


def _float8(weight: Tensor) -> Tensor:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    return WeightWithDynamicFloat8CastTensor(weight, LinearMMConfig(), torch.float8_e4m3fn)


def _mxfp8_experts(weight: Tensor) -> Tensor:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

    return MXFP8TrainingWeightWrapperTensor(weight, MXFP8TrainingOpConfig())


def _float8_experts(weight: Tensor) -> Tensor:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    return Float8TrainingWeightWrapperTensor(weight, Float8TrainingOpConfig())


WRAPPERS = {"float8": _float8, "mxfp8": _mxfp8_experts, "float8 experts": _float8_experts}
# bfloat16 weights are rounded stochastically too.
OPTIONS = [
    {"algorithm": "muon"},
    {"algorithm": "normuon", "state_dtype": "int8"},
    {"algorithm": "adamuon", "adjust_lr_fn": "match_param_rms"},
    {"algorithm": "adamw"},
    {"algorithm": "adamw", "state_dtype": "bfloat16", "nonfinite": "skip"},
]


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _steps(params: list[nn.Parameter], options: dict, sharded: bool) -> Muon:
    optimizer = Muon([{"params": params, **options}], lr=0.05)
    g = generator(3)
    for _ in range(3):
        for param in params:
            grad = torch.randn(param.shape, generator=g).to(param.dtype)
            if sharded:
                grad = DTensor.from_local(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_those_of_the_plain_weight(wrapper, sharded, dtype, options, mesh):
    rounds = {"stochastic_rounding": dtype == torch.bfloat16}
    start = [torch.randn(s, generator=generator(0)).to(dtype) for s in ((64, 64), (2, 64, 32))]
    plain = [nn.Parameter(w.clone()) for w in start]
    inner = [w.clone() for w in start]
    wrapped = [WRAPPERS[wrapper](w) for w in inner]
    if sharded:
        wrapped = [DTensor.from_local(w, mesh, [Shard(0)], run_check=False) for w in wrapped]
    params = [nn.Parameter(w) for w in wrapped]
    expected = _steps(plain, {**options, **rounds}, False)
    got = _steps(params, {**options, **rounds}, sharded)
    for values, want, param in zip(inner, plain, params, strict=True):
        # In place, in the tensor that forward reads.
        assert torch.equal(values, want.detach())
        assert local_of(param.detach()).data_ptr() == values.data_ptr()
        for key, value in got.state[param].items():
            assert type(local_of(value)) is type(expected.state[want][key]), key
    copy.deepcopy(got.state_dict())


def test_float8_linear_routes_like_a_linear():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))

    model = build()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear),
    )
    groups, plain = param_groups(model), param_groups(build())
    found, wanted = (
        {(g["algorithm"], name) for g in gs for name in g["param_names"]} for gs in (groups, plain)
    )
    assert found == wanted
    assert ("muon", "1.weight") in found
    optimizer = Muon(groups, lr=0.02)
    before = local_of(model[1].weight.detach()).clone()
    model(torch.randint(32, (16,))).square().mean().backward()
    optimizer.step()
    assert not torch.equal(local_of(model[1].weight.detach()), before)
