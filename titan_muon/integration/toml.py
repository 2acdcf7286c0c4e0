"""A train config file, laid over the Trainer.Config of the model that it names."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titan_muon.integration.toml_check import field_types, lay_over
from titan_muon.integration.toml_file import read_toml
from titan_muon.integration.toml_legacy import translate
from titan_muon.integration.toml_model import check_model_table, registry_function
from titan_muon.integration.toml_optimizer import OptimizerRequest, build_optimizer
from titan_muon.integration.toml_place import ConfigError, Place

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["Selection", "load_train_config"]


@dataclass
class Selection:
    """What flags choose before the config exists; empty where they are silent.

    Args:
        file: Train config.
        model: ``name`` (torchtitan model folder or importable module), and ``flavor`` or
            ``config`` (function of the module's config registry).
        activation_checkpoint: Kind of activation checkpointing.
        optimizer: Algorithm, recipe and imports.
    """

    file: str | None = None
    model: dict[str, str] = field(default_factory=dict)
    activation_checkpoint: str | None = None
    optimizer: OptimizerRequest = field(default_factory=OptimizerRequest)


def load_train_config(selection: Selection) -> tuple["Trainer.Config", list[str]]:
    """Build a Trainer config: registry function, then recipe, then train config.

    Args:
        selection: What to load. Flags that only set fields come later and win over all of it.

    Returns:
        The config, fresh, with no cross-checks run yet, and sentences for the log.

    Raises:
        ConfigError: Anything wrong in the files or in the selection.
    """
    from titan_muon.integration.metrics import with_optimizer_metrics

    table: dict[str, Any] = {}
    place = Place("command line")
    if selection.file is not None:
        table, place = translate(read_toml(selection.file), Place(selection.file))
    model = check_model_table(table.pop("model", {}), place)
    config = _call(registry_function(selection.model, model, place), place)
    config.metrics = with_optimizer_metrics(config.metrics)
    known = set(field_types(config)) - {"model_spec"}
    for key, value in table.items():
        # All tables before any of them: a misspelled one is the likelier mistake.
        if key not in known:
            raise place.unknown(key, value, {*known, "model"})
    optimizer = table.pop("optimizer", None)
    if optimizer is not None or selection.optimizer.chooses():
        config = _without_dist_muon(config)
        config.optimizer = build_optimizer(
            selection.optimizer, optimizer, place.child("optimizer"), replaced=config.optimizer
        )
    lay_over(config, table, place)
    if selection.activation_checkpoint is not None:
        mode = {"activation_checkpoint": {"mode": selection.activation_checkpoint}}
        lay_over(config, mode, Place("command line", notes=place.notes))
    return config, place.notes


def _call(function: Callable[[], Any], place: Place) -> "Trainer.Config":
    """Build a registry config; what it lacks here (a GPU, a package) is the user's to see."""
    try:
        return function()
    except Exception as error:
        raise ConfigError(
            f"{place.file}: {function.__name__} cannot be built on this machine: "
            f"{type(error).__name__}: {error}"
        ) from error


def _without_dist_muon(config: "Trainer.Config") -> "Trainer.Config":
    """Return a config that is free of DistMuon's limits, once that is replaced.

    torchtitan's Kimi models refuse tensor and pipeline parallelism, by a subclass whose only reason
    is DistMuon.
    """
    from torchtitan.trainer import Trainer

    fields = {f.name for f in dataclasses.fields(config)}
    only_checks = fields == {f.name for f in dataclasses.fields(Trainer.Config)}
    names = [group.optimizer_name for group in config.optimizer.param_groups]
    if type(config) is Trainer.Config or not only_checks or "DistMuon" not in names:
        return config
    return Trainer.Config(**{name: getattr(config, name) for name in fields})
