"""``titan-muon verify``: is the arithmetic right and fast on this machine, and does it train?"""

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_muon.cli.verify_math import Accuracy, Speed, measure_accuracy, measure_speed
from titan_muon.cli.verify_training import Curve, compare_optimizers
from titan_muon.integration.text_table import table
from titan_muon.integration.toml_place import ConfigError

__all__ = ["Findings", "run"]


@dataclass(frozen=True)
class Findings:
    """Everything that was measured.

    Args:
        machine: What it ran on, in a line.
        accuracy, speed, curves: Results of the three parts.
    """

    machine: str
    accuracy: list[Accuracy]
    speed: list[Speed]
    curves: list[Curve]

    @property
    def failures(self) -> list[str]:
        """A line for each result outside its limit."""
        failed = [
            f"{a.schedule} in {_name(a.dtype)} on {a.spectrum}: error {a.error:.1e}"
            for a in self.accuracy
            if not a.passes
        ]
        failed += [f"{s.shape}: error {s.error:.1e}" for s in self.speed if not s.passes]
        failed += [
            f"{c.optimizer}: validation loss {c.validation:.3f}"
            for c in self.curves
            if not c.passes
        ]
        return failed


def run(args: Sequence[str]) -> None:
    """Measure, print, and write report.txt and verify.png.

    Args:
        args: Command line after ``verify``.

    Raises:
        ConfigError: The device is not there, or nothing can be written to the folder.
        SystemExit: Help was printed, a flag refused, or a result is outside its limit (code 1).
    """
    given = _parse(list(args))
    device, folder = _device(given.device), _folder(given.output)
    findings = _measure(device, given.steps)
    text = as_text(findings)
    print(text)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    try:
        from titan_muon.cli.verify_plot import draw

        draw(findings, folder / "verify.png")
        print(f"\nwrote {folder / 'report.txt'} and {folder / 'verify.png'}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"\nwrote {folder / 'report.txt'}; a picture needs pip install 'titan-muon[plot]'")
    if findings.failures:
        raise SystemExit(1)


def as_text(findings: Findings) -> str:
    """Return the report."""
    accuracy = [
        (
            *(a.schedule, _name(a.dtype), a.spectrum, f"{a.before[-1]:.0e} .. 1"),
            *(f"{a.arrived[0]:.3f} .. {a.arrived[1]:.3f}", f"{a.error:.1e}", _verdict(a.passes)),
        )
        for a in findings.accuracy
    ]
    speed = [
        (
            *(str(s.shape), f"{s.milliseconds:.2f}", f"{s.plain_milliseconds:.2f}"),
            *(f"{s.milliseconds / s.plain_milliseconds:.2f}", f"{s.error:.1e}"),
            *(_verdict(s.passes), s.choice),
        )
        for s in findings.speed
    ]
    curves = [
        (
            *(c.optimizer, f"{c.lr:g}", len(c.losses), f"{c.losses[-1]:.3f}"),
            *(f"{c.validation:.3f}", f"{c.step_milliseconds:.1f}", f"{c.seconds:.0f}"),
            _verdict(c.passes),
        )
        for c in findings.curves
    ]
    values = ("schedule", "dtype", "spectrum", "before", "after", "error", "")
    times = ("batch", "ms", "plain torch ms", "ratio", "error", "", "kernels")
    losses = ("optimizer", "lr", "steps", "loss", "held-out loss", "ms a step", "s in all", "")
    failures = findings.failures
    return "\n".join(
        [
            findings.machine,
            "",
            "Singular values before, relative to the largest, and after, if above 1 % before;",
            "the error is that against the same polynomial in float64:",
            table(values, accuracy, left=("schedule", "dtype", "spectrum", "")),
            "",
            "Time of a batch with the kernels that are chosen here, and of the same schedule in a",
            "few lines of torch, in bfloat16 on a GPU:",
            table(times, speed, left=("batch", "", "kernels")),
            "",
            "A small transformer on bytes of the Python standard library, same weights, same data:",
            table(losses, curves, left=("optimizer", "")),
            "",
            "all within their limits" if not failures else "outside their limits:",
            *(f"  {line}" for line in failures),
        ]
    )


def _measure(device: torch.device, steps: int | None) -> Findings:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Standard output is for the report alone.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("accuracy")
        accuracy = list(measure_accuracy(device))
        progress.update(task, description="speed")
        speed = list(measure_speed(device))

        def on_step(name: str, step: int) -> None:
            progress.update(task, description=f"{name}, step {step}")

        curves = list(compare_optimizers(device, steps, on_step))
    return Findings(_machine(device), accuracy, speed, curves)


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titan-muon verify",
        description="Check the arithmetic on this machine: singular values before and after every "
        "schedule, accuracy and speed of the kernels that are chosen, and a short training with "
        "AdamW, Muon and NorMuon. Needs no torchtitan; a minute or two without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; default: a GPU if there is one")
    parser.add_argument("--steps", type=_positive, help="of each training")
    parser.add_argument(
        "--output", default="outputs/verify", help="folder of report.txt and verify.png"
    )
    return parser.parse_args(args)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer >= 1")
    return int(text)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} cannot be used here: {error}") from None
    return device


def _folder(name: str) -> Path:
    """Make the output folder before anything is measured, and try to write there."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").open("a").close()
    except OSError as error:
        raise ConfigError(
            f"--output {name}: {error.strerror}; name a folder that you may write to."
        ) from None
    return folder


def _machine(device: torch.device) -> str:
    from titan_muon import __version__

    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return f"titan-muon {__version__}, torch {torch.__version__}, {where}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _verdict(passes: bool) -> str:
    return "ok" if passes else "FAILED"
