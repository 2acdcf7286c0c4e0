"""Which implementation of the dense operations runs where, and why.

The iterations are written once against :class:`Operations`; this module decides which functions
stand behind it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_muon.kernels import reference


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


@dataclass(frozen=True)
class Operations:
    """The three dense operations an iteration is made of.

    Attributes:
        name: ``"reference"`` or ``"triton"``.
        why: One sentence: why these were picked.
        half_cost: True if the symmetric operations compute one triangle only.
        gram: ``x @ x.mT``.
        symmetric_product: ``alpha * a @ b + beta * c`` with a symmetric result.
        product: ``alpha * a @ x + beta * x``.
    """

    name: str
    why: str
    half_cost: bool
    gram: Gram
    symmetric_product: SymmetricProduct
    product: Product


def select_operations(rows: int, dtype: torch.dtype, device: torch.device) -> Operations:
    """Pick the operations for matrices of one size on one device.

    Args:
        rows: The shorter side of the matrices, which is the side of every symmetric product.
        dtype: Dtype the iteration runs in.
        device: Where the matrices are.

    Returns:
        The operations, with the reason for the choice in ``why``.
    """
    return _reference(f"{device.type} has no Triton kernels; torch computes every product whole")


def _reference(why: str) -> Operations:
    return Operations(
        name="reference",
        why=why,
        half_cost=False,
        gram=reference.gram,
        symmetric_product=reference.symmetric_product,
        product=reference.product,
    )
