"""``[optimizer]``: a recipe, the train config's own options over it, and exceptions by pattern."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_muon.integration.toml_check import convert, field_types, lay_over
from titan_muon.integration.toml_file import read_toml
from titan_muon.integration.toml_place import ConfigError, Place
from titan_muon.optim.algorithms import all_option_names, get_algorithm
from titan_muon.optim.options import nearest

if TYPE_CHECKING:
    from titan_muon.integration.config import OptimizerConfig

__all__ = ["OptimizerRequest", "build_optimizer", "optimizer_config", "recipe_names"]

NO_RECIPE = "none"

# Spellings that other packages use, too far from ours for a likeness to show.
_FOREIGN = {
    "mu": "momentum",
    "wd": "weight_decay",
    "epsilon": "eps",
    "learning_rate": "lr",
    "muon_lr": "lr",
    "algorithm": "name",
}
_FOLDER = Path(__file__).parents[1] / "recipes"
_SOURCE_FOLDER = Path(__file__).parents[2] / "configs"


@dataclass
class OptimizerRequest:
    """Choices about the optimizer that come before its recipe is read; None leaves them open."""

    name: str | None = None
    recipe: str | None = None
    imports: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def chooses(self) -> bool:
        """Return whether an optimizer of this package is asked for."""
        return self.name is not None or self.recipe is not None or bool(self.options)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in _recipe_folder().glob("*.toml"))


def optimizer_config(
    name: str | None = None, recipe: str | None = None, **options: Any
) -> "OptimizerConfig":
    """Return the config of an algorithm: its recipe, with options over it.

    Args:
        name: Algorithm, in any letter case; by default the recipe's, without one Muon.
        recipe: Name of a recipe, a path, or "none"; by default the recipe of the algorithm.
        **options: Anything that ``[optimizer]`` may hold.

    Raises:
        ConfigError: An unknown name or option, or a value that is not allowed.
    """
    place = Place("optimizer_config", "optimizer")
    return build_optimizer(OptimizerRequest(name, recipe), options, place)


def build_optimizer(
    request: OptimizerRequest,
    table: Mapping[str, Any] | None,
    place: Place,
    *,
    replaced: Any = None,
) -> "OptimizerConfig":
    """Return the optimizer config of one run, without the flags that only set fields.

    Args:
        request: What flags choose; wins over ``table``.
        table: ``[optimizer]`` of the train config, None where it has none. Not modified.
        place: Where ``table`` was written.
        replaced: The registry's optimizer config; only its ``implementation`` is kept.

    Raises:
        ConfigError: Anything wrong in the table, the recipe or the request.
    """
    from titan_muon.integration.optimizers_container import MuonOptimizersContainer

    if not isinstance(table, Mapping | None):
        raise ConfigError(f"{place.at()} must be a table.")
    config: OptimizerConfig = MuonOptimizersContainer.Config()
    if replaced is not None:
        config.implementation = replaced.implementation
    table = dict(table or {})
    recipe = table.pop("recipe", None)
    if recipe is not None:
        recipe = convert(recipe, str, place, "recipe")
    _import_early(_imports(table, place), place)
    flags = Place("command line", "optimizer")
    _import_early(request.imports, flags)
    if request.name is not None:
        table["name"] = _known_name(request.name, flags)
    name = _known_name(table["name"], place) if "name" in table else None
    where = place if request.recipe is None else flags
    folder = Path(place.file).parent
    found = _find_recipe(request.recipe or recipe, name or config.name, where, folder)
    if found is not None:
        recipe_place, recipe_table = found
        _lay_over(config, recipe_table, recipe_place)
    _lay_over(config, table, place)
    config.options = {**config.options, **request.options}
    config.imports = [*config.imports, *(m for m in request.imports if m not in config.imports)]
    return config


def _lay_over(config: "OptimizerConfig", table: Mapping[str, Any], place: Place) -> None:
    """Set fields of ``config`` from one ``[optimizer]`` table and check the whole."""
    table = dict(table)
    _import_early(_imports(table, place), place)
    if "name" in table:
        config.name = _known_name(table.pop("name"), place)
    known = set(field_types(config))
    for key, value in table.items():
        if key not in known:
            raise _unknown_option(config.name, key, value, known, place)
    if "param_groups" in table:
        groups = table.pop("param_groups")
        config.param_groups = _param_groups(groups, place)
    lay_over(config, table, place)
    try:
        config.check(where=place.at())
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _unknown_option(name: str, key: str, value: Any, known: set[str], place: Place) -> ConfigError:
    algorithm = get_algorithm(name)
    if isinstance(value, dict):
        return place.unknown(key, value, {"adamw", "options", "param_groups"})
    if key == "foreach":
        return ConfigError(f'{place.at(key)}: write implementation = "foreach".')
    if key in all_option_names():
        return ConfigError(f"{place.at(key)} belongs in [{place.table}.options].")
    known = known - {"optimizer_factory_kwargs_by_name"}
    hint = nearest(_FOREIGN.get(key, key), known) or "."
    options = ", ".join(sorted(set(algorithm.options) & known))
    others = ", ".join(sorted(known - set(algorithm.options)))
    return ConfigError(
        f"{place.at(key)} is not an option of {algorithm.title}{hint} Options: {options}. "
        f"Other keys here: {others}, recipe."
    )


def _param_groups(groups: Any, place: Place) -> list[Any]:
    from torchtitan.components.optimizer import ParamGroupConfig

    from titan_muon.integration.config import AS_ROUTED

    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise place.refused(
            "param_groups", groups, f"tables, each under [[{place.dotted('param_groups')}]]"
        )
    result = []
    for index, group in enumerate(groups):
        inner = place.child(f"param_groups.{index}")
        options = dict(group)
        if "pattern" not in options:
            raise ConfigError(f"{inner.at()} has no pattern; it says which parameters are meant.")
        pattern = convert(options.pop("pattern"), str, inner, "pattern")
        name = _known_name(options.pop("name"), inner) if "name" in options else AS_ROUTED
        for key in options:
            if key in _FOREIGN and key not in all_option_names():
                raise ConfigError(f"{inner.at(key)} is not an option; write {_FOREIGN[key]}.")
        result.append(
            ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)
        )
    return result


def _imports(table: Mapping[str, Any], place: Place) -> list[str]:
    return convert(table.get("imports", []), list[str], place, "imports")


def _import_early(modules: list[str], place: Place) -> None:
    """Import before names are looked up: these modules register algorithms."""
    from titan_muon.integration.config import import_algorithms

    try:
        import_algorithms(modules, where=place.at("imports"))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _known_name(name: Any, place: Place) -> str:
    """Return the algorithm's name in its own spelling."""
    try:
        return get_algorithm(convert(name, str, place, "name")).title
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{place.at('name')}: {error}") from None


def _recipe_folder() -> Path:
    # An installed wheel holds the recipes; a source tree keeps them in configs/ alone.
    return _FOLDER if _FOLDER.is_dir() else _SOURCE_FOLDER


def _find_recipe(
    recipe: str | None, name: str, place: Place, folder: Path
) -> tuple[Place, dict[str, Any]] | None:
    """Return a recipe's place and ``[optimizer]`` table, or None where there is none to read.

    Args:
        recipe: As the user wrote it, at ``place``.
        name: Algorithm, whose own recipe is the default, or that of Muon or AdamW.
        place: Where errors say it was written.
        folder: Of the train config; a path is looked for there first.
    """
    if recipe == NO_RECIPE:
        return None
    if recipe is None:
        path = _recipe_folder() / f"{name.lower()}.toml"
        if not path.is_file():
            # A registered algorithm starts where those of its family do.
            family = "muon" if get_algorithm(name).is_matrix else "adamw"
            path = path.with_name(f"{family}.toml")
        return _read_recipe(path, place)
    if "/" in recipe or recipe.endswith(".toml"):
        beside = folder / recipe
        path = beside if beside.is_file() else Path(recipe)
        if not path.exists():
            raise ConfigError(
                f'{place.at("recipe")} = "{recipe}": no such file, neither in the working folder '
                "nor beside the train config."
            )
        return _read_recipe(path, place)
    names = recipe_names()
    if recipe.lower() not in names:
        raise ConfigError(
            f'{place.at("recipe")} = "{recipe}" is not a recipe{nearest(recipe, names) or "."} '
            f"Recipes: {', '.join(names)}, {NO_RECIPE}, or the path of a TOML file."
        )
    return _read_recipe(_recipe_folder() / f"{recipe.lower()}.toml", place)


def _read_recipe(path: Path, place: Place) -> tuple[Place, dict[str, Any]]:
    raw = read_toml(path)
    top = Place(str(path), notes=place.notes)
    for key, value in raw.items():
        if key != "optimizer":
            raise top.unknown(key, value, {"optimizer"})
    optimizer = raw.get("optimizer")
    if not isinstance(optimizer, dict):
        raise ConfigError(f"{path}: a recipe holds an [optimizer] table; this file has none.")
    if "recipe" in optimizer:
        raise ConfigError(f"{path}: [optimizer] recipe: a recipe cannot name another one.")
    return top.child("optimizer"), optimizer
