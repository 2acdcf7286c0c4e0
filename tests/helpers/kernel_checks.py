"""Checks of the symmetric products, run on a GPU and, in a process of their own, interpreted.

    TRITON_INTERPRET=1 python -m tests.helpers.kernel_checks

prints ``passed`` at the end. Triton decides at its first import whether it interprets.
"""

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.spectra import relative_error
from titan_muon.kernels import reference, symmetric_matmul
from titan_muon.kernels.configurations import Configuration

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The interpreter cuts to bfloat16 instead of rounding: twice the error, and other last bits.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = ((1, 1, 1), (2, 17, 40), (2, 40, 24), (1, 33, 1))
# Small tiles, so that small matrices have many, on and off the diagonal.
SMALL = (
    Configuration("pointer", 16, 16, 16, 4, 2, 2),
    Configuration("pointer", 16, 32, 16, 4, 2, 4),
)


def inputs(batch: int, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return the same random matrices with dense rows, with dense columns, and as a slice."""
    x = torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(rows))
    x = x.to(device, dtype)
    wide = torch.zeros(batch, rows, 2 * columns + 1, dtype=dtype, device=device)
    wide[..., 1::2] = x
    return [x, x.mT.contiguous().mT, wide[..., 1::2]]


def _allowed(dtype: torch.dtype) -> float:
    return 4.0 if INTERPRETED and dtype == torch.bfloat16 else 2.0


def poisoned(batch: int, rows: int, like: Tensor) -> Tensor:
    """Return an output buffer in which an element that is never written shows."""
    return torch.full((batch, rows, rows), float("nan"), dtype=like.dtype, device=like.device)


def check_gram(x: Tensor, configuration: Configuration | None) -> None:
    """Compare with float64 and with torch in the same dtype."""
    truth = x.double() @ x.double().mT
    out = poisoned(x.shape[0], x.shape[1], x)
    result = symmetric_matmul.gram(x, out=out, configuration=configuration)
    bound = _allowed(x.dtype) * relative_error(reference.gram(x), truth) + 1e-6
    error = relative_error(result, truth)
    assert error <= bound, (configuration, x.dtype, x.shape, x.stride(), error, bound)
    again = symmetric_matmul.gram(x, configuration=configuration)
    assert torch.equal(result, again), "not the same from run to run"


def check_product(
    batch: int, rows: int, dtype: torch.dtype, device: str, configuration: Configuration | None
) -> None:
    """Compare ``alpha * a @ b + beta * c`` of commuting matrices, for each way to lay them out."""
    root = torch.randn(batch, rows, rows, generator=torch.Generator().manual_seed(rows)).to(device)
    a = ((root + root.mT) / (2 * rows**0.5)).to(dtype)
    eye = torch.eye(rows, dtype=torch.float64, device=device)
    # Commutes with a, so that the product is symmetric; rounding it disturbs that a little.
    b = (a.double() @ a.double() + 0.5 * eye).to(dtype)
    c = (root + root.mT).to(dtype)
    for beta, right in ((2.0, b), (0.0, b.mT), (-1.0, b)):
        truth = 0.5 * a.double() @ right.double() + beta * c.double()
        addend = c if beta else None
        result = symmetric_matmul.symmetric_product(
            a, right, addend, alpha=0.5, beta=beta, out=poisoned(batch, rows, a),
            configuration=configuration,
        )  # fmt: skip
        dense = reference.symmetric_product(a, right, addend, alpha=0.5, beta=beta)
        # Mirroring makes an error of the rounding of b, which torch's product does not show.
        asymmetry = relative_error(truth.mT, truth)
        bound = _allowed(dtype) * relative_error(dense, truth) + asymmetry + 1e-6
        error = relative_error(result, truth)
        assert error <= bound, (configuration, dtype, batch, rows, beta, error, bound)


def check_nan_stays_in_its_matrix(device: str, configuration: Configuration | None) -> None:
    """Rows past the end of one matrix may be read from the next, but never stored."""
    x = torch.randn(3, 24, 40, device=device)
    x[1] = float("nan")
    result = symmetric_matmul.gram(x.half(), configuration=configuration)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def check_divide(device: str) -> None:
    """The quotient is that of float32, rounded once, for each layout."""
    for dtype in DTYPES:
        for x in inputs(3, 70, 90, dtype, device):
            divisor = torch.tensor([1.0, 3e-3, 7e4], device=device).view(3, 1, 1)
            for target in DTYPES[::2] if INTERPRETED else DTYPES:
                out = torch.empty_like(x, dtype=target)
                symmetric_matmul.divide(x, divisor, out=out)
                assert torch.equal(out, (x.float() / divisor).to(target)), (dtype, target)


@given(
    batch=st.integers(1, 3),
    rows=st.integers(2, 50),
    columns=st.integers(1, 50),
    layout=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    configuration=st.sampled_from(SMALL),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def check_any_shape(
    batch: int,
    rows: int,
    columns: int,
    layout: int,
    dtype: torch.dtype,
    configuration: Configuration,
) -> None:
    """Any size and strides."""
    check_gram(inputs(batch, rows, columns, dtype, "cpu")[layout], configuration)


def main() -> None:
    """Run everything on the CPU, under Triton's interpreter."""
    for configuration in SMALL:
        for dtype in DTYPES:
            for batch, rows, columns in SHAPES:
                for x in inputs(batch, rows, columns, dtype, "cpu"):
                    check_gram(x, configuration)
            check_product(2, 40, dtype, "cpu", configuration)
        check_nan_stays_in_its_matrix("cpu", configuration)
    check_divide("cpu")
    check_any_shape()
    print("passed")


if __name__ == "__main__":
    main()
