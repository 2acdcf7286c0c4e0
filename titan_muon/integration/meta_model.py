"""A torchtitan model laid out as at its true world size, in one process and without memory."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_muon.integration.toml_place import ConfigError

__all__ = ["fake_ranks", "meta_model", "meta_parts"]


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Generator[None]:
    """Pretend to be one rank of many: collectives return at once and move nothing.

    Args:
        world_size: Number of ranks.
        rank: The one to be.

    Raises:
        RuntimeError: A process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_ranks needs a process without process group; one exists already")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_model(config: Any, world_size: int) -> nn.Module:
    """Build a model as :func:`meta_parts` does, without pipeline parallelism.

    Args:
        config: ``Trainer.Config``. Not modified.
        world_size: Number of ranks, inside :func:`fake_ranks`.
    """
    (model,) = meta_parts(copy.deepcopy(config), world_size)
    return model


def meta_parts(config: Any, world_size: int, *, first: bool = True) -> list[nn.Module]:
    """Do what the Trainer does between its process groups and its weights, on the meta device.

    Args:
        config: ``Trainer.Config``. Its model's config is completed.
        world_size: Number of ranks, inside :func:`fake_ranks`.
        first: False where the model's config is complete already.

    Returns:
        This rank's model parts; their parameters are DTensors with the placements of the real run.

    Raises:
        ConfigError: Pipeline parallelism of a model that has none.
    """
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.tools.utils import set_default_dtype

    dims = ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec: Any = config.model_spec
    if first:
        spec.model.update_from_config(config=config)
        if config.override.imports:
            apply_overrides(config.override, config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    common: dict[str, Any] = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": None,
        "dump_folder": config.dump_folder,
    }
    if not dims.pp_enabled:
        model = spec.parallelize_fn(model, **common)
        _tie(model)
        return [model]
    if not spec.pipelining_fn:
        raise ConfigError(f"{spec.name} has no pipeline parallelism; leave its degree at 1.")
    _, parts, _, _ = spec.pipelining_fn(
        model,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=config.loss.build(compile_config=config.compile),
        **common,
    )
    return parts


def _tie(model: Any) -> None:
    """Tie embeddings and output head as torchtitan's init_states does; sharding unties them.

    Args:
        model: Laid out on the meta device. Modified if its config ties the two.
    """
    if getattr(model, "enable_weight_tying", False):
        model.tok_embeddings.weight = model.lm_head.weight
