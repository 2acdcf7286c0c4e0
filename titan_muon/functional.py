"""``titan_muon.orthogonalize``: one function for a matrix, a batch, a list, and a DTensor."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.tensors import local_of, local_slice, with_local
from titan_muon.orthogonalization import (
    DTYPES,
    orthogonalize_batch,
    resolve_dtype,
    resolve_schedule,
)

__all__ = ["orthogonalize"]


@overload
def orthogonalize(
    x: Tensor,
    *,
    ns_method: str | Sequence[Sequence[float]] = ...,
    ns_steps: int | None = ...,
    ns_dtype: str = ...,
) -> Tensor: ...


@overload
def orthogonalize(
    x: Sequence[Tensor],
    *,
    ns_method: str | Sequence[Sequence[float]] = ...,
    ns_steps: int | None = ...,
    ns_dtype: str = ...,
) -> list[Tensor]: ...


@torch.no_grad()
def orthogonalize(
    x: Tensor | Sequence[Tensor],
    *,
    ns_method: str | Sequence[Sequence[float]] = "polar_express",
    ns_steps: int | None = None,
    ns_dtype: str = "auto",
) -> Tensor | list[Tensor]:
    """Replace each matrix by its approximate polar factor, the nearest semi-orthogonal matrix.

    No schedule makes singular values exactly 1; ``polar_express`` lands them in [0.86, 1.14].

    Args:
        x: (..., M, N), a list of such tensors, or a DTensor with any Shard or Replicate placements.
            Leading dims are a batch of independent matrices. Not modified.
        ns_method: Name of a schedule or a list of (a, b, c) triples.
        ns_steps: Number of iterations, in the schedule's range; None means 5, or as many as there
            are triples.
        ns_dtype: ``auto`` (float16 on CUDA, float32 on CPU), float16, bfloat16, float32 or float64.

    Returns:
        Same shape, dtype, device and placements as ``x``; a list for a list.

    Raises:
        ValueError: Unknown schedule or dtype, a step count out of range, fewer than two dims.
        TypeError: Neither a tensor nor a list of them, or one that is sparse or not of a real float
            dtype of 16 bits or more.
        NotImplementedError: A DTensor with a ``Partial`` placement.

    Collective: for a DTensor all ranks of its mesh; every rank then computes the whole matrix.
    """
    if isinstance(x, list | tuple):
        return [
            orthogonalize(
                _checked(item, f"x[{index}]"),
                ns_method=ns_method,
                ns_steps=ns_steps,
                ns_dtype=ns_dtype,
            )
            for index, item in enumerate(x)
        ]
    x = _checked(x, "x")
    schedule = resolve_schedule(ns_method, ns_steps)
    whole = x
    if is_dtensor(x):
        layout_of(x, "orthogonalize")
        whole = x.full_tensor()
    dtype = resolve_dtype(ns_dtype, whole.device, whole.dtype)
    result = orthogonalize_batch(whole, schedule, dtype=dtype).to(whole.dtype)
    if not is_dtensor(x):
        return result
    return with_local(x, local_slice(x, result).to(local_of(x).device))


def _checked(x: object, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"orthogonalize: {name} is a {type(x).__name__}; give a tensor or a list of tensors"
        )
    if x.dtype not in DTYPES.values() or x.layout != torch.strided:
        raise TypeError(
            f"orthogonalize: {name} has dtype {x.dtype} and layout {x.layout}; use a dense tensor "
            "of float16, bfloat16, float32 or float64"
        )
    if x.ndim < 2:
        raise ValueError(f"orthogonalize: {name} has shape {tuple(x.shape)}, needs (..., M, N)")
    return x
