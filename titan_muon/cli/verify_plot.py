"""The picture of ``titan-muon verify``."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

if TYPE_CHECKING:
    from titan_muon.cli.verify import Findings

__all__ = ["draw"]


def draw(findings: "Findings", path: Path) -> None:
    """Draw singular values, errors and losses.

    Args:
        findings: What was measured.
        path: PNG to write.
    """
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.4))
    _values(axes[0], findings)
    _errors(axes[1], findings)
    _losses(axes[2], findings)
    figure.suptitle(findings.machine, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _values(axis: "pyplot.Axes", findings: "Findings") -> None:
    """What becomes of each singular value, in the dtype that is closest to exact."""
    shown = [a for a in findings.accuracy if a.spectrum == "condition 1e6"]
    finest = min(shown, key=lambda a: a.error).dtype
    for accuracy in (a for a in shown if a.dtype == finest):
        axis.plot(accuracy.before, accuracy.after, label=accuracy.schedule)
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set(xscale="log", xlabel="singular value before", ylabel="after", title="5 steps")
    axis.legend()
    axis.grid(alpha=0.3)


def _errors(axis: "pyplot.Axes", findings: "Findings") -> None:
    """The error of each schedule and dtype, the worst spectrum."""
    worst: dict[tuple[str, str], float] = {}
    for a in findings.accuracy:
        key = a.schedule, str(a.dtype).removeprefix("torch.")
        worst[key] = max(worst.get(key, 0.0), a.error)
    labels = [f"{schedule}\n{dtype}" for schedule, dtype in worst]
    axis.barh(labels, list(worst.values()))
    axis.set(xscale="log", title="error against float64, worst spectrum")
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(alpha=0.3, axis="x")


def _losses(axis: "pyplot.Axes", findings: "Findings") -> None:
    for curve in findings.curves:
        label = f"{curve.optimizer}: {curve.validation:.3f} held out"
        axis.plot(range(1, len(curve.losses) + 1), curve.losses, label=label)
    axis.set(xlabel="step", ylabel="loss", title="small transformer, bytes of Python source")
    axis.legend()
    axis.grid(alpha=0.3)
