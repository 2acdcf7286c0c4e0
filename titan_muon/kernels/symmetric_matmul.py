"""Products whose result is symmetric: one triangle is computed, the other mirrored.

This is the host side: it picks a kernel and a launch shape. The kernels are in
:mod:`titan_muon.kernels.triton_symmetric` (any strides, any NVIDIA GPU since Ampere) and
:mod:`titan_muon.kernels.triton_hopper`; both import triton, so only functions import them.
"""

import torch
from torch import Tensor

from titan_muon.kernels import reference
from titan_muon.kernels.configurations import (
    HOPPER_LARGE,
    Configuration,
    known_configuration,
    pointer_configuration,
)
from titan_muon.kernels.devices import device_facts, on_device_of
from titan_muon.kernels.hopper import fits_copy_engine, hopper_fault
from titan_muon.kernels.launcher import described, remember, repeat


def gram(
    x: Tensor, *, out: Tensor | None = None, configuration: Configuration | None = None
) -> Tensor:
    """Compute ``x @ x.mT`` by triangles; see :func:`titan_muon.kernels.reference.gram`.

    Args:
        x: (B, M, N), float16, bfloat16 or float32, any strides. Not modified.
        out: (B, M, M) that does not overlap ``x``, or None to allocate.
        configuration: Launch shape; None looks it up.

    Returns:
        (B, M, M), symmetric up to the order of sums.
    """
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    return _multiply(x, x.mT, None, 1.0, 0.0, out, configuration)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """Compute ``alpha * a @ b + beta * c`` by triangles.

    See :func:`titan_muon.kernels.reference.symmetric_product`. If ``a @ b`` is not symmetric, the
    result is not ``a @ b``: most of its upper triangle mirrors the lower one.

    Args:
        a: (B, M, K), float16, bfloat16 or float32, any strides. Not modified.
        b: (B, K, M), like ``a``. Not modified.
        c: (B, M, M), symmetric; read only where ``beta`` is not 0. Not modified.
        alpha: Factor of the product.
        beta: Factor of ``c``.
        out: (B, M, M) that does not overlap an input, or None to allocate.
        configuration: Launch shape; None looks it up.

    Returns:
        (B, M, M), symmetric up to the order of sums.
    """
    if out is None:
        out = a.new_empty(a.shape[0], a.shape[1], a.shape[1])
    return _multiply(a, b, c if beta != 0.0 else None, alpha, beta, out, configuration)


def product(
    a: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Compute ``alpha * a @ x + beta * x``; see :func:`titan_muon.kernels.reference.product`.

    torch copies ``x`` to ``out`` before it adds the product; the Hopper kernel reads it in passing
    and takes 8 to 21 % less time (H200). Without ``beta`` there is nothing to save: cuBLAS does it.
    """
    if out is None or beta == 0.0:
        return reference.product(a, x, alpha=alpha, beta=beta, out=out)
    left, right, addend, target = a, x, x, out
    if out.stride(2) != 1:
        # Dense columns: the transposed product, x.mT @ a.mT, has dense rows.
        left, right, addend, target = x.mT, a.mT, x.mT, out.mT
    key, addresses = _key(left, right, addend, target, alpha, beta)
    with on_device_of(x):
        if repeat(key, addresses):
            return out
        if not _runs_on_hopper(a, x, out):
            return reference.product(a, x, alpha=alpha, beta=beta, out=out)
        from titan_muon.kernels.triton_hopper import multiply

        known = multiply(left, right, addend, alpha, beta, target, HOPPER_LARGE, symmetric=False)
        remember(key, known)
    return out


def _runs_on_hopper(a: Tensor, x: Tensor, out: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and device_facts(x.device)[0] == (9, 0)
        and x.stride() == out.stride()
        and all(fits_copy_engine(t) for t in (a, x, out))
        and hopper_fault(x.device) is None
    )


def divide(x: Tensor, divisor: Tensor, *, out: Tensor) -> Tensor:
    """Divide each matrix by its divisor; see :func:`titan_muon.kernels.reference.divide`."""
    dense = all(
        t.shape[1] * t.shape[2] > 0
        and t.stride()[1:] in ((t.shape[2], 1), (1, t.shape[1]))
        and t.stride()[1:] == x.stride()[1:]
        for t in (x, out)
    )
    if not dense or x.dtype == torch.float64 or divisor.dtype != torch.float32:
        return reference.divide(x, divisor, out=out)
    from titan_muon.kernels import triton_divide

    with on_device_of(x):
        triton_divide.divide(x, divisor, out)
    return out


def _multiply(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor,
    configuration: Configuration | None,
) -> Tensor:
    if a.shape[0] == 0 or a.shape[1] == 0:
        return out
    if a.shape[1] == 1:
        # Triton 3.6 fails to compile a kernel whose every size and stride is 1.
        return reference.symmetric_product(a, b, c, alpha=alpha, beta=beta, out=out)
    key, addresses = _key(a, b, c, out, alpha, beta, configuration)
    with on_device_of(a):
        if repeat(key, addresses):
            return out
        shape = configuration or _configuration(a, b, c, out)
        if shape.kernel == "hopper":
            from titan_muon.kernels.triton_hopper import multiply
        else:
            from titan_muon.kernels.triton_symmetric import multiply
        remember(key, multiply(a, b, c, alpha, beta, out, shape))
    return out


def _key(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, *rest: object
) -> tuple[tuple[object, ...], list[int]]:
    """Return all that a launch depends on, and the addresses of its operands."""
    kinds, addresses = described(a, b, c, out)
    shapes = [None if x is None else (x.shape, x.stride()) for x in (a, b, c, out)]
    return (*kinds, *shapes, *rest), addresses


def _configuration(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor) -> Configuration:
    batch, rows, _ = a.shape
    if not a.is_cuda:
        return pointer_configuration(rows, (0, 0))
    capability, multiprocessors = device_facts(a.device)
    shape = known_configuration(rows, batch, a.dtype, capability, multiprocessors)
    if shape is None:
        from titan_muon.kernels.tuning import tuned_configuration

        return tuned_configuration(rows, a.shape[2], batch, a.dtype, a.device)
    if shape.kernel == "hopper":
        # What is added and written goes through the copy engine row by row.
        if out.stride(2) != 1 or (c is not None and c.stride(2) != 1):
            return pointer_configuration(rows, capability)
        operands = (a, b, out) if c is None else (a, b, c, out)
        if not all(fits_copy_engine(x) for x in operands) or hopper_fault(a.device) is not None:
            return pointer_configuration(rows, capability)
    return shape
