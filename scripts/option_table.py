"""The README's option tables, made from the code: scripts/option_table.py [--write]

Prints them, or puts them between the README's markers. A test holds the README against them.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from titan_muon.cli.options import shown as as_toml
from titan_muon.optim.algorithms import Algorithm, algorithm_names, get_algorithm
from titan_muon.optim.options import Option

README = Path(__file__).resolve().parents[1] / "README.md"
# Fields of the typed config that are no options of an algorithm, with the README's words.
CONFIG_FIELDS = {
    "name": "algorithm of the hidden matrices, in any letter case",
    "recipe": "options under these: a name in `configs/`, a path or none; default: that of `name`, "
    "for your own algorithm that of Muon or AdamW",
    "adamw": "table: `lr`, `weight_decay`, `betas`, `eps`, `state_dtype` of the other parameters",
    "param_groups": "exceptions, first match wins: `pattern`, any options, `name` to move",
    "momentum_from": "`zeros` or `exp_avg`: start of momentum if a checkpoint has AdamW's state",
    "split_fused": "q, k, v of torchtitan's fused `wqkv`, gate and up of fused experts one by one",
    "qk_clip_threshold": "MuonClip: largest attention logit of a head that is left alone",
    "imports": "modules to import first: they register algorithms",
    "options": "table: options of a registered algorithm that are not in the table above",
    "implementation": "torchtitan's own; chooses torch's kernel for AdamW and Adam",
}


def algorithms() -> list[Algorithm]:
    """Return the algorithms that come with the package, those of the Muon family first."""
    found = [get_algorithm(name) for name in algorithm_names()]
    own = [a for a in found if type(a).__module__.startswith("titan_muon.")]
    # By their number of options: the plain algorithm before its variants.
    return sorted(own, key=lambda a: (not a.is_matrix, len(a.options), a.title))


def option_table() -> str:
    """Return the table of all options of the algorithms that come with the package."""
    options: dict[str, Option] = {}
    for algorithm in algorithms():
        options |= algorithm.options
    rows = [
        (f"`{key}`", owners(key), shown(option.default), option.allowed, option.meaning)
        for key, option in options.items()
    ]
    # What enters a checkpoint changes the mathematics; say it where the eye is.
    marked = [
        (name if options[key].saved else f"{name} *", *rest)
        for key, (name, *rest) in zip(options, rows, strict=True)
    ]
    return markdown(("option", "of", "default", "allowed", "meaning"), marked)


def config_table() -> str:
    """Return the table of the other keys of ``[optimizer]``."""
    rows = [(f"`{key}`", shown(default(key)), text) for key, text in CONFIG_FIELDS.items()]
    return markdown(("key", "default", "meaning"), rows)


def default(key: str) -> Any:
    from titan_muon.integration.config import OptimizerConfig

    if key == "recipe":
        return None
    field = next(f for f in dataclasses.fields(OptimizerConfig) if f.name == key)
    if field.default_factory is not dataclasses.MISSING:
        return None
    return field.default


def owners(key: str) -> str:
    """Return which algorithms know an option."""
    known = [a for a in algorithms() if key in a.options]
    if len(known) == len(algorithms()):
        return "all"
    if known == [a for a in algorithms() if a.is_matrix]:
        return "Muon family"
    return ", ".join(a.title for a in known)


def shown(value: Any) -> str:
    """Write a default as TOML has it."""
    return "-" if value is None else f"`{as_toml(value)}`"


def markdown(heading: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(heading), *rows]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', 'or') for cell in row)} |" for row in lines)


def filled(text: str) -> str:
    """Return the README's text with both tables made anew."""
    text = between_markers(text, "options", "option_table", option_table())
    return between_markers(text, "optimizer-keys", "option_table", config_table())


def between_markers(text: str, name: str, script: str, table: str) -> str:
    """Return the README's text with another table between the markers of one.

    Raises:
        SystemExit: The markers are not there exactly once.
    """
    begin, end = f"<!-- {name}: scripts/{script}.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, count = pattern.subn(lambda _: f"{begin}\n{table}\n{end}", text)
    if count != 1:
        raise SystemExit(f"{README.name} has the markers of {name} {count} times, not once")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables into {README.name}")
    if parser.parse_args().write:
        README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(option_table(), config_table(), sep="\n\n")


if __name__ == "__main__":
    main()
