"""A torchtitan model as one rank of a large run would hold it: no processes, no memory."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from titan_muon.integration.meta_model import fake_ranks, meta_parts
from titan_muon.integration.toml_place import ConfigError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["Stage", "parse_config", "quiet", "stages_of", "world_size_of"]


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline stage hold.

    Args:
        number: Of the stage, 0 without pipeline parallelism.
        ranks: Global ranks.
        parts: Model parts on the meta device, their parameters laid out as in the run.
    """

    number: int
    ranks: range
    parts: list[nn.Module]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence what torchtitan logs about a run that does not take place."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def parse_config(args: list[str]) -> tuple["Trainer.Config", list[str]]:
    """Return the Trainer config of a command line as ``titan_muon.train`` would, and its notes.

    Args:
        args: Arguments of ``titan_muon.train``.

    Raises:
        ConfigError: A mistake in a file or a flag.
        SystemExit: tyro refused a flag.
    """
    from titan_muon.integration.cpu_device import install_device_module

    # Whatever this machine has, nothing may be asked of it.
    install_device_module()
    from titan_muon.integration.data import register_datasets
    from titan_muon.integration.manager import TrainConfigManager

    register_datasets()
    # Loaded first, so that they keep the true answer once this is over.
    import torchtitan.components.quantization  # noqa: F401

    manager = TrainConfigManager()
    with _answering(has_cuda_capability=lambda *_: True), _graphs_unchecked() as check:
        config = manager.parse_args(args)
    try:
        check(config)
    except ValueError as error:
        # CUDA graphs move no parameter, so that there is a plan all the same.
        manager.notes.append(f"on GPUs torchtitan refuses this config: {error}")
    return config, manager.notes


def world_size_of(parallelism: Any, given: int | None) -> tuple[int, str | None]:
    """Return the number of ranks of a run, and a sentence where the config leaves it open.

    Args:
        parallelism: torchtitan's ParallelismConfig.
        given: The user's number, None to take what the config says.

    Raises:
        ConfigError: The number does not fit the degrees, or they do not fit each other.
    """
    is_open = parallelism.data_parallel_shard_degree == -1
    shard = parallelism.data_parallel_shard_degree
    inner = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    fixed = inner * parallelism.data_parallel_replicate_degree
    fixed *= parallelism.pipeline_parallel_degree
    note = None
    if is_open and given is None:
        shard = 1
        note = (
            "data_parallel_shard_degree = -1 takes all ranks that are left; planned for 1, that is "
            f"{fixed} in all. --world-size N plans for N ranks."
        )
    elif is_open and given is not None:
        shard = given // fixed
    world_size = fixed * shard
    if given is not None and (given != world_size or given < 1):
        allowed = f"a multiple of {fixed}" if is_open else f"{world_size}, or leave it out"
        raise ConfigError(
            f"--world-size = {given} does not fit the degrees in [parallelism]; use {allowed}."
        )
    experts = parallelism.expert_parallel_degree
    if shard * inner % experts:
        advice = " Give --world-size." if note else ""
        raise ConfigError(
            f"[parallelism] expert_parallel_degree = {experts} does not divide "
            "data_parallel_shard_degree * context_parallel_degree * tensor_parallel_degree = "
            f"{shard * inner}.{advice}"
        )
    return world_size, note


def stages_of(config: "Trainer.Config", world_size: int) -> Iterator[Stage]:
    """Yield the model of every pipeline stage; its process groups live until the next is asked for.

    Args:
        config: Result of :func:`parse_config`; modified as the Trainer does.
        world_size: Number of ranks.

    Raises:
        ConfigError: torchtitan cannot lay this model out so; says why.
    """
    _leave_out_what_moves_nothing(config)
    count = config.parallelism.pipeline_parallel_degree
    size = world_size // count
    for number in range(count):
        # torchtitan's meshes have the pipeline as their slowest axis.
        ranks = range(number * size, (number + 1) * size)
        with _as_rank(ranks[0], world_size):
            try:
                parts = meta_parts(config, world_size, first=number == 0)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"torchtitan cannot lay this model out on {world_size} ranks: "
                    f"{type(error).__name__}: {error}"
                ) from error
            yield Stage(number, ranks, parts)


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Generator[None]:
    """Be one rank of a run on this process' CPU."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torchtitan.distributed import utils

    backend = utils.get_spmd_backend()
    try:
        with fake_ranks(world_size, rank), _answering(device_type="cpu"):
            yield
    finally:
        utils.set_spmd_backend(backend)
        # Meshes of two fake worlds are equal, and the cached one would be taken for the new one.
        _clear_sharding_prop_cache()


@contextlib.contextmanager
def _answering(**answers: Any) -> Generator[None]:
    """Replace names in every module of torchtitan that holds them; many keep their own copies."""
    replaced = []
    for module in [m for name, m in sys.modules.items() if name.startswith("torchtitan.")]:
        for name, answer in answers.items():
            if name in vars(module):
                replaced.append((module, name, vars(module)[name]))
                vars(module)[name] = answer
    try:
        yield
    finally:
        for module, name, original in replaced:
            vars(module)[name] = original


@contextlib.contextmanager
def _graphs_unchecked() -> Generator[Callable[["Trainer.Config"], None]]:
    """Keep torchtitan's configs from checking CUDA graphs; gives the check."""
    from torchtitan.trainer import Trainer

    check = Trainer.Config._validate_cuda_graphs
    owner: Any = Trainer.Config
    owner._validate_cuda_graphs = lambda config: None
    try:
        yield check
    finally:
        owner._validate_cuda_graphs = check


def _leave_out_what_moves_nothing(config: "Trainer.Config") -> None:
    """Switch off what takes time to apply and leaves every parameter where it is."""
    config.compile.enable = False
    config.activation_checkpoint = None
    config.training.enable_cpu_offload = False
    config.parallelism.enable_fsdp_symm_mem = False
    if config.model_spec is None:
        raise ConfigError("this config has no model; choose one with [model] or --module.")
