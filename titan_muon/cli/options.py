"""``titan-muon options``: algorithms and options, with default, allowed values and meaning."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from titan_muon.integration.text_table import table
from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim.algorithms import algorithm_names, all_option_names, get_algorithm
from titan_muon.optim.algorithms.base import Algorithm
from titan_muon.optim.options import Option, nearest

__all__ = ["run"]

_LEFT = ("algorithm", "option", "of", "default")
_FOLDS = ("allowed", "meaning")


def run(args: Sequence[str]) -> None:
    """Print all algorithms and options, those of one algorithm, or one option.

    Args:
        args: Command line after ``options``.

    Raises:
        ConfigError: The name is neither an algorithm nor an option.
        SystemExit: argparse printed help, or refused a flag.
    """
    parser = argparse.ArgumentParser(
        prog="titan-muon options",
        description="List algorithms and options: default, allowed values, meaning.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", help="an algorithm or an option; by default all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(args))
    algorithms, options = _chosen(given.name)
    if given.json:
        print(json.dumps(_as_json(algorithms, options), indent=2))
    else:
        print(_as_text(algorithms, options))


def _chosen(name: str | None) -> tuple[list[Algorithm], list[str]]:
    """Return the algorithms and the names of the options that a name selects, in order."""
    every = [get_algorithm(n) for n in algorithm_names()]
    ordered = list(dict.fromkeys(key for a in reversed(every) for key in a.options))
    # Those of all algorithms first.
    ordered.sort(key=lambda key: -sum(key in a.options for a in every))
    if name is None:
        return every, ordered
    if name in all_option_names():
        return [a for a in every if name in a.options], [name]
    try:
        algorithm = get_algorithm(name)
    except ValueError:
        titles = [a.title for a in every]
        raise ConfigError(
            f"titan-muon options: {name!r} is neither an algorithm nor an option"
            f"{nearest(name, [*titles, *ordered])} Algorithms: {', '.join(titles)}. "
            f"Options: {', '.join(ordered)}."
        ) from None
    return [algorithm], list(algorithm.options)


def _as_text(algorithms: Sequence[Algorithm], options: Sequence[str]) -> str:
    rows = [(a.title, _line(a)) for a in algorithms]
    parts = [table(("algorithm", "meaning"), rows, left=_LEFT, folds=_FOLDS), ""]
    shared = len(algorithms) > 1
    headings = ("option", *(("of",) if shared else ()), "default", "allowed", "meaning")
    lines = []
    for key in options:
        owners = [a for a in algorithms if key in a.options]
        for option, titles in _variants(key, owners):
            of = "all" if len(titles) == len(algorithm_names()) else ", ".join(titles)
            name = key if option.saved else f"{key} *"
            cells = (shown(option.default), option.allowed, option.meaning)
            lines.append((name, *((of,) if shared else ()), *cells))
    parts += [table(headings, lines, left=_LEFT, folds=_FOLDS), ""]
    parts.append("* about precision, memory or speed: never part of a checkpoint.")
    parts.append(
        "Defaults are those of Python; a train config starts from the recipe of its algorithm."
    )
    return "\n".join(parts)


def _as_json(algorithms: Sequence[Algorithm], options: Sequence[str]) -> dict[str, Any]:
    return {
        "algorithms": {
            a.name: {
                "title": a.title,
                "meaning": _line(a),
                "is_matrix": a.is_matrix,
                "options": {
                    key: {
                        "default": a.options[key].default,
                        "allowed": a.options[key].allowed,
                        "meaning": a.options[key].meaning,
                        "saved": a.options[key].saved,
                    }
                    for key in options
                    if key in a.options
                },
            }
            for a in algorithms
        }
    }


def _variants(key: str, owners: Sequence[Algorithm]) -> list[tuple[Option, list[str]]]:
    """Return the different options of one name, each with the algorithms that have it."""
    found: list[tuple[Option, list[str]]] = []
    for algorithm in owners:
        option = algorithm.options[key]
        same = next((titles for known, titles in found if known == option), None)
        if same is None:
            found.append((option, [algorithm.title]))
        else:
            same.append(algorithm.title)
    return found


def shown(value: Any) -> str:
    """Write a value as TOML has it; a dash where there is none."""
    if value is None:
        return "-"
    return json.dumps(value) if not isinstance(value, float) else f"{value:g}"


def _line(algorithm: Algorithm) -> str:
    lines = (type(algorithm).__doc__ or "").strip().splitlines()
    return lines[0].replace("``", "") if lines else ""
