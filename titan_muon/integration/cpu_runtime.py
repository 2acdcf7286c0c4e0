"""What torchtitan needs to train on a CPU with gloo; nothing changes before :func:`install`."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_logger = logging.getLogger(__name__)
_DEFAULT_SEED = 0


def needs_cpu_runtime() -> bool:
    """Return whether this machine has no accelerator that torchtitan can train on.

    Apple's counts as none: torchtitan's collectives and attention do not run there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "mps"


def install() -> None:
    """Make torchtitan take the CPU for its device; call before the config is built.

    Changes torchtitan's device module and the one collective that gloo lacks, and says so in
    one log line. Calling it again is harmless.
    """
    from titan_muon.integration.cpu_collectives import install_all_to_all
    from titan_muon.integration.cpu_device import install_device_module

    install_device_module()
    install_all_to_all()
    _logger.info("No accelerator found: torchtitan trains on the CPU with gloo.")


def adapt_config(config: "Trainer.Config") -> "Trainer.Config":
    """Change a finished Trainer config so that it runs on a CPU; call after :func:`install`.

    Attention and experts are replaced by modules that compute the same function here; CUDA
    graphs, compilation, mixed precision, symmetric memory and CPU offload are switched off;
    FSDP reduces by plain sums; weights start the same on every mesh, drawn from
    ``debug.seed`` (0 where none is set).

    Args:
        config: With every overlay and command-line flag applied. Modified in place.

    Returns:
        ``config``.

    Raises:
        ValueError: A setting cannot run on a CPU; names it, its value and what to do.
    """
    from titan_muon.integration.cpu_init import install_initialisation
    from titan_muon.integration.cpu_modules import replace_modules

    _refuse_gpu_only_settings(config)
    changes = _switch_off_gpu_settings(config)
    spec = config.model_spec
    if spec is not None:
        changes += replace_modules(spec.model)
        parallelize = _with_sum_reduction(spec.parallelize_fn)
        config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    seed = config.debug.seed
    install_initialisation(_DEFAULT_SEED if seed is None else seed)
    if changes:
        _logger.info("For the CPU: %s.", "; ".join(changes))
    return config


def _refuse_gpu_only_settings(config: "Trainer.Config") -> None:
    """Raise ValueError for settings whose code exists on a GPU only."""
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        LocalTokenDispatcher,
    )

    advice = "It does not run on a CPU; leave it out, or train on a GPU."
    if config.profiler.enable_memory_snapshot:
        raise ValueError(f"profiler.enable_memory_snapshot = true. {advice}")
    if config.debug.spmd_typechecking:
        raise ValueError(f"debug.spmd_typechecking = true. {advice}")
    if config.comm.mode == "torchcomms":
        raise ValueError(f"comm.mode = 'torchcomms'. {advice}")
    if config.model_spec is None:
        return
    runnable = (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config)
    for fqn, node, _, _ in config.model_spec.traverse(LocalTokenDispatcher.Config):
        if type(node) not in runnable:
            name = type(node).__qualname__.removesuffix(".Config")
            raise ValueError(
                f"{fqn}: {name} needs a GPU. On a CPU the token dispatchers are "
                "LocalTokenDispatcher and AllToAllTokenDispatcher; choose the model's "
                "standard expert-parallel backend."
            )


def _switch_off_gpu_settings(config: "Trainer.Config") -> list[str]:
    """Set what only speeds up a GPU to its plain value; return one phrase per change."""
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    plain_values: list[tuple[str, str, Any]] = [
        ("training", "disable_cuda_graphs", True),
        ("training", "mixed_precision_param", "float32"),
        ("training", "enable_cpu_offload", False),
        ("compile", "enable", False),
        ("compile", "enable_async_tensor_parallel", False),
        ("parallelism", "enable_fsdp_symm_mem", False),
    ]
    changes = []
    for section, name, value in plain_values:
        table = getattr(config, section)
        if getattr(table, name) != value:
            setattr(table, name, value)
            changes.append(f"{section}.{name} = {str(value).lower()}")
    checkpoint: Any = config.checkpoint
    if getattr(checkpoint, "async_mode", None) == "async_with_pinned_mem":
        checkpoint.async_mode = "async"
        changes.append("checkpoint.async_mode = async (no device to copy from)")
    if isinstance(config.activation_checkpoint, MemoryBudgetAC.Config):
        config.activation_checkpoint = None
        changes.append("no activation checkpointing (a memory budget needs compilation)")
    return changes


def _with_sum_reduction(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wrap a ``parallelize_fn`` so that FSDP reduces by sums: gloo has no scaled sum."""

    @functools.wraps(parallelize)
    def parallelize_for_gloo(*args: Any, **kwargs: Any) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule

        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_for_gloo
