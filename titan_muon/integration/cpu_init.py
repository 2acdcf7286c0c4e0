"""Initial weights that are the same numbers on every mesh.

DTensor initialisers on a CPU mesh draw the same numbers on every rank, so the shards of one
weight repeat each other, and every mesh starts from different weights. Here each module draws
its whole parameters from a generator seeded by the run's seed and the module's own name; each
rank keeps its shard. Neither the mesh nor the pipeline stage nor the order of modules matters.
"""

import functools
import hashlib
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_original_init_weights = BaseModel.init_weights
_seed = 0


def install_initialisation(seed: int) -> None:
    """Make ``BaseModel.init_weights`` draw mesh-independent weights.

    Args:
        seed: The run's seed; the same on every rank.
    """
    global _seed
    _seed = seed
    BaseModel.init_weights = cast(Any, _init_weights)


def _init_weights(model: BaseModel, **kwargs: object) -> None:
    """torchtitan's own walk over modules and buffers, with each module drawing whole tensors."""
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, Module)]
    for name, module in modules:
        # Shadows the method on this one instance, which is how the module learns its name.
        draw = functools.partial(_draw_parameters, module, _module_seed(_seed, name))
        module._init_self_parameters = draw
    try:
        _original_init_weights(model, **kwargs)
    finally:
        for _, module in modules:
            del module._init_self_parameters


def _draw_parameters(module: Module, seed: int) -> None:
    """Run a module's own initialiser on whole tensors and keep this rank's shards.

    One module at a time, so no more than one module's whole parameters exist beside the model.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    whole = {name: _whole_like(parameter) for name, parameter in parameters.items()}
    try:
        module._parameters.update(whole)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            type(module)._init_self_parameters(module)
    finally:
        module._parameters.update(parameters)
    for name, parameter in parameters.items():
        # A tied parameter is drawn by the module that owns it.
        if (module._param_init or {}).get(name) is not skip_param_init:
            _write(parameter, whole[name])


def _whole_like(parameter: nn.Parameter) -> nn.Parameter:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _write(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        # Every rank holds the same whole tensor, so no rank has to send it.
        shard = distribute_tensor(
            whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(whole)


def _module_seed(seed: int, name: str) -> int:
    canonical = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    digest = hashlib.sha256(f"{seed}/{canonical}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
