"""Numbers of torchtitan's own fields that cannot run, or would run as nobody meant.

torchtitan meets them when processes and model exist: it divides by zero, stops at an assertion, or
climbs the loss because the bound of the gradient norm is negative.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan_muon.integration.toml_place import ConfigError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["check_ranges"]

_Range = tuple[str, Callable[[Any], bool]]

_COUNT: _Range = ("an integer >= 1", lambda value: value >= 1)
_SHARE: _Range = ("a number from 0 to 1", lambda value: 0 <= value <= 1)
_REST_OR_COUNT: _Range = (
    "an integer >= 1, or -1 for the ranks that are left",
    lambda value: value >= 1 or value == -1,
)

_RANGES: dict[str, _Range] = {
    "training.steps": ("an integer >= 0", lambda value: value >= 0),
    "training.local_batch_size": _COUNT,
    "training.seq_len": _COUNT,
    "training.max_norm": ("a number > 0; a large one clips nothing", lambda value: value > 0),
    "training.gc_freq": _COUNT,
    "lr_scheduler.warmup_steps": ("an integer >= 0", lambda value: value >= 0),
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "metrics.log_freq": _COUNT,
    "validator.freq": _COUNT,
    "parallelism.data_parallel_shard_degree": _REST_OR_COUNT,
    "parallelism.data_parallel_replicate_degree": _COUNT,
    "parallelism.context_parallel_degree": _COUNT,
    "parallelism.tensor_parallel_degree": _COUNT,
    "parallelism.pipeline_parallel_degree": _COUNT,
    "parallelism.expert_parallel_degree": _COUNT,
}


def check_ranges(config: "Trainer.Config") -> None:
    """Refuse a number that torchtitan would stumble over later, or not notice.

    Args:
        config: Complete; not modified. Fields that its class does not have are skipped,
            and those of a validator that is off.

    Raises:
        ConfigError: Names table, key, value and what is allowed.
    """
    for name, (allowed, is_allowed) in _RANGES.items():
        table, key = name.split(".")
        node = getattr(config, table, None)
        is_off = table == "validator" and not getattr(node, "enable", False)
        value = None if is_off else getattr(node, key, None)
        if value is not None and not is_allowed(value):
            raise ConfigError(f"[{table}] {key} = {value} is not allowed; use {allowed}.")
