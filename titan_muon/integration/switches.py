"""Flags of options that are on, off or left to the algorithm, spelled as torchtitan's switches."""

import dataclasses

from titan_muon.integration.toml_place import ConfigError

__all__ = ["with_values"]

_PREFIX = "--optimizer."
_VALUES = {"true": "True", "false": "False", "none": "None"}


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
        has_value = name == positive and bool(tokens) and _is_value(tokens[0])
        if not is_joined:
            value = tokens.pop(0) if has_value else "true"
        if value.lower() not in _VALUES or (is_joined and name != positive):
            raise ConfigError(
                f"command line: {flag} = {value} is not allowed; use {_PREFIX}{positive}, "
                f"{_PREFIX}no-{positive}, or {_PREFIX}{positive} with true or false."
            )
        result += [_PREFIX + positive, "False" if name != positive else _VALUES[value.lower()]]
    return result


def _is_value(token: str) -> bool:
    # torchtitan's subcommands have a colon in them.
    return not token.startswith("-") and ":" not in token
