"""``titan-muon migrate``: an older torchtitan train config in today's names."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_muon.cli.layouts import parse_config, quiet
from titan_muon.integration.toml_file import read_toml
from titan_muon.integration.toml_legacy import translate
from titan_muon.integration.toml_place import ConfigError, Place
from titan_muon.integration.toml_write import to_toml
from titan_muon.optim.algorithms import get_algorithm

__all__ = ["migrate", "run"]


def run(args: Sequence[str]) -> None:
    """Print the translated file, or write it.

    Args:
        args: Command line after ``migrate``.

    Raises:
        ConfigError: The file cannot run, before or after; or the output exists.
        SystemExit: Help was printed, or a flag refused.
    """
    parser = argparse.ArgumentParser(
        prog="titan-muon migrate",
        description="Bring a train config of an older torchtitan to today's names. Each key that "
        "moved or is gone is named in a comment. Comments of the file are not kept.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="OLD.toml")
    parser.add_argument("--optimizer", metavar="NAME", help="put this algorithm in, such as Muon")
    parser.add_argument("--output", metavar="NEW.toml", help="write here; default: print")
    given = parser.parse_args(list(args))
    if given.output is not None and Path(given.output).exists():
        raise ConfigError(f"--output {given.output}: the file exists already; name another one.")
    text = migrate(given.file, given.optimizer)
    if given.output is None:
        print(text, end="")
        return
    try:
        Path(given.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {given.output}: {error.strerror}; name a file in a folder that exists and "
            "that you may write to."
        ) from error
    # What was written is what must run.
    with quiet():
        parse_config(["--job.config_file", given.output])
    print(f"wrote {given.output}; what it will do: titan-muon plan {given.output}")


def migrate(file: str, optimizer: str | None = None) -> str:
    """Return the translated text of a train config.

    Args:
        file: Older train config; one in today's names comes back as it is, but for comments.
        optimizer: Algorithm to put in; None keeps the file's.

    Raises:
        ConfigError: The file is wrong in a way that no translation mends, or the name is unknown.
    """
    with quiet():
        config, _ = parse_config(["--job.config_file", file])
        if optimizer is not None:
            parse_config(["--job.config_file", file, "--optimizer.name", optimizer])
    table, place = translate(read_toml(file), Place(file))
    if optimizer is not None:
        own = _of_the_model(config) if "optimizer" not in table else {}
        table["optimizer"] = {**own, **table.get("optimizer", {})}
        _choose(table, get_algorithm(optimizer).title)
    lines = [f"From {file}, an older train config.", *dict.fromkeys(place.notes)]
    header = "".join(f"# {line.removeprefix(f'{file}: ')}\n" for line in lines)
    return f"{header}\n{to_toml(table)}"


def _of_the_model(config: Any) -> dict[str, Any]:
    """Return lr and decay of the optimizer that torchtitan's config function has."""
    options = config.optimizer.param_groups[-1].optimizer_kwargs
    return {key: options[key] for key in ("lr", "weight_decay") if key in options}


def _choose(table: dict[str, Any], name: str) -> None:
    """Put the algorithm first in the optimizer's table."""
    old = table["optimizer"]
    table["optimizer"] = {"name": name, **{k: v for k, v in old.items() if k != "name"}}
