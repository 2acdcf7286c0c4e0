"""``titan_muon.orthogonalize``: one function for a matrix, a batch, a list, and a DTensor."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.tensors import local_of, local_slice, with_local
from titan_muon.orthogonalization import orthogonalize_batch, resolve_dtype, resolve_schedule

__all__ = ["orthogonalize"]


@overload
def orthogonalize(
    x: Tensor,
    *,
    ns_method: str | Sequence[Sequence[float]] = ...,
    ns_steps: int = ...,
    ns_dtype: str = ...,
) -> Tensor: ...


@overload
def orthogonalize(
    x: Sequence[Tensor],
    *,
    ns_method: str | Sequence[Sequence[float]] = ...,
    ns_steps: int = ...,
    ns_dtype: str = ...,
) -> list[Tensor]: ...


@torch.no_grad()
def orthogonalize(
    x: Tensor | Sequence[Tensor],
    *,
    ns_method: str | Sequence[Sequence[float]] = "polar_express",
    ns_steps: int = 5,
    ns_dtype: str = "auto",
) -> Tensor | list[Tensor]:
    """Replace each matrix by its approximate polar factor, the nearest semi-orthogonal matrix.

    No schedule makes singular values exactly 1; ``polar_express`` lands them in [0.86, 1.14].

    Args:
        x: (..., M, N), a list of such tensors, or a DTensor with any Shard or Replicate placements.
            Leading dims are a batch of independent matrices. Not modified.
        ns_method: Name of a schedule or a list of (a, b, c) triples.
        ns_steps: Number of iterations, in the schedule's range.
        ns_dtype: ``auto`` (float16 on CUDA, float32 on CPU), float16, bfloat16, float32 or float64.

    Returns:
        Same shape, dtype, device and placements as ``x``; a list for a list.

    Raises:
        ValueError: Unknown schedule or dtype, a step count out of range, fewer than two dims.
        TypeError: Not a float tensor.
        NotImplementedError: A DTensor with a ``Partial`` placement.

    Collective: for a DTensor all ranks of its mesh; every rank then computes the whole matrix.
    """
    if not isinstance(x, Tensor):
        return [
            orthogonalize(item, ns_method=ns_method, ns_steps=ns_steps, ns_dtype=ns_dtype)
            for item in x
        ]
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
