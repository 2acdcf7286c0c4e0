"""A torchtitan model laid out as at its true world size, in one process and without memory."""

import copy
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_muon.distributed.layout import layout_of
from titan_muon.distributed.matrices import block_rows, matrix_rule
from titan_muon.distributed.plan import Channel, Plan, PlanParam, make_plan
from titan_muon.integration.fused_weights import fused_splits
from titan_muon.optim.param_groups import assign
from titan_muon.orthogonalization import cost, resolve_schedule, work_bytes

__all__ = ["fake_ranks", "meta_model", "plan_model", "tie"]


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


def tie(model: nn.Module) -> None:
    """Tie embeddings and output head as torchtitan's init_states does; sharding unties them.

    Args:
        model: Laid out on the meta device. Modified if its config ties the two.
    """
    if getattr(model, "enable_weight_tying", False):
        model.tok_embeddings.weight = model.lm_head.weight


def plan_model(
    model: nn.Module, *, wire_dtype: str = "float16", max_stage_bytes: int = 1 << 30
) -> list[Plan]:
    """Plan Muon with the default routing and default options for a laid-out model.

    Args:
        model: Result of :func:`meta_model`. Not modified.
        wire_dtype: As the option.
        max_stage_bytes: As the option.

    Returns:
        One plan for each set of ranks. Costs are FLOPs of kernels that compute one triangle of
        symmetric products.
    """
    by_ranks: dict[tuple[int, ...], list[PlanParam]] = defaultdict(list)
    for found in assign(model, ("muon", {}), ("adamw", {}), splits=fused_splits(model)):
        if found.algorithm != "muon":
            continue
        layout = layout_of(found.param, found.name)
        rule = matrix_rule(
            found.param.shape,
            flatten=found.options.get("flatten", False),
            split=found.options.get("split"),
            name=found.name,
        )
        sizes = [sum(r.count for r in ranges) for ranges in block_rows(rule)]
        flops, memory = zip(*(_matrix_cost(n, rule.stack[2]) for n in sizes), strict=True)
        channels = (Channel("direction", wire_dtype),)
        param = PlanParam(found.name, layout, rule, 0, channels, flops, memory)
        by_ranks[tuple(sorted(layout.ranks))].append(param)
    return [make_plan(p, max_stage_bytes=max_stage_bytes) for p in by_ranks.values()]


def _matrix_cost(rows: int, columns: int) -> tuple[float, int]:
    schedule = resolve_schedule("polar_express", 5)
    flops, evaluation = min(
        (cost(rows, columns, schedule, e, True), e) for e in ("standard", "gram")
    )
    stack = 2 * rows * columns
    return flops, stack + work_bytes(rows, columns, torch.float16, evaluation)
