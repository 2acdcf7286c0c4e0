"""Orthogonalize a batch of whole matrices and say how far the update goes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.kernels import select_operations
from titan_muon.optim.algorithms.base import MatrixAlgorithm
from titan_muon.optim.lr_adjust import lr_factor
from titan_muon.orthogonalization import (
    bounded_norms,
    choose_evaluation,
    cost,
    orthogonalize_batch,
    orthogonalize_normalized,
    resolve_dtype,
    resolve_schedule,
    starting_norm,
    work_bytes,
)

__all__ = ["batch_update", "inverse_norms", "matrix_cost", "stack_dtype", "start_of"]


def batch_update(
    stack: Tensor,
    buffers: Mapping[str, Tensor],
    square_sums: Tensor | None,
    algorithm: MatrixAlgorithm,
    group: Mapping[str, Any],
    *,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """Return the update of a batch and its lengths.

    Args:
        stack: (B, M, N) directions. Overwritten if ``normalized``.
        buffers: State buffers by name, (B, M, N) or (B, M, 1); modified in place.
        square_sums: (B,), sums of squares of the weights for ``match_param_rms``, else None.
        algorithm: What is orthogonalized, and what happens to the update.
        group: The param group.
        normalized: Whether the directions have the norm at which the iteration starts.

    Returns:
        (B, M, N) in the dtype of the iteration, and (B,) in float32 (float64 for float64), the
        factor that the shape of a matrix, and with ``match_param_rms`` its weight, puts on the lr.

    Raises:
        ValueError: The algorithm, which may be a user's, returned something of another shape.
    """
    rows, columns = stack.shape[-2:]
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    dtype = stack_dtype(group, stack.device, stack.dtype)
    batch_size = group["batch_size"]

    def polar(x: Tensor) -> Tensor:
        if normalized:
            return orthogonalize_normalized(x, schedule, batch_size=batch_size)
        return orthogonalize_batch(x, schedule, dtype=dtype, batch_size=batch_size)

    shape = stack.shape
    update = algorithm.orthogonalize(stack, polar, group)
    _check_result(update, shape, algorithm, "orthogonalize")
    update = algorithm.update(update, buffers, group)
    _check_result(update, shape, algorithm, "update")
    factor = lr_factor(group["adjust_lr_fn"], rows, columns)
    if square_sums is not None:
        return update, factor * (square_sums / (rows * columns)).sqrt()
    wide = torch.promote_types(dtype, torch.float32)
    return update, torch.full((len(stack),), factor, dtype=wide, device=stack.device)


def _check_result(result: Any, shape: torch.Size, algorithm: MatrixAlgorithm, method: str) -> None:
    # What is written from it reads as many elements, whatever it holds.
    fits = isinstance(result, Tensor) and result.shape == shape and result.is_floating_point()
    if not fits:
        got = (
            f"{result.dtype} {tuple(result.shape)}"
            if isinstance(result, Tensor)
            else type(result).__name__
        )
        raise ValueError(
            f"{algorithm.title}: {method} returned {got}; it must return a float tensor of shape "
            f"{tuple(shape)}"
        )


def stack_dtype(
    group: Mapping[str, Any], device: torch.device, input_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype in which the matrices of a group are orthogonalized."""
    return resolve_dtype(group["ns_dtype"], device, input_dtype)


def inverse_norms(largest: Tensor, square_sums: Tensor, root: Tensor | float) -> Tensor:
    """Return 1 / norm of matrices, norms as ``bounded_norms`` has them; a zero matrix stays zero.

    Args:
        largest, square_sums: Largest magnitude and sum of squares of each matrix.
        root: Root of the number of elements of each.
    """
    norms = bounded_norms(square_sums.sqrt(), largest, root)
    # The reciprocal is multiplied by the norm at which an iteration starts, at most 32, and 0 by
    # both: neither may overflow.
    return norms.clamp_min_(torch.finfo(norms.dtype).tiny * 2**10).reciprocal_()


def start_of(stack: Tensor, group: Mapping[str, Any]) -> float:
    """Return the norm at which the iteration of a stack (B, M, N) in its own dtype starts."""
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    rows, columns = stack.shape[-2:]
    return starting_norm(rows, columns, stack.dtype, stack.device, schedule)


def matrix_cost(
    rows: int,
    columns: int,
    algorithm: MatrixAlgorithm,
    group: Mapping[str, Any],
    device: torch.device,
    state_dtype: torch.dtype,
) -> tuple[float, int]:
    """Return the FLOPs of one matrix and the bytes it takes while it is computed."""
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    dtype = stack_dtype(group, device, state_dtype)
    ops = select_operations(min(rows, columns), dtype, device)
    evaluation, _ = choose_evaluation(rows, columns, dtype, schedule, ops)
    flops = cost(rows, columns, schedule, evaluation, ops.half_cost)
    flops *= algorithm.orthogonalizations(rows, columns, group)
    # Beside the stack: buffers of its shape; directions that are kept, and one tensor made of them.
    copies = sum(not b.by_row for b in algorithm.buffers) + 2 * algorithm.reads_directions
    wide = torch.promote_types(state_dtype, torch.float32)
    stack = rows * columns * (dtype.itemsize + copies * wide.itemsize)
    return flops, stack + work_bytes(rows, columns, dtype, evaluation)
