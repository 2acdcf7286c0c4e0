"""From an arbitrary batch of matrices to its orthogonalized batch: the one entry of the package."""

import math

import torch
from torch import Tensor

from titan_muon.kernels import Operations, select_operations
from titan_muon.orthogonalization import gram_newton_schulz, newton_schulz
from titan_muon.orthogonalization.coefficients import Schedule

EVALUATIONS = ("auto", "standard", "gram")

# In float16 it reaches spectral norms of 11 with 8 to 24 rows (condition 1e6, power law); from here
# on it stays within twice the error of the standard evaluation.
_GRAM_ROWS = 64

# By the names that options have for them: those of iterations, weights and gradients.
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def resolve_dtype(ns_dtype: str, device: torch.device, input_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype an iteration runs in.

    Args:
        ns_dtype: ``"auto"`` or the name of a float dtype. ``"auto"`` is float16 on CUDA (inputs are
            normalised, so its range is enough, and it is eight times finer than bfloat16 at the
            same speed) and float32 elsewhere; a float64 input stays float64.
        device: Where the iteration runs.
        input_dtype: Dtype of the matrices.

    Raises:
        ValueError: ``ns_dtype`` is none of these names.
    """
    if ns_dtype == "auto":
        if input_dtype == torch.float64:
            return torch.float64
        return torch.float16 if device.type == "cuda" else torch.float32
    if ns_dtype not in DTYPES:
        raise ValueError(f"ns_dtype {ns_dtype!r} is unknown. Use one of auto, {', '.join(DTYPES)}.")
    return DTYPES[ns_dtype]


@torch.no_grad()
def orthogonalize_batch(
    x: Tensor,
    schedule: Schedule,
    *,
    dtype: torch.dtype,
    evaluation: str = "auto",
    batch_size: int | None = None,
) -> Tensor:
    """Replace every matrix of a batch by its approximate polar factor.

    Args:
        x: (..., M, N), a plain tensor of any float dtype and strides. Not modified.
        schedule: Result of :func:`titan_muon.orthogonalization.resolve_schedule`.
        dtype: Dtype of the iteration and of the result. The norm is taken in float32 (float64 if
            either dtype is) before any cast down, so that the scale of ``x`` does not matter.
            float32 products on CUDA follow torch's own TF32 switch.
        evaluation: ``"standard"``, ``"gram"``, or ``"auto"``: the cheaper one that is accurate.
        batch_size: Most matrices in one launch; None for no limit.

    Returns:
        Same shape as ``x``, in ``dtype``. A zero matrix gives zeros; a NaN or an infinity makes its
        own matrix NaN and no other.

    Raises:
        ValueError: A bad shape, ``evaluation`` or ``batch_size``.
        TypeError: ``x`` is a DTensor or not a float tensor.
    """
    _check(x, evaluation, batch_size)
    rows, columns = x.shape[-2:]
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return result
    source, target = x.reshape(-1, rows, columns), result.view(-1, rows, columns)
    if rows > columns:
        # The products do not care about strides, so a tall matrix runs as a transposed view.
        source, target = source.mT, target.mT
    ops = select_operations(min(rows, columns), dtype, x.device)
    chosen, _ = choose_evaluation(rows, columns, dtype, schedule, ops, evaluation)
    size = len(source) if batch_size is None else batch_size
    for start in range(0, len(source), size):
        part = slice(start, start + size)
        _run(source[part], target[part], schedule, chosen, ops)
    return result


@torch.no_grad()
def orthogonalize_normalized(
    x: Tensor, schedule: Schedule, *, evaluation: str = "auto", batch_size: int | None = None
) -> Tensor:
    """Orthogonalize matrices that are brought to their starting size already.

    Args:
        x: (B, M, N), contiguous, in the dtype of the iteration: each matrix has
            :func:`starting_norm` as its Frobenius norm. Overwritten.
        schedule: The steps.
        evaluation: As for :func:`orthogonalize_batch`.
        batch_size: Most matrices in one launch; None for no limit.

    Returns:
        (B, M, N) in the dtype of ``x``; maybe ``x`` itself.
    """
    rows, columns = x.shape[-2:]
    ops = select_operations(min(rows, columns), x.dtype, x.device)
    chosen, _ = choose_evaluation(rows, columns, x.dtype, schedule, ops, evaluation)
    spare = torch.empty_like(x)
    source, target = (x.mT, spare.mT) if rows > columns else (x, spare)
    size = max(1, len(x)) if batch_size is None else batch_size
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        _iterate(source[part], target[part], schedule, chosen, ops)
    return x if _writes(schedule, chosen) % 2 == 0 else spare


def starting_norm(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    schedule: Schedule,
    evaluation: str = "auto",
) -> float:
    """Return the Frobenius norm with which an iteration starts.

    Args:
        rows: M.
        columns: N.
        dtype: Dtype of the iteration.
        device: Where it runs.
        schedule: The steps.
        evaluation: As for :func:`orthogonalize_batch`.
    """
    ops = select_operations(min(rows, columns), dtype, device)
    chosen, _ = choose_evaluation(rows, columns, dtype, schedule, ops, evaluation)
    return _enlargement(min(rows, columns), dtype, chosen) / schedule.safety


def bounded_norms(norms: Tensor, largest: Tensor, root: Tensor | float) -> Tensor:
    """Return norms; where their squares have left the dtype's range, the largest they can be.

    Squares leave it long before their numbers do: a momentum without gradients falls below 1e-23 in
    a thousand steps. Too small a start costs accuracy where too large a one diverges.

    Args:
        norms: Roots of sums of squares.
        largest: Largest magnitudes, broadcast against ``norms``.
        root: Root of the number of elements, likewise.
    """
    bound = largest * root
    norms = torch.minimum(norms, bound)
    # Far above the smallest square, since many elements share the sum. A NaN stays one.
    return torch.where(norms <= torch.finfo(norms.dtype).tiny ** 0.375, bound, norms)


def choose_evaluation(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    schedule: Schedule,
    ops: Operations,
    evaluation: str = "auto",
) -> tuple[str, str]:
    """Pick the evaluation of a schedule for one shape.

    Returns:
        ``"standard"`` or ``"gram"``, and one sentence that says why.

    Raises:
        ValueError: ``evaluation="gram"`` in bfloat16.
    """
    if evaluation == "gram" and dtype == torch.bfloat16:
        raise ValueError(
            "evaluation='gram' is not usable in bfloat16: its rounding errors exceed the result on "
            "ill-conditioned matrices. Use ns_dtype float16 or float32, or evaluation='standard'."
        )
    if evaluation != "auto":
        return evaluation, "asked for"
    if dtype == torch.bfloat16:
        return "standard", "the Gram evaluation is not accurate in bfloat16"
    if dtype == torch.float16 and min(rows, columns) < _GRAM_ROWS:
        return "standard", f"the Gram evaluation is not accurate in float16 below {_GRAM_ROWS} rows"
    standard = cost(rows, columns, schedule, "standard", ops.half_cost)
    gram = cost(rows, columns, schedule, "gram", ops.half_cost)
    chosen = "gram" if gram < standard else "standard"
    return chosen, f"{standard:.3g} FLOP standard, {gram:.3g} FLOP gram"


def cost(rows: int, columns: int, schedule: Schedule, evaluation: str, half_cost: bool) -> float:
    """Return the floating-point operations for one matrix.

    Args:
        rows: M.
        columns: N; which of the two is longer does not matter.
        schedule: The steps.
        evaluation: ``"standard"`` or ``"gram"``.
        half_cost: True if symmetric products compute one triangle only.
    """
    m, n = sorted((rows, columns))
    half = 0.5 if half_cost else 1.0
    steps, segments = len(schedule.triples), gram_newton_schulz.writes(schedule)
    if evaluation == "standard":
        return steps * (half * (2 * m * m * n + 2 * m**3) + 2 * m * m * n)
    squares = 4 * steps - 3 * segments
    return segments * (half + 1) * 2 * m * m * n + half * squares * 2 * m**3


def work_bytes(rows: int, columns: int, dtype: torch.dtype, evaluation: str) -> int:
    """Return the bytes of work buffers one matrix needs beside its result."""
    m, n = sorted((rows, columns))
    squares = 2 if evaluation == "standard" else 4
    return dtype.itemsize * (m * n + squares * m * m)


def explain(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, schedule: Schedule
) -> str:
    """Say which evaluation and which kernels a batch would run with, and why.

    Args:
        shape: (..., M, N).
        dtype: Dtype of the iteration.
        device: Where it would run; nothing is launched there.
        schedule: The steps.
    """
    rows, columns = shape[-2:]
    ops = select_operations(min(rows, columns), dtype, device)
    chosen, why = choose_evaluation(rows, columns, dtype, schedule, ops)
    restarts = f", restarts before steps {list(schedule.restarts)}" if chosen == "gram" else ""
    return (
        f"{schedule.name}, {len(schedule.triples)} steps in {str(dtype).removeprefix('torch.')}: "
        f"{chosen} evaluation{restarts} ({why}); {ops.name} products ({ops.why})"
    )


def _run(source: Tensor, target: Tensor, schedule: Schedule, chosen: str, ops: Operations) -> None:
    spare = torch.empty_like(target)
    # The iterate moves between two buffers; start in the one from which it ends in the result.
    x, spare = (target, spare) if _writes(schedule, chosen) % 2 == 0 else (spare, target)
    enlargement = _enlargement(target.shape[1], target.dtype, chosen)
    _normalize(source, schedule.safety / enlargement, ops, out=x)
    _iterate(x, spare, schedule, chosen, ops)


def _iterate(x: Tensor, spare: Tensor, schedule: Schedule, chosen: str, ops: Operations) -> None:
    if chosen == "gram":
        enlargement = _enlargement(x.shape[1], x.dtype, chosen)
        gram_newton_schulz.iterate(x, spare, schedule, ops, enlargement)
    else:
        newton_schulz.iterate(x, spare, schedule.triples, ops)


def _writes(schedule: Schedule, chosen: str) -> int:
    """Return how often the iterate moves from one buffer to the other."""
    if chosen == "gram":
        return gram_newton_schulz.writes(schedule)
    return newton_schulz.writes(len(schedule.triples))


def _enlargement(rows: int, dtype: torch.dtype, chosen: str) -> float:
    return gram_newton_schulz.input_scale(rows, dtype) if chosen == "gram" else 1.0


def _normalize(x: Tensor, factor: float, ops: Operations, *, out: Tensor) -> None:
    """Write ``x / (factor * norm)`` of each matrix."""
    divisor = torch.float64 if torch.float64 in (x.dtype, out.dtype) else torch.float32
    # float64 costs nothing on a CPU; on a GPU torch would make a copy of the matrices.
    norm = _norms(x, torch.float64 if x.device.type == "cpu" else divisor)
    # The smallest normal number turns 0/0 into 0 and is far below any norm that matters.
    norm = norm.mul_(factor).to(divisor).clamp_min_(torch.finfo(divisor).tiny)
    ops.divide(x, norm, out=out)


def _norms(x: Tensor, accumulate: torch.dtype) -> Tensor:
    """Return the Frobenius norms, or bounds of them as :func:`bounded_norms` does."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accumulate)
    if torch.finfo(x.dtype).tiny > torch.finfo(accumulate).tiny or not x.numel():
        return norm
    largest = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1), keepdim=True).to(accumulate)
    return bounded_norms(norm, largest, (x.shape[-2] * x.shape[-1]) ** 0.5)


def _check(x: Tensor, evaluation: str, batch_size: int | None) -> None:
    if hasattr(x, "device_mesh"):
        raise TypeError("orthogonalize_batch takes plain tensors, got a DTensor; gather it first.")
    if not x.is_floating_point():
        raise TypeError(f"orthogonalize_batch needs a float tensor, got {x.dtype}.")
    if x.ndim < 2:
        raise ValueError(f"orthogonalize_batch needs shape (..., M, N), got {tuple(x.shape)}.")
    if evaluation not in EVALUATIONS:
        raise ValueError(
            f"evaluation {evaluation!r} is unknown. Use one of {', '.join(EVALUATIONS)}."
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for no limit, got {batch_size}.")
