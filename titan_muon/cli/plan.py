"""``titan-muon plan``: what a run's optimizer would do and cost, without a GPU or a process."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Sequence
from typing import Any

from titan_muon.cli.figures import Figures
from titan_muon.cli.findings import find_notes, find_warnings
from titan_muon.cli.layouts import parse_config, quiet, stages_of, world_size_of
from titan_muon.cli.plan_text import as_text
from titan_muon.cli.rates import Rates
from titan_muon.cli.report import Report
from titan_muon.integration.arguments import FILE_FLAGS, with_file
from titan_muon.integration.toml_place import ConfigError

__all__ = ["make_report", "run"]

# Flags of training whose value may be a file too.
_OWN_FLAGS = (
    *("--world-size", "--per-parameter", "--json"),
    *("--tflops", "--memory-gbs", "--link-gbs"),
)
_CHOOSE_A_MODEL = (*FILE_FLAGS, "--module", "--model.name")


def run(args: Sequence[str]) -> None:
    """Print the plan of a train config.

    Args:
        args: Command line after ``plan``.

    Raises:
        ConfigError: A mistake in the file or in a flag, or a layout that torchtitan refuses.
        SystemExit: Help was printed, or a flag refused.
    """
    given, training = _parse(list(args))
    with quiet():
        report = make_report(
            training,
            world_size=given.world_size,
            per_parameter=given.per_parameter,
            rates={
                name: value
                for name, value in vars(given).items()
                if name in {f.name for f in dataclasses.fields(Rates)} and value is not None
            },
        )
    if given.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(as_text(report))


def make_report(
    args: list[str],
    *,
    world_size: int | None = None,
    per_parameter: bool = False,
    rates: dict[str, float] | None = None,
) -> Report:
    """Plan a run.

    Args:
        args: Arguments of ``titan_muon.train``.
        world_size: Number of ranks; None for the product of the degrees in the config.
        per_parameter: Whether to measure every parameter alone.
        rates: Fields of :class:`Rates` that differ from its defaults.

    Raises:
        ConfigError: As :func:`run`.
    """
    config, notes = parse_config(args)
    # Only now: these import torchtitan, which looks for its device then.
    from titan_muon.integration.config import OptimizerConfig
    from titan_muon.integration.optimizers_container import assign_all

    size, note = world_size_of(config.parallelism, world_size)
    figures = Figures(
        size, Rates(**{"link_gbs": Rates.link_of(size), **(rates or {})}), per_parameter
    )
    for stage in stages_of(config, size):
        optimizer: Any = config.optimizer
        if not isinstance(optimizer, OptimizerConfig):
            raise ConfigError(
                "this run has an optimizer of torchtitan's own, which has no plan: write "
                '[optimizer] name = "Muon" into the file, or add --optimizer.name Muon.'
            )
        try:
            figures.add(stage, assign_all(optimizer, stage.parts))
        except ValueError as error:
            # Options that do not fit a parameter show only now.
            raise ConfigError(str(error)) from error
    optimizer = config.optimizer
    return Report(
        run=_describe(config),
        world_size=size,
        groups=figures.group_reports(),
        sets=figures.sets,
        parameters=figures.parameters,
        state_bytes=figures.state_bytes,
        milliseconds=figures.milliseconds,
        rates=figures.rates,
        warnings=find_warnings(optimizer, figures.assignments, figures.sets),
        notes=[*notes, *([note] if note else []), *find_notes(optimizer, figures.assignments)],
    )


def _parse(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate this command's flags from those of training, and find the file."""
    parser = argparse.ArgumentParser(
        prog="titan-muon plan",
        usage="titan-muon plan FILE.toml [flags below] [--section.key value ...]",
        description="Say what the optimizer of a train config would do and cost. Nothing is "
        "trained, no GPU and no other process is needed. Takes every flag of titan_muon.train as "
        "well, --module and --config in the place of FILE.toml included.",
        allow_abbrev=False,
    )
    number = {"type": _positive, "metavar": "X"}
    rates = Rates()
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks; default: what the degrees multiply to"
    )
    parser.add_argument("--per-parameter", action="store_true", help="a line for each parameter")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tflops",
        **number,
        help=f"TFLOP/s of a GPU for the modelled time; default {rates.tflops:g}, an H200's",
    )
    parser.add_argument(
        "--memory-gbs", **number, help=f"GB/s of its memory; default {rates.memory_gbs:g}"
    )
    parser.add_argument(
        "--link-gbs",
        **number,
        help=f"GB/s that a rank sends; default {Rates.link_of(1):g} on up to 8 ranks, else "
        f"{Rates.link_of(9):g}",
    )
    given, training = parser.parse_known_args(with_file(args))
    for flag in (word.partition("=")[0] for word in training):
        meant = difflib.get_close_matches(flag, _OWN_FLAGS, n=1, cutoff=0.8)
        if meant:
            raise ConfigError(f"titan-muon plan: {flag} is not a flag, did you mean {meant[0]}?")
    if not any(a.partition("=")[0] in _CHOOSE_A_MODEL for a in training):
        raise ConfigError(
            "titan-muon plan: name a train config (FILE.toml), or a model by --module and --config."
        )
    return given, training


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number > 0")
    return value


def _describe(config: Any) -> dict[str, Any]:
    parallelism = config.parallelism
    degrees = (
        "pipeline_parallel_degree",
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    )
    return {
        "model": config.model_spec.name,
        "flavor": config.model_spec.flavor,
        "optimizer": config.optimizer.name,
        "parallelism": {name: getattr(parallelism, name) for name in degrees},
    }
