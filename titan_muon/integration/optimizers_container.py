"""torchtitan's optimizer container with one titan-muon optimizer for all model parts of a rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
from torchtitan.tools.logging import logger

from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.fused_weights import fused_splits
from titan_muon.integration.start_table import start_table
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.options import from_saved, to_saved
from titan_muon.optim.param_groups import Assignment, Rule, assign, to_groups

__all__ = ["MuonOptimizersContainer"]


class MuonOptimizersContainer(OptimizersContainer):
    """Routes every parameter of a torchtitan model and steps all of them with one optimizer.

    Args:
        config: The optimizer config.
        model_parts: Pipeline stages of this rank, or the one model, after parallelization.

    Raises:
        ValueError: The config cannot run, a pattern decides on no parameter of the whole model, or
            the Muon family gets none.

    Collective: all ranks construct it.
    """

    Config = OptimizerConfig

    def __init__(self, config: OptimizerConfig, *, model_parts: list[nn.Module]) -> None:
        config.check()
        assignments = _assign_all(config, model_parts)
        _check_whole_model(config, assignments)
        optimizer = Muon(to_groups(assignments))
        self.optimizers = [optimizer]
        self.model_parts = model_parts
        params = [item.param for item in assignments]
        self._validate_params(params)
        self._post_init(params)
        ignored = config.ignored_options()
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("Optimizer groups\n" + start_table(optimizer, assignments, ignored))

    def state_dict(self) -> dict[str, Any]:
        """Return the flat, FQN-keyed state; it exists from construction, so nothing is stepped."""
        return get_flat_optim_state_dict(self.optimizers[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state tensors; hyperparameters stay those of the config, differences are logged.

        Args:
            state_dict: Flat, FQN-keyed, as DCP fills it. Not modified.

        Raises:
            ValueError: A state key is missing or has another shape; nothing is loaded then.
        """
        optimizer = self.optimizers[0]
        live = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(_nested(optimizer, state_dict))
        for group, before in zip(optimizer.param_groups, live, strict=True):
            saved_lr, saved_base = group["lr"], group.get("initial_lr", before["lr"])
            _log_differences(group, before)
            group.update(before)
            group["lr"] = _resumed_lr(before, saved_lr, saved_base)


def _assign_all(config: OptimizerConfig, model_parts: Sequence[nn.Module]) -> list[Assignment]:
    rules = [Rule(*spec) for spec in config.group_specs()]
    result: list[Assignment] = []
    for part in model_parts:
        splits = fused_splits(part) if config.split_fused else None
        result += assign(part, config.matrix_spec(), config.rest_spec(), rules=rules, splits=splits)
    return result


def _check_whole_model(config: OptimizerConfig, assignments: Sequence[Assignment]) -> None:
    """Refuse dead patterns and a Muon run without a matrix; a single stage may lack both."""
    patterns = [group.pattern for group in config.param_groups]
    matched = {item.pattern for item in assignments}
    found = [pattern in matched for pattern in patterns]
    found.append(any(get_algorithm(item.algorithm).is_matrix for item in assignments))
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = assignments[0].param.device if assignments else torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        flags = torch.tensor([float(f) for f in found], device=device)
        dist.all_reduce(flags)
        found = [flag > 0 for flag in flags.tolist()]
    for pattern, alive in zip(patterns, found, strict=False):
        if not alive:
            raise ValueError(
                f"optimizer.param_groups: pattern {pattern!r} decides on no trainable parameter of "
                "the model; correct it, or put it before the pattern that takes its parameters"
            )
    name = get_algorithm(config.name)
    if name.is_matrix and not found[-1]:
        raise ValueError(
            f"optimizer.name = {name.title!r}, but no parameter of the model goes to the Muon "
            "family; remove the patterns that take all matrices, or use name = 'AdamW'"
        )


def _nested(optimizer: Muon, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the integer-keyed state dict of the optimizer from the flat one."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group, saved in zip(
        optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True
    ):
        numbers = []
        for name, param in zip(group["param_names"], group["params"], strict=True):
            keys = optimizer.state[param]
            state[number] = {
                key: flat[f"state.{name}.{key}"] for key in keys if f"state.{name}.{key}" in flat
            }
            numbers.append(number)
            number += 1
        first = group["param_names"][0]
        options = {
            key: flat.get(f"param_groups.{first}.{key}", value)
            for key, value in saved.items()
            if key not in ("params", "param_names")
        }
        groups.append({**options, "params": numbers})
    return {"state": state, "param_groups": groups}


def _log_differences(loaded: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    changed = {
        key: (from_saved(value), config[key])
        for key, value in loaded.items()
        if key not in ("params", "param_names", "lr")
        and to_saved(from_saved(value)) != to_saved(config[key])
    }
    for key, (old, new) in changed.items():
        logger.info(
            f"Optimizer group of {loaded['param_names'][0]}: {key} is {new} from the config; "
            f"the checkpoint has {old}"
        )


def _resumed_lr(
    config: Mapping[str, Any], saved_lr: float | Tensor, saved_base: float | Tensor
) -> float | Tensor:
    """Return the lr of the first resumed step: the config's base at the schedule's position."""
    base = config.get("initial_lr", config["lr"])
    if not isinstance(base, Tensor) and base == saved_base:
        return saved_lr
    factor = saved_lr / saved_base if saved_base else 0.0
    lr = base * factor
    if isinstance(config["lr"], Tensor):
        return config["lr"].copy_(torch.as_tensor(lr))
    return float(lr)
