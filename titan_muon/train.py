"""torchrun entry: a train config and flags become a torchtitan Trainer.

torchrun --nproc_per_node=8 -m titan_muon.train --job.config_file FILE.toml [--section.key value]
"""

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_muon.integration.toml_place import ConfigError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["main", "parse"]

_logger = logging.getLogger(__name__)

# How long a rank that is not the first of its host waits for the first one's message.
_SILENCE_SECONDS = 30.0


def parse(args: Sequence[str] | None = None) -> "Trainer.Config":
    """Return the Trainer config of a command line.

    Args:
        args: Without the program's name; None means ``sys.argv``.

    Raises:
        ConfigError: A mistake in a file or a flag; nothing distributed has been touched.
        SystemExit: Help was printed, or tyro refused a flag.
    """
    from titan_muon.integration.cpu_runtime import adapt_config, install, needs_cpu_runtime

    on_cpu = needs_cpu_runtime()
    if on_cpu:
        install()
    from titan_muon.integration.data import register_datasets
    from titan_muon.integration.manager import TrainConfigManager

    register_datasets()
    manager = TrainConfigManager(cuda_graphs=not on_cpu)
    config = manager.parse_args(None if args is None else list(args))
    if _is_first_rank():
        for note in manager.notes:
            _logger.warning(note)
    if on_cpu:
        try:
            config = adapt_config(config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return config


def main(args: Sequence[str] | None = None) -> None:
    """Train; a mistake in the configuration ends the program with one message and code 2."""
    from torchtitan.tools.logging import init_logger

    init_logger()
    with _one_voice():
        config = _parse_or_exit(args)

    import torchtitan.train

    # torchtitan's main() parses by this name; everything else in it stays as it is.
    vars(torchtitan.train).update(ConfigManager=lambda: _Parsed(config))
    torchtitan.train.main()


class _Parsed:
    """Stands in for torchtitan's ConfigManager where the config is there already."""

    def __init__(self, config: "Trainer.Config") -> None:
        self._config = config

    def parse_args(self) -> "Trainer.Config":
        return self._config


def _prepare_data(config: Any) -> None:
    """Build this package's corpus and tokenizer where the run needs them and they are missing."""
    from titan_muon.integration.manager import uses_own_data

    if not uses_own_data(config):
        _check_tokenizer(config)
        return
    from titan_muon.integration.data import prepare

    try:
        paths = prepare(config.dataloader.dataset_path)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if not Path(config.hf_assets_path).exists():
        config.hf_assets_path = str(paths.tokenizer)
        _logger.info("Tokenizer: %s.", paths.tokenizer)


def _check_tokenizer(config: Any) -> None:
    """Refuse a missing tokenizer here; torchtitan does so later, and names a key long gone."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    wanted = type(config.tokenizer) is HuggingFaceTokenizer.Config
    if wanted and not Path(config.hf_assets_path).is_dir():
        raise ConfigError(
            f'hf_assets_path = "{config.hf_assets_path}" is no folder here; name the one with the '
            "model's tokenizer (--hf_assets_path, or a key above all tables of the train config), "
            'or train on [dataloader] dataset = "python_stdlib", whose tokenizer is built.'
        )


def _parse_or_exit(args: Sequence[str] | None) -> "Trainer.Config":
    try:
        config = parse(args)
        _check_launched()
        _prepare_data(config)
        return config
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _check_launched() -> None:
    """Refuse to train where torchtitan would look in vain for what torchrun sets."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start training under torchrun, for one process "
            "torchrun --nproc_per_node=1 -m titan_muon.train ..., or with scripts/train.sh."
        )


def _is_first_rank() -> bool:
    """Return whether this is the first rank of its host, or no torchrun started it."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def _one_voice() -> Generator[None]:
    """Let the first rank of a host say what all of them would say.

    torchrun ends the other ranks when one has failed, so they wait before they speak.
    """
    if _is_first_rank():
        yield
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except SystemExit as stop:
        if stop.code:
            time.sleep(_SILENCE_SECONDS)
            sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())


if __name__ == "__main__":
    main()
