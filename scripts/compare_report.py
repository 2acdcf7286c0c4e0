"""Table, CSV and picture of the runs of compare.py."""

import csv
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from titan_muon.integration.text_table import table

if TYPE_CHECKING:
    from compare import Result

__all__ = ["best_lrs", "write_report"]

COLUMNS = ("optimizer", "lr", "seed", "step", "tokens", "seconds", "loss", "validation_loss")


def write_report(results: "Sequence[Result]", folder: Path, png: Path | None = None) -> str:
    """Write curves.csv, table.txt and the picture; return the table.

    Args:
        results: Of all runs so far.
        folder: Where to; made if it is not there.
        png: Path of the picture; by default compare.png in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "curves.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            for step, *values in zip(
                result.steps, result.tokens, result.seconds, result.losses, strict=True
            ):
                run = (result.optimizer, result.lr, result.seed)
                writer.writerow((*run, step, *values, result.validation.get(step, "")))
    text = as_table(results)
    (folder / "table.txt").write_text(text + "\n")
    if find_spec("matplotlib") is None:
        return f"{text}\nno picture: pip install matplotlib, then give the same command again"
    draw(results, png or folder / "compare.png")
    return text


def by_setting(results: "Sequence[Result]") -> "dict[tuple[str, float], list[Result]]":
    """Return the runs of each optimizer and lr: its seeds."""
    found: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        found.setdefault((result.optimizer, result.lr), []).append(result)
    return found


def final_loss(runs: "Sequence[Result]") -> float:
    """Return the mean final loss over seeds."""
    return fmean(run.final for run in runs)


def best_lrs(results: "Sequence[Result]") -> dict[str, float]:
    """Return the lr of the lowest mean final loss of each optimizer."""
    best: dict[str, tuple[float, float]] = {}
    for (optimizer, lr), runs in by_setting(results).items():
        best[optimizer] = min(best.get(optimizer, (math.inf, lr)), (final_loss(runs), lr))
    return {optimizer: lr for optimizer, (_, lr) in best.items()}


def as_table(results: "Sequence[Result]") -> str:
    """Return a line for each optimizer and lr, best lr of each optimizer marked."""
    best = best_lrs(results)
    rows = []
    for (optimizer, lr), runs in sorted(by_setting(results).items()):
        finals = [run.final for run in runs]
        diverged = any(run.diverged for run in runs)
        spread = f"{max(finals) - min(finals):.4f}" if len(finals) > 1 and not diverged else "-"
        row = (
            optimizer,
            f"{lr:g}",
            len(runs),
            "diverged" if diverged else f"{fmean(finals):.4f}",
            spread,
            f"{fmean(_step_seconds(run) for run in runs):.3f}",
            "best" if best[optimizer] == lr and not diverged else "",
        )
        rows.append(row)
    headings = ("optimizer", "lr", "seeds", "final loss", "spread", "s/step", "")
    return table(headings, rows, left=("optimizer", ""))


def draw(results: "Sequence[Result]", path: Path) -> None:
    """Draw loss over tokens and over time at each optimizer's best lr, and final loss over lr."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2))
    settings = by_setting(results)
    for optimizer, lr in best_lrs(results).items():
        runs = [run for run in settings[optimizer, lr] if run.losses]
        if not runs:
            continue
        length = min(len(run.losses) for run in runs)
        curves = [_smooth(run.losses[:length]) for run in runs]
        losses, low, high = (
            [function(points) for points in zip(*curves, strict=True)]
            for function in (fmean, min, max)
        )
        for axis, name in ((axes[0], "tokens"), (axes[1], "seconds")):
            where = [fmean(getattr(run, name)[i] for run in runs) for i in range(length)]
            (line,) = axis.plot(where, losses, label=f"{optimizer}, lr {lr:g}")
            axis.fill_between(where, low, high, color=line.get_color(), alpha=0.2)
        lrs = sorted(rate for name, rate in settings if name == optimizer)
        finals = [final_loss(settings[optimizer, rate]) for rate in lrs]
        shown = [(rate, loss) for rate, loss in zip(lrs, finals, strict=True) if loss < math.inf]
        axes[2].plot(*zip(*shown, strict=True), marker="o", label=optimizer)
    labels = ("tokens", "seconds of training", "learning rate of the matrices")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("training loss, running mean, best lr")
    axes[2].set(ylabel="final loss", xscale="log")
    ticks = sorted({lr for _, lr in settings})
    axes[2].set_xticks(ticks, [f"{lr:g}" for lr in ticks])
    axes[2].set_xticks([], minor=True)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return means over the last tenth of a run's length; single batches are noisy."""
    width = max(1, len(losses) // 10)
    return [fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def _step_seconds(run: "Result") -> float:
    """Return the time of a step, the first one, which warms up, left out where there are more."""
    if len(run.steps) < 2:
        return run.seconds[0] / run.steps[0] if run.steps else math.nan
    return (run.seconds[-1] - run.seconds[0]) / (run.steps[-1] - run.steps[0])
