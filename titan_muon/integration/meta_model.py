"""A torchtitan model laid out as at its true world size, in one process and without memory."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["fake_ranks", "meta_model", "tie"]


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
    """Build a model on the meta device and lay it out as the Trainer does.

    Args:
        config: ``Trainer.Config``. Not modified. Without pipeline parallelism.
        world_size: Number of ranks, inside :func:`fake_ranks`.

    Returns:
        The model; its parameters are DTensors with the placements of the real run.
    """
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.tools import utils

    config = copy.deepcopy(config)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"), utils.set_default_dtype(torch.float32):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    tie(model)
    return model


def tie(model: Any) -> None:
    """Tie embeddings and output head as torchtitan's init_states does; sharding unties them.

    Args:
        model: Laid out on the meta device. Modified if its config ties the two.
    """
    if getattr(model, "enable_weight_tying", False):
        model.tok_embeddings.weight = model.lm_head.weight
