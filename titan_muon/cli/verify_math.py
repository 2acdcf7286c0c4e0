"""Numerical checks of the orthogonalization on one device: accuracy, singular values, speed."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_muon.optim.stopwatch import Stopwatch
from titan_muon.orthogonalization import (
    Schedule,
    explain,
    orthogonalize_batch,
    resolve_schedule,
    schedule_names,
)

__all__ = ["Accuracy", "Speed", "measure_accuracy", "measure_speed"]

SPECTRA = ("gaussian", "condition 1e6", "power law")
# Largest relative error against the same polynomial in float64. 16-bit products round the iterate
# in every step; the ill-conditioned spectra reach 2e-2 and 1.5e-1 on an H200, others a tenth of it.
LIMITS = {
    torch.float16: 6e-2,
    torch.bfloat16: 5e-1,
    torch.float32: 5e-4,
    torch.float64: 1e-10,
}
# Singular values below this share of the largest are not expected to have arrived near 1.
_SMALL = 1e-2
_REPEATS = 5
# One after another without a pause, as in a step: the host enqueues while the device computes.
_CALLS = 8


@dataclass(frozen=True)
class Accuracy:
    """One schedule in one dtype on one spectrum.

    Args:
        schedule, dtype, spectrum: What ran.
        error: Relative Frobenius distance from the same polynomial in float64.
        before, after: Singular values, descending; those before relative to the largest.
    """

    schedule: str
    dtype: torch.dtype
    spectrum: str
    error: float
    before: list[float]
    after: list[float]

    @property
    def passes(self) -> bool:
        """Whether the error is within what the dtype allows; a NaN is not."""
        return self.error <= LIMITS[self.dtype]

    @property
    def arrived(self) -> tuple[float, float]:
        """Smallest and largest singular value after, of those that were not tiny before."""
        found = self.after[: sum(value >= _SMALL for value in self.before)]
        return min(found), max(found)


@dataclass(frozen=True)
class Speed:
    """One batch shape as the optimizer would compute it.

    Args:
        shape: (B, M, N).
        choice: What was chosen and why.
        milliseconds: Of one batch.
        plain_milliseconds: The same schedule, matrix by batched matrix product, as torch has it.
        error: As in :class:`Accuracy`, largest over the batch.
        limit: What the dtype allows.
    """

    shape: tuple[int, int, int]
    choice: str
    milliseconds: float
    plain_milliseconds: float
    error: float
    limit: float

    @property
    def passes(self) -> bool:
        """Whether the error is within what the dtype allows."""
        return self.error <= self.limit


def measure_accuracy(device: torch.device) -> Iterator[Accuracy]:
    """Orthogonalize matrices of known spectra with every schedule in every dtype.

    Args:
        device: Where to compute.
    """
    rows, columns = (1024, 2048) if device.type == "cuda" else (192, 384)
    dtypes = [torch.bfloat16, torch.float32]
    dtypes.insert(0, torch.float16 if device.type == "cuda" else torch.float64)
    for spectrum in SPECTRA:
        matrix = _matrix(spectrum, rows, columns).to(device)
        values = torch.linalg.svdvals(matrix)
        for name in schedule_names():
            schedule = resolve_schedule(name, 5)
            truth = _exact(matrix, schedule)
            for dtype in dtypes:
                found = orthogonalize_batch(matrix, schedule, dtype=dtype).double()
                yield Accuracy(
                    name,
                    dtype,
                    spectrum,
                    ((found - truth).norm() / truth.norm()).item(),
                    (values / values[0]).tolist(),
                    _values_along(found, matrix).tolist(),
                )


def measure_speed(device: torch.device) -> Iterator[Speed]:
    """Time shapes of real models with the kernels that would be chosen here.

    Args:
        device: Where to compute.
    """
    if device.type == "cuda":
        shapes = [(16, 1024, 1024), (16, 1408, 2048), (4, 2048, 8192), (4, 4096, 4096)]
        dtype = torch.float16
    else:
        shapes, dtype = [(4, 256, 256), (2, 192, 768), (2, 768, 192)], torch.float32
    schedule = resolve_schedule("polar_express", 5)
    for shape in shapes:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(shape, generator=generator, device=device)
        found = orthogonalize_batch(x, schedule, dtype=dtype).double()
        truth = orthogonalize_batch(x, schedule, dtype=torch.float64, evaluation="standard")
        errors = (found - truth).norm(dim=(-2, -1)) / truth.norm(dim=(-2, -1))
        yield Speed(
            shape,
            explain(shape, dtype, device, schedule),
            _milliseconds(lambda x=x: orthogonalize_batch(x, schedule, dtype=dtype), device),
            _milliseconds(lambda x=x: _plain(x, schedule, device), device),
            errors.max().item(),
            LIMITS[dtype],
        )


def _matrix(spectrum: str, rows: int, columns: int) -> Tensor:
    """Return one float64 matrix, rows <= columns."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if spectrum == "gaussian":
        return draw(rows, columns)
    index = torch.arange(rows, dtype=torch.float64)
    values = 10 ** (-6 * index / (rows - 1)) if spectrum == "condition 1e6" else 1 / (1 + index)
    left, right = torch.linalg.qr(draw(rows, rows)).Q, torch.linalg.qr(draw(columns, rows)).Q
    return (left * values) @ right.mT


def _exact(matrix: Tensor, schedule: Schedule) -> Tensor:
    """Apply the schedule to the singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (schedule.safety * matrix.norm())
    for a, b, c in schedule.triples:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def _values_along(found: Tensor, matrix: Tensor) -> Tensor:
    """Return what became of each singular value: the length along its own pair of vectors."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return torch.einsum("mi,mn,in->i", u, found, vh)


def _plain(x: Tensor, schedule: Schedule, device: torch.device) -> Tensor:
    """Return the standard iteration as a few lines of torch have it, in torch's own dtype."""
    x = x.bfloat16() if device.type == "cuda" else x
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (schedule.safety * x.norm(dim=(-2, -1), keepdim=True))
    for a, b, c in schedule.triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _milliseconds(function: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    function()
    for _ in range(_REPEATS):
        clock = Stopwatch(device)
        with clock.part("all"):
            for _ in range(_CALLS):
                function()
        times.append(1e3 * clock.seconds()["all"] / _CALLS)
    return statistics.median(times)
