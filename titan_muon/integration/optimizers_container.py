"""torchtitan's optimizer container with one titan-muon optimizer for all model parts of a rank."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
from torchtitan.tools.logging import logger

from titan_muon.distributed.groups import create_groups
from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.fused_weights import fused_splits
from titan_muon.integration.metrics import OptimizerMetrics
from titan_muon.integration.start_table import start_table, unused_options
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.options import from_saved
from titan_muon.optim.param_groups import Assignment, Rule, assign, to_groups

if TYPE_CHECKING:
    from titan_muon.optim.qk_clip import QKClip

__all__ = ["MuonOptimizersContainer", "assign_all"]


class MuonOptimizersContainer(OptimizersContainer):
    """Routes every parameter of a torchtitan model and steps all of them with one optimizer.

    Args:
        config: The optimizer config.
        model_parts: Pipeline stages of this rank, or the one model, after parallelization.

    Raises:
        ValueError: The config cannot run, a pattern decides on no parameter of the whole model, or
            the Muon family gets none.

    Attributes:
        metrics: What is logged of the optimizer; takes more sources.

    Collective: all ranks construct it.
    """

    Config = OptimizerConfig

    def __init__(self, config: OptimizerConfig, *, model_parts: list[nn.Module]) -> None:
        config.check()
        assignments = assign_all(config, model_parts)
        _check_whole_model(config, assignments)
        optimizer = Muon(to_groups(assignments))
        self._qk_clip = _qk_clip(config, model_parts)
        clipped = self._qk_clip.rank_sets() if self._qk_clip else []
        create_groups([*optimizer.rank_sets(), *clipped])
        if dist.is_initialized() and dist.get_world_size() > 1:
            # All pipeline stages skip a step, or none.
            optimizer.agree_over(dist.group.WORLD)
        self.optimizers = [optimizer]
        self.metrics = OptimizerMetrics(optimizer)
        if self._qk_clip:
            self.metrics.add(self._clip_figures)
        self.model_parts = model_parts
        self.momentum_from = config.momentum_from
        self._schedulers: LRSchedulersContainer | None = None
        self._is_resumed = False
        params = [item.param for item in assignments]
        self._validate_params(params)
        self._post_init(params)
        ignored = unused_options(config, assignments)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("Optimizer groups\n" + start_table(optimizer, assignments, ignored))

    def follow(self, schedulers: LRSchedulersContainer) -> None:
        """Take the lr of the first step after a load from these schedulers.

        Args:
            schedulers: Built for this container. Without them that lr is the checkpoint's, times
                the ratio of the base lrs.
        """
        self._schedulers = schedulers

    def step(self, closure: Any = None) -> Any:
        """Take one step of the one optimizer.

        Args:
            closure: Must be None: the Trainer has computed the gradients.

        Raises:
            ValueError: A closure was given.

        Collective: all ranks.
        """
        if closure is not None:
            raise ValueError("MuonOptimizersContainer.step takes no closure; leave it out.")
        optimizer = self.optimizers[0]
        if self._is_resumed and self._schedulers is not None:
            (scheduler,) = self._schedulers
            # By now the schedulers are loaded too, whichever was loaded first.
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
        self._is_resumed = False
        # Not super().step(): torch may have wrapped both, and hooks would run twice.
        with self.metrics.watching():
            optimizer.step()
        if self._qk_clip:
            self._qk_clip.step(optimizer.taken)

    def _clip_figures(self) -> dict[str, float]:
        figures = self._qk_clip.figures() if self._qk_clip else {}
        return {f"optimizer/{name}": value for name, value in figures.items()}

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
        optimizer.load_state_dict(_nested(optimizer, state_dict))
        for group, own in zip(
            optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True
        ):
            prefix = f"param_groups.{group['param_names'][0]}."
            saved = {key: state_dict[prefix + key] for key in own if prefix + key in state_dict}
            _log_differences(group["param_names"][0], saved, own)
            group["lr"] = _resumed_lr(group, saved)
        self._is_resumed = True


def assign_all(config: OptimizerConfig, model_parts: Sequence[nn.Module]) -> list[Assignment]:
    """Decide on every trainable parameter of this rank.

    Args:
        config: The optimizer config, checked.
        model_parts: Pipeline stages of this rank, or the one model. Not modified.
    """
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


def _qk_clip(config: OptimizerConfig, model_parts: Sequence[nn.Module]) -> "QKClip | None":
    if config.qk_clip_threshold is None:
        return None
    from titan_muon.integration.qk_clip import attach_qk_clip

    return attach_qk_clip(model_parts, config.qk_clip_threshold)


def _nested(optimizer: Muon, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's integer-keyed state dict with tensors of the flat one."""
    live = optimizer.state_dict()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    state = {}
    for number, keys in live["state"].items():
        saved = {key: flat.get(f"state.{names[number]}.{key}") for key in keys}
        state[number] = {key: value for key, value in saved.items() if value is not None}
    return {"state": state, "param_groups": live["param_groups"]}


def _log_differences(name: str, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        old, new = from_saved(value), from_saved(config[key])
        if key not in ("params", "param_names", "lr") and _as_list(old) != _as_list(new):
            logger.info(
                f"Optimizer group of {name}: {key} is {new} from the config; "
                f"the checkpoint has {old}"
            )


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _resumed_lr(config: Mapping[str, Any], saved: Mapping[str, Any]) -> float:
    """Return the lr of the first resumed step: the config's base at the schedule's position."""
    base = config.get("initial_lr", config["lr"])
    saved_lr = saved.get("lr", config["lr"])
    saved_base = saved.get("initial_lr", base)
    if base == saved_base:
        return saved_lr
    return base * (saved_lr / saved_base) if saved_base else 0.0
