"""The command line: our few flags, then torchtitan's own parser for every field."""

from typing import TYPE_CHECKING, Any

from torchtitan.config import ConfigManager

from titan_muon.integration.arguments import with_file, with_values
from titan_muon.integration.toml import Selection, load_train_config
from titan_muon.integration.toml_file import toml_literal
from titan_muon.integration.toml_legacy import MOVED, gone_reason
from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.options import nearest

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from titan_muon.integration.config import OptimizerConfig

__all__ = ["USAGE", "TrainConfigManager"]

USAGE = """\
torchrun --nproc_per_node=N -m titan_muon.train [--job.config_file] FILE [--section.key value ...]
torchrun --nproc_per_node=N -m titan_muon.train --module MODEL --config FUNCTION [...]

Chosen before the fields below, each winning over the file:
  --job.config_file FILE         train config in TOML
  --module, --model.name NAME    torchtitan model folder or importable module
  --config, --model.config NAME  function of its config registry
  --model.flavor SIZE            the same by size, such as 8B
  --optimizer.name NAME          Muon, NorMuon, AdamW, Adam or a registered algorithm
  --optimizer.options.KEY VALUE  an option that only a registered algorithm has
  --optimizer.recipe RECIPE      recipe under the optimizer's options: a name, a path or none
  --activation_checkpoint.mode KIND   selective, full, memory-budget or none

With --help, one of the two forms above also shows every field of the chosen model.
"""

# Flag -> the key of [model] it wins over.
_MODEL_FLAGS = {
    "module": "name",
    "model.name": "name",
    "config": "config",
    "model.config": "config",
    "model.flavor": "flavor",
}

# The recipe depends on these, so they are read before the parser sets the fields they name.
_ALSO_FIELDS = {"optimizer.name", "optimizer.imports"}
_OWN_OPTION = "optimizer.options."
_CHOOSING = {
    *_MODEL_FLAGS,
    *_ALSO_FIELDS,
    "optimizer.recipe",
    "job.config_file",
    "activation_checkpoint.mode",
}


class TrainConfigManager(ConfigManager):
    """torchtitan's ConfigManager, with a train config file and recipes under the flags.

    Args:
        cuda_graphs: Whether this machine can have them. torchtitan checks them against other
            settings before anything could switch them off.
    """

    def __init__(self, *, cuda_graphs: bool = True) -> None:
        super().__init__()
        self._cuda_graphs = cuda_graphs
        self.notes: list[str] = []

    def parse_args(self, args: list[str] | None = None) -> "Trainer.Config":
        """Return the Trainer config of a command line, checked as far as one process can.

        Args:
            args: Without the program's name; None means ``sys.argv``.

        Raises:
            ConfigError: A mistake in a file or a flag.
            SystemExit: tyro printed help, or refused a flag.
        """
        from titan_muon.integration.checkpoint import with_crossing
        from titan_muon.integration.lr_schedule import followed_schedule
        from titan_muon.integration.metrics import OptimizerMetricsProcessor
        from titan_muon.integration.ranges import check_ranges

        try:
            config: Any = super().parse_args(args)
        except AssertionError as error:
            # torchtitan's configs check themselves so, once all values are known.
            raise ConfigError(f"torchtitan refuses this config: {error}.") from error
        check_ranges(config)
        config.lr_scheduler = followed_schedule(config.lr_scheduler)
        config.checkpoint = with_crossing(config.checkpoint)
        _check_optimizer(config)
        _check_dataset(config)
        if isinstance(config.metrics, OptimizerMetricsProcessor.Config):
            config.metrics.check()
        return config

    def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
        selection, rest = split_flags(with_values(with_file(args)), self.notes)
        if {"-h", "--help"} & set(args):
            print(USAGE, flush=True)
            if selection.file is None and not selection.model:
                raise SystemExit(0)
        config, notes = load_train_config(selection)
        self.notes += notes
        if not self._cuda_graphs:
            config.training.disable_cuda_graphs = True
        return config, rest

    def _validate_config(self) -> None:
        # torchtitan warns of a missing tokenizer here; ours is built a moment later.
        if not uses_own_data(self.config):
            super()._validate_config()


def uses_own_data(config: Any) -> bool:
    """Return whether a config trains on the corpus that this package makes."""
    from titan_muon.integration.data import TRAIN_DATASET, VALIDATION_DATASET

    dataset = getattr(config.dataloader, "dataset", None)
    return dataset in (TRAIN_DATASET, VALIDATION_DATASET)


def split_flags(args: list[str], notes: list[str]) -> tuple[Selection, list[str]]:
    """Separate the flags that choose what to load from those that set fields.

    Flags in the spelling of older torchtitan versions are renamed.

    Args:
        args: Command line without the program's name. Not modified.
        notes: Gets a sentence for each renamed flag.

    Raises:
        ConfigError: A flag without its value, given twice, or gone.
    """
    selection = Selection()
    rest: list[str] = []
    tokens = iter(args)
    for token in tokens:
        name, has_value, value = token.partition("=")
        flag = name[2:].replace("-", "_") if name.startswith("--") else ""
        if flag not in _CHOOSING and not flag.startswith(_OWN_OPTION):
            rest.append(_today(token, name, flag, notes))
            continue
        if not has_value:
            value = _value_of(name, tokens)
        _choose(selection, flag, value)
        if flag in _ALSO_FIELDS:
            rest += [name, value]
    return selection, rest


def _choose(selection: Selection, flag: str, value: str) -> None:
    """Write down what one flag chooses; none may choose twice."""
    if flag in _MODEL_FLAGS:
        key = _MODEL_FLAGS[flag]
        twice = key in selection.model or {key, *selection.model} >= {"flavor", "config"}
        selection.model[key] = value
    elif flag.startswith(_OWN_OPTION):
        key = flag.removeprefix(_OWN_OPTION)
        twice = key in selection.optimizer.options
        selection.optimizer.options[key] = toml_literal(value)
    elif flag.startswith("optimizer."):
        key = flag.removeprefix("optimizer.")
        twice = bool(getattr(selection.optimizer, key))
        setattr(selection.optimizer, key, value.split(",") if key == "imports" else value)
    else:
        key = "file" if flag == "job.config_file" else "activation_checkpoint"
        twice = getattr(selection, key) is not None
        setattr(selection, key, value)
    if twice:
        raise ConfigError(f"command line: --{flag} chooses what another flag chose; keep one.")


def _value_of(name: str, tokens: Any) -> str:
    value = next(tokens, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"command line: {name} needs a value.")
    return value


def _today(token: str, name: str, flag: str, notes: list[str]) -> str:
    """Return a flag in today's spelling; anything else comes back as it is."""
    reason = gone_reason(flag)
    if reason is not None:
        raise ConfigError(f"command line: {name} is gone in torchtitan 0.3.0: {reason}.")
    table = flag.rpartition(".")[0]
    new = MOVED.get(flag)
    if new is None and f"{table}.*" in MOVED:
        new = MOVED[f"{table}.*"].replace("*", flag.rpartition(".")[2])
    if new is None or flag in ("model.tokenizer_path", "optimizer.fused"):
        return token
    notes.append(f"command line: {name} is read as --{new}.")
    return f"--{new}{token[len(name) :]}"


def _check_optimizer(config: Any) -> None:
    from titan_muon.integration.config import OptimizerConfig

    for entry in config.override.imports:
        target, options = (entry, {}) if isinstance(entry, str) else entry
        if target == "titan_muon.integration.override.muon":
            from titan_muon.integration.override import muon

            # torchtitan applies it when process groups and models exist; a mistake ends here.
            _prepare_qk_clip(config, muon(config.optimizer, **options))
    if not isinstance(config.optimizer, OptimizerConfig):
        return
    try:
        config.optimizer.check(where="command line: [optimizer]")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # A flag may have another letter case.
    config.optimizer.name = get_algorithm(config.optimizer.name).title
    _prepare_qk_clip(config, config.optimizer)


def _prepare_qk_clip(config: Any, optimizer: "OptimizerConfig") -> None:
    """Let the model report its largest logits where the optimizer needs them."""
    if optimizer.qk_clip_threshold is None:
        return
    from titan_muon.integration.max_logits import with_max_logits

    try:
        where = f"[optimizer] qk_clip_threshold = {optimizer.qk_clip_threshold}"
        with_max_logits(config.model_spec.model, where)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_dataset(config: Any) -> None:
    """Refuse a text dataset that torchtitan would look for only when the model is built."""
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    loaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        loaders.append(("validator.dataloader", config.validator.dataloader))
    for table, loader in loaders:
        text = type(loader) is HuggingFaceTextDataLoader.Config
        if text and loader.dataset not in DATASETS:
            raise ConfigError(
                f'[{table}] dataset = "{loader.dataset}" is not a dataset'
                f"{nearest(loader.dataset, DATASETS) or '.'} Datasets: {', '.join(DATASETS)}."
            )
