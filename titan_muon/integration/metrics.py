"""Figures of the optimizer in torchtitan's metrics: what a step changed, and what it cost."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

from titan_muon.integration.config_class import as_class
from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.meter import FIELDS, PARTS, StepMeter

__all__ = ["OptimizerMetrics", "OptimizerMetricsProcessor", "with_optimizer_metrics"]

Source = Callable[[], Mapping[str, float]]


class OptimizerMetrics:
    """Measures chosen steps of an optimizer and turns them into figures of the whole run.

    Args:
        optimizer: Not modified.
    """

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._meter: StepMeter | None = None
        self._is_due = self._has_measured = False
        self._sources: list[Source] = []
        self._labels: list[str] | None = None

    def add(self, source: Source) -> None:
        """Log more figures at every step that torchtitan logs.

        Args:
            source: Called without arguments on all ranks after the step; returns figures by name,
                such as ``{"optimizer/largest_logit": 12.5}``. It may communicate.
        """
        self._sources.append(source)

    def measure_next(self) -> None:
        """Measure the next step. All ranks call it for the same step."""
        self._is_due = True

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Stand around every step."""
        if not self._is_due:
            yield
            return
        self._is_due = False
        self._meter = self._meter or StepMeter(self._optimizer)
        with self._meter:
            yield
        self._has_measured = True

    def collect(self) -> dict[str, float]:
        """Return the figures since the last call: those of the measured step, and all sources'.

        Collective: all ranks.
        """
        figures: dict[str, float] = {}
        if self._meter is not None and self._has_measured:
            self._has_measured = False
            self._labels = self._labels or _agree_on_labels(self._optimizer)
            figures |= _figures(self._meter, _labels_of(self._optimizer), self._labels)
        if any(group.get("nonfinite") == "skip" for group in self._optimizer.param_groups):
            figures["optimizer/skipped_steps"] = self._optimizer.skipped_steps
        for source in self._sources:
            figures |= source()
        return figures


class OptimizerMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics, with those of this package's optimizer among them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's fields and one more."""

        optimizer_freq: int = 0
        """Measure the optimizer every so many steps, a multiple of log_freq, and at the first one;
        0 never does"""

        def check(self) -> None:
            """Refuse a frequency at which nothing is logged.

            Raises:
                ConfigError: ``optimizer_freq`` is negative or no multiple of ``log_freq``.
            """
            if self.optimizer_freq < 0 or self.optimizer_freq % self.log_freq:
                raise ConfigError(
                    f"[metrics] optimizer_freq = {self.optimizer_freq} must be 0 or a multiple of "
                    f"log_freq = {self.log_freq}, since figures are written when a step is logged."
                )

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._optimizer_freq = config.optimizer_freq

    def should_log(self, step: int) -> bool:
        """Say whether a step is logged; asked before it, so the optimizer is told here."""
        metrics, every = self._own(), self._optimizer_freq
        if metrics is not None and every and (step == 1 or step % every == 0):
            metrics.measure_next()
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log a step and what its optimizer did. Collective: all ranks."""
        metrics = self._own()
        figures = {} if metrics is None else metrics.collect()
        extra = {**(extra_metrics or {}), **figures}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra)
        if figures and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info(f"optimizer at step {step}: {_in_a_line(figures)}")

    def _own(self) -> OptimizerMetrics | None:
        return getattr(self.optimizers, "metrics", None)


def with_optimizer_metrics(config: MetricsProcessor.Config) -> MetricsProcessor.Config:
    """Return torchtitan's metrics config as one that logs the optimizer too.

    Args:
        config: Not modified; any other class than torchtitan's own comes back as it is.
    """
    return as_class(config, MetricsProcessor.Config, OptimizerMetricsProcessor.Config)


def _labels_of(optimizer: Muon) -> list[str]:
    """Name this rank's groups: the algorithm, and what sets a group apart from its others."""
    labels = []
    for group in optimizer.param_groups:
        parts = [get_algorithm(group["algorithm"]).title]
        parts += [key for key in ("split", "flatten") if group.get(key)]
        labels.append(".".join(parts))
    counts: Counter[str] = Counter()
    for i, label in enumerate(labels):
        counts[label] += 1
        if counts[label] > 1:
            labels[i] = f"{label}.{counts[label]}"
    return labels


def _agree_on_labels(optimizer: Muon) -> list[str]:
    """Return the labels of all ranks' groups in one order; pipeline stages may differ in theirs."""
    own = _labels_of(optimizer)
    if not dist.is_initialized():
        return own
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return list(dict.fromkeys(label for labels in gathered for label in labels))


def _figures(meter: StepMeter, own: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    sums = torch.zeros(len(labels), len(FIELDS), dtype=torch.float64, device=meter.sums.device)
    for row, label in zip(meter.sums, own, strict=True):
        sums[labels.index(label)] += row
    seconds = meter.seconds()
    seconds.pop("measure", None)
    parts = [seconds.get(part, 0.0) for part in PARTS]
    times = torch.tensor([*parts, sum(seconds.values())], dtype=torch.float64, device=sums.device)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    figures = {
        f"optimizer/time/{part}(ms)": 1e3 * value
        for part, value in zip((*PARTS, "step"), times.tolist(), strict=True)
    }
    for label, row in zip(labels, sums.tolist(), strict=True):
        for name, value in _of_group(dict(zip(FIELDS, row, strict=True))).items():
            figures[f"optimizer/{name}/{label}"] = value
    return figures


def _of_group(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of one group; those that it has no numbers for are left out."""
    figures = {}
    update = _root_mean(sums["update_squares"], sums["update_count"])
    weight = _root_mean(sums["weight_squares"], sums["weight_count"])
    if update is not None:
        figures["update_rms"] = update
        if weight:
            figures["update_to_weight"] = update / weight
    lengths = math.sqrt(sums["gradient_squares"] * sums["momentum_squares"])
    if lengths:
        figures["momentum_cosine"] = sums["gradient_dot_momentum"] / lengths
    if sums["orthogonality_count"]:
        figures["orthogonality_error"] = sums["orthogonality_errors"] / sums["orthogonality_count"]
    return figures


def _root_mean(squares: float, count: float) -> float | None:
    return math.sqrt(squares / count) if count else None


def _in_a_line(figures: Mapping[str, float]) -> str:
    short = {name.removeprefix("optimizer/"): value for name, value in figures.items()}
    return "  ".join(f"{name} {value:.3g}" for name, value in short.items())
