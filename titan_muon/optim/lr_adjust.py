"""From the shape of a matrix to the factor on its learning rate."""

import math

__all__ = ["lr_factor"]


def lr_factor(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the factor of one matrix.

    Args:
        adjust_lr_fn: ``original``: sqrt(max(1, M/N)), lr is the spectral norm of a step;
            ``match_rms_adamw``: 0.2*sqrt(max(M, N)), lr is about AdamW's;
            ``spectral_unclamped``: sqrt(M/N); ``match_param_rms``: max(1, sqrt(M/N)), to be
            multiplied by the RMS of the weight; ``none``: 1.
        rows: M of the whole matrix (fan-out), never of a shard.
        columns: N of the whole matrix (fan-in).

    Raises:
        ValueError: Unknown name.

    Source: Jordan (original); Liu et al., arXiv:2502.16982 (match_rms_adamw); Bernstein,
        arXiv:2409.20325 (spectral_unclamped).
    """
    if adjust_lr_fn == "original" or adjust_lr_fn == "match_param_rms":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(rows / columns)
    if adjust_lr_fn == "none":
        return 1.0
    raise ValueError(f"unknown adjust_lr_fn {adjust_lr_fn!r}")
