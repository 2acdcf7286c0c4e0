"""``[model]``: from a name and a flavor to a function of torchtitan's config registries."""

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from titan_muon.integration.toml_place import ConfigError, Place, toml_repr
from titan_muon.optim.options import nearest

__all__ = ["check_model_table", "registry_function"]

_logger = logging.getLogger(__name__)

_KEYS = ("name", "flavor", "config")
_FOLDERS = ("torchtitan.models", "torchtitan.experiments", "torchtitan.experiments.rl.examples")


def check_model_table(table: Any, place: Place) -> dict[str, str]:
    """Return ``[model]`` if it is a table of strings with known keys.

    Args:
        table: As read.
        place: The top level of the file.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(table, dict):
        raise place.refused("model", table, "a table, [model], with name and flavor")
    inner = place.child("model")
    for key, value in table.items():
        if key not in _KEYS:
            raise inner.unknown(key, value, _KEYS)
        if not isinstance(value, str):
            raise inner.refused(key, value, "a string")
    if "config" in table and "flavor" in table:
        raise ConfigError(f"{inner.at()} has flavor and config, which both choose; keep one.")
    return table


def registry_function(
    flags: Mapping[str, str], table: Mapping[str, str], place: Place
) -> Callable[[], Any]:
    """Return the registry function that flags or, where they are silent, ``[model]`` names.

    Args:
        flags: ``name``, ``flavor`` and ``config``, those that were given.
        table: ``[model]``, checked.
        place: The top level of the file.

    Raises:
        ConfigError: Too little is said, or a name does not exist.
    """
    model = place.child("model")
    wheres = {key: f"command line: --model.{key}" for key in flags}
    if not {"flavor", "config"} & set(flags):
        flags = {**{key: table[key] for key in ("flavor", "config") if key in table}, **flags}
    name = flags.get("name", table.get("name"))
    if name is None:
        raise ConfigError(
            f'{place.file}: [model] is missing: write name = "llama3" and flavor = "debugmodel" '
            "under it, or give --module and --config."
        )
    module = _registry_module(name, wheres.get("name", model.at("name")))
    functions = _functions(module)
    key = "config" if "config" in flags else "flavor"
    if key not in flags:
        raise ConfigError(
            f"{model.at('flavor')} is missing: write one for {toml_repr(name)}, or config = one of "
            f"{', '.join(functions)}."
        )
    choice = flags[key]
    found = functions.get(choice) if key == "config" else _by_flavor(functions, name, choice)
    if found is None and key == "flavor":
        found = _of_model_size(module, functions, name, choice)
    if found is None:
        wanted = choice if key == "config" else f"{name}_{choice}"
        kind = "a config function" if key == "config" else "a flavor"
        raise ConfigError(
            f"{wheres.get(key, model.at(key))} = {toml_repr(choice)} is not {kind} of "
            f"{toml_repr(name)}{nearest(wanted, functions) or '.'} "
            f"Config functions: {', '.join(functions) or 'none'}."
        )
    return found


def _registry_module(name: str, where: str) -> ModuleType:
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    candidates = [f"{name}.config_registry", name]
    if name in _supported_models | _supported_experiments:
        candidates = [f"{folder}.{name}.config_registry" for folder in _FOLDERS]
    elif not all(part.isidentifier() for part in name.split(".")):
        # A path or nothing at all: no module has such a name.
        candidates = []
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # Missing inside the candidate is the user's to see; the candidate itself is not.
            if missing is None or not f"{candidate}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"{where} = {toml_repr(name)}: importing {candidate} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
    known = sorted(_supported_models)
    raise ConfigError(
        f"{where} = {toml_repr(name)} is neither a torchtitan model nor an importable module"
        f"{nearest(name, known) or '.'} Models: {', '.join(known)}."
    )


def _functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the module's own public functions that need no argument, by name."""
    found = {}
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if own and not name.startswith("_") and not inspect.signature(value).parameters:
            found[name] = value
    return found


def _by_flavor(
    functions: Mapping[str, Callable[[], Any]], model: str, flavor: str
) -> Callable[[], Any] | None:
    """Find a function by size: "0.6B" of qwen3 is qwen3_0_6b, "flux-dev" is flux_dev."""
    wanted = (_plain(model.rpartition(".")[2] + flavor), _plain(flavor))
    return next((f for name, f in functions.items() if _plain(name) in wanted), None)


def _of_model_size(
    module: ModuleType, functions: Mapping[str, Callable[[], Any]], model: str, flavor: str
) -> Callable[[], Any] | None:
    """Return the debug model's function at another size of the model, or None.

    torchtitan builds models of sizes for which it has no config function, such as llama3's 1B.
    """
    make_spec = getattr(module, "model_registry", None)
    debug = _by_flavor(functions, model, "debugmodel")
    if make_spec is None or debug is None:
        return None
    try:
        spec = make_spec(flavor)
    except KeyError:
        return None

    def config() -> Any:
        from torchtitan.models.common.config_utils import decoder_vocab_size

        result = debug()
        result.model_spec = spec
        loss = getattr(result.loss, "loss_fn", result.loss)
        if hasattr(loss, "global_vocab_size"):
            loss.global_vocab_size = decoder_vocab_size(spec)
        _logger.info(
            "%s has no config function for %s: the run is %s with that model.",
            model,
            flavor,
            debug.__name__,
        )
        return result

    return config


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
