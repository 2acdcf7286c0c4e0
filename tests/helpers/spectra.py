"""Matrices with known singular values, and the exact value of a schedule on them."""

import torch
from torch import Tensor

from titan_muon.orthogonalization import Schedule

SPECTRA = ("gaussian", "condition 1e6", "power law")


def matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return one float64 (rows, columns) matrix of the named spectrum, rows <= columns."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "gaussian":
        return draw(rows, columns)
    index = torch.arange(rows, dtype=torch.float64)
    values = 10 ** (-6 * index / max(1, rows - 1)) if kind == "condition 1e6" else 1 / (1 + index)
    left = torch.linalg.qr(draw(rows, rows)).Q
    right = torch.linalg.qr(draw(columns, rows)).Q
    return (left * values) @ right.mT


def exact(x: Tensor, schedule: Schedule) -> Tensor:
    """Apply the schedule to the singular values of each matrix, in float64."""
    x = x.double()
    norm = x.norm(dim=(-2, -1), keepdim=True)
    u, s, vh = torch.linalg.svd(x / (schedule.safety * norm), full_matrices=False)
    for a, b, c in schedule.triples:
        s = a * s + b * s**3 + c * s**5
    return u @ (s[..., None] * vh)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the Frobenius norm of the difference over that of the truth."""
    return ((result.double() - truth.double()).norm() / truth.double().norm()).item()
