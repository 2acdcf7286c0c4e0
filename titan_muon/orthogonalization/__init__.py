"""(..., M, N) to the nearest semi-orthogonal (..., M, N): plain tensors, no state, no messages."""

from titan_muon.orthogonalization.coefficients import (
    SCHEDULES,
    Schedule,
    ScheduleFamily,
    resolve_schedule,
    schedule_names,
)
from titan_muon.orthogonalization.methods import (
    DTYPES,
    bounded_norms,
    choose_evaluation,
    cost,
    explain,
    orthogonalize_batch,
    orthogonalize_normalized,
    resolve_dtype,
    starting_norm,
    work_bytes,
)
from titan_muon.orthogonalization.polar import polar_factor

__all__ = [
    "DTYPES",
    "SCHEDULES",
    "Schedule",
    "ScheduleFamily",
    "bounded_norms",
    "choose_evaluation",
    "cost",
    "explain",
    "orthogonalize_batch",
    "orthogonalize_normalized",
    "polar_factor",
    "resolve_dtype",
    "resolve_schedule",
    "schedule_names",
    "starting_norm",
    "work_bytes",
]
