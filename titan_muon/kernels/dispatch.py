"""Which implementation of the dense operations runs where, and why.

The iterations are written once against :class:`Operations`; this module decides which functions
stand behind it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_muon.kernels import reference
from titan_muon.kernels.devices import device_fault


class Gram(Protocol):
    """``x @ x.mT``; see :func:`titan_muon.kernels.reference.gram`."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...  # noqa: D102


class SymmetricProduct(Protocol):
    """``alpha * a @ b + beta * c``; see :func:`titan_muon.kernels.reference.symmetric_product`."""

    def __call__(  # noqa: D102
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


class Product(Protocol):
    """``alpha * a @ x + beta * x``; see :func:`titan_muon.kernels.reference.product`."""

    def __call__(  # noqa: D102
        self,
        a: Tensor,
        x: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


class Divide(Protocol):
    """``x / divisor``, cast; see :func:`titan_muon.kernels.reference.divide`."""

    def __call__(self, x: Tensor, divisor: Tensor, *, out: Tensor) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Operations:
    """The dense operations an iteration is made of.

    Attributes:
        name: ``"reference"`` or ``"triton"``.
        why: One sentence: why these were picked.
        half_cost: True if the symmetric operations compute one triangle only.
        gram: ``x @ x.mT``.
        symmetric_product: ``alpha * a @ b + beta * c`` with a symmetric result.
        product: ``alpha * a @ x + beta * x``.
        divide: ``x / divisor``, one divisor per matrix.
    """

    name: str
    why: str
    half_cost: bool
    gram: Gram
    symmetric_product: SymmetricProduct
    product: Product
    divide: Divide


# Below this many rows a product is over before its tiles fill the GPU; cuBLAS wins there.
MIN_ROWS = 256
_DTYPES = (torch.float16, torch.bfloat16)


def select_operations(rows: int, dtype: torch.dtype, device: torch.device) -> Operations:
    """Pick the operations for matrices of one size on one device.

    Args:
        rows: The shorter side of the matrices, which is the side of every symmetric product.
        dtype: Dtype the iteration runs in.
        device: Where the matrices are.

    Returns:
        The operations, with the reason for the choice in ``why``.
    """
    why = decline_reason(rows, dtype, device)
    if why is not None:
        return Operations(
            name="reference",
            why=why,
            half_cost=False,
            gram=reference.gram,
            symmetric_product=reference.symmetric_product,
            product=reference.product,
            divide=reference.divide,
        )
    from titan_muon.kernels import symmetric_matmul

    return Operations(
        name="triton",
        why="symmetric products compute one triangle",
        half_cost=True,
        gram=symmetric_matmul.gram,
        symmetric_product=symmetric_matmul.symmetric_product,
        product=symmetric_matmul.product,
        divide=symmetric_matmul.divide,
    )


def decline_reason(rows: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the Triton kernels are not used, or None; see :func:`select_operations`."""
    if device.type != "cuda":
        return f"no Triton kernels on {device.type}"
    if dtype not in _DTYPES:
        return f"no Triton kernels for {str(dtype).removeprefix('torch.')}"
    if rows < MIN_ROWS:
        return f"cuBLAS is faster below {MIN_ROWS} rows, and these have {rows}"
    return device_fault(device)
