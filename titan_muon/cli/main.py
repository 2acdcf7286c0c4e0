"""One command, one module each; a module is imported when its command is given."""

import importlib
import os
import sys
from collections.abc import Sequence

from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim.options import nearest

__all__ = ["COMMANDS", "main"]

# Name -> (module with a function run(args), what it does).
COMMANDS = {
    "plan": ("titan_muon.cli.plan", "say what the optimizer of a train config would do and cost"),
    "options": ("titan_muon.cli.options", "list algorithms, or the options of one"),
    "verify": ("titan_muon.cli.verify", "check accuracy, speed and training on this machine"),
    "migrate": ("titan_muon.cli.migrate", "bring an older train config to today's names"),
}

_NEEDS = {
    "rich": "pip install rich",
    "torchtitan": "pip install 'titan-muon[torchtitan]'",
    "tyro": "pip install 'titan-muon[torchtitan]'",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; a mistake of the user ends the program with one message and code 2.

    Args:
        args: Without the program's name; None means ``sys.argv``.

    Raises:
        SystemExit: Help was printed, or the command could not run.
    """
    if args is None and not sys.flags.safe_path and os.getcwd() not in sys.path:
        # As `python -m` does in training; a script alone would not find the user's own modules.
        sys.path.insert(0, os.getcwd())
    given = list(sys.argv[1:] if args is None else args)
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        from titan_muon import __version__

        print(f"titan-muon {__version__}")
        return
    try:
        importlib.import_module(_module(given[0])).run(given[1:])
    except ConfigError as error:
        _stop(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDS:
            raise
        _stop(f"titan-muon {given[0]} needs {package}: {_NEEDS[package]}")
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing is left to flush into.
        sys.stdout = None  # pyrefly: ignore[bad-assignment]


def _stop(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)


def _module(command: str) -> str:
    if command not in COMMANDS:
        raise ConfigError(
            f"titan-muon: {command!r} is not a command{nearest(command, COMMANDS)} "
            f"Commands: {', '.join(COMMANDS)}."
        )
    return COMMANDS[command][0]


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "titan-muon COMMAND [ARGUMENT ...]",
            "",
            *lines,
            "",
            "titan-muon COMMAND --help says more; titan-muon --version prints the version.",
        ]
    )
