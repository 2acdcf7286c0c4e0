"""Short spellings of a command line, written out for the parsers behind it."""

import dataclasses
from collections.abc import Sequence

from titan_muon.integration.toml_place import ConfigError

__all__ = ["FILE_FLAGS", "with_file", "with_values"]

_PREFIX = "--optimizer."
_VALUES = {"true": "True", "false": "False", "none": "None"}
FILE_FLAGS = ("--job.config_file", "--job.config-file")


def with_file(args: Sequence[str]) -> list[str]:
    """Put the flag before a train config that stands without it.

    Args:
        args: Command line without the program's name. Not modified.
    """
    file = next((i for i in range(len(args)) if _is_file(args, i)), None)
    if file is None:
        return list(args)
    return [FILE_FLAGS[0], args[file], *args[:file], *args[file + 1 :]]


def with_values(args: list[str]) -> list[str]:
    """Give every on/off flag of the optimizer the value that tyro wants of it.

    torchtitan's own switches are ``--x`` and ``--no-x``; an option with a third state, the
    algorithm's default, has a value instead. Here it takes all of ``--optimizer.nesterov``,
    ``--optimizer.no-nesterov``, ``--optimizer.nesterov false`` and ``--optimizer.nesterov=False``.

    Args:
        args: Command line without the program's name. Not modified.

    Raises:
        ConfigError: A value that is none of true, false and none.
    """
    from titan_muon.integration.config import OptimizerConfig

    options = {f.name for f in dataclasses.fields(OptimizerConfig) if f.type == bool | None}
    result: list[str] = []
    tokens = list(args)
    while tokens:
        token = tokens.pop(0)
        flag, is_joined, value = token.partition("=")
        name = flag.removeprefix(_PREFIX).replace("-", "_")
        positive = name.removeprefix("no_")
        if not flag.startswith(_PREFIX) or positive not in options:
            result.append(token)
            continue
        if not is_joined:
            follows = name == positive and tokens and _is_word(tokens[0])
            value = tokens.pop(0) if follows else "true"
        if value.lower() not in _VALUES or (is_joined and name != positive):
            raise ConfigError(
                f"command line: {flag} = {value} is not allowed; use {_PREFIX}{positive}, "
                f"{_PREFIX}no-{positive}, or {_PREFIX}{positive} with true or false."
            )
        result += [_PREFIX + positive, "False" if name != positive else _VALUES[value.lower()]]
    return result


def _is_file(args: Sequence[str], index: int) -> bool:
    if not _is_word(args[index]):
        return False
    takes_one = (*FILE_FLAGS, "--optimizer.recipe")
    return index == 0 or (args[index].endswith(".toml") and args[index - 1] not in takes_one)


def _is_word(token: str) -> bool:
    # torchtitan's subcommands have a colon in them.
    return not token.startswith("-") and ":" not in token
