"""Every optimizer option: default, allowed values, meaning, and whether a checkpoint keeps it."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from titan_muon.orthogonalization import DTYPES

__all__ = [
    "ADAM_OPTIONS",
    "BETA2",
    "COMMON_OPTIONS",
    "MATRIX_OPTIONS",
    "PP_BETA",
    "PP_ITERATIONS",
    "QUANTIZED",
    "Option",
    "check_values",
    "from_saved",
    "nearest",
    "resolve_state_dtype",
    "to_saved",
]

Check = Callable[[Any], bool]

_JSON_STARTS = ("[", "{", '"')


@dataclass(frozen=True)
class Option:
    """One option of an algorithm.

    Args:
        default: Value used where neither the group nor the constructor gives one.
        allowed: What a valid value is, in words; printed in errors and in the option table.
        check: True for a valid value.
        meaning: One line for the option table.
        saved: Whether the value enters a checkpoint: true for what changes the mathematics.
    """

    default: Any
    allowed: str
    check: Check
    meaning: str
    saved: bool = True


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest known spelling, else a full stop."""
    by_lower = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f", did you mean {by_lower[match[0]]!r}?" if match else "."


def check_values(options: Mapping[str, Option], values: Mapping[str, Any], *, where: str) -> None:
    """Refuse a value that its option does not allow.

    Args:
        options: The options of the algorithm at hand.
        values: Explicit values; keys outside ``options`` are skipped.
        where: Prefix of the message, for example ``"Muon: param group 0"``.

    Raises:
        ValueError: Names the option, the value and what is allowed.
    """
    for key, value in values.items():
        option = options.get(key)
        if option is None:
            continue
        try:
            valid = option.check(value)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"{where}: {key} = {value!r} is not allowed; use {option.allowed}.")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _number(low: float, high: float = float("inf"), *, closed: bool = False) -> Check:
    def check(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low <= value < high or (closed and value == high)

    return check


def _lr(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.ndim or not value.is_floating_point():
            return False
        # Reading it from a device would make the host wait; a fake tensor has no value.
        readable = type(value) is torch.Tensor and value.device.type == "cpu"
        return not readable or _number(0.0)(value.item())
    return _number(0.0)(value)


def _positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _non_negative_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _optional_positive_int(value: Any) -> bool:
    return value is None or _positive_int(value)


def _choice(*names: str) -> tuple[str, Check]:
    return "one of " + ", ".join(repr(n) for n in names), lambda value: value in names


def _betas(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_number(0.0, 1.0)(b) for b in value)
    )


def _ns_method(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return len(value) > 0 and all(
        len(triple) == 3 and all(_number(-1e6, 1e6)(c) for c in triple) for triple in value
    )


def _split(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return "kind" in value
    return len(value) > 0 and all(_positive_int(r) for r in value)


def to_saved(value: Any) -> Any:
    """Return the checkpoint form of a group value: containers of containers become JSON text.

    The distributed checkpoint flattens nested containers into keys of their own, and such a key
    would be missing from a checkpoint written with a plain value.
    """
    nested = isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and not all(isinstance(v, float) for v in value)
    )
    # A string that could be taken for JSON is written as JSON too.
    ambiguous = isinstance(value, str) and value[:1] in _JSON_STARTS
    return json.dumps(value) if nested or ambiguous else value


def from_saved(value: Any) -> Any:
    """Invert :func:`to_saved`; a tuple may come back as a list."""
    if isinstance(value, str) and value[:1] in _JSON_STARTS:
        return json.loads(value)
    return value


def resolve_state_dtype(state_dtype: str, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a step reads and writes state: float32 where it is quantised.

    ``auto`` is float32, float64 for float64 parameters.
    """
    if state_dtype in QUANTIZED:
        return torch.float32
    if state_dtype == "auto":
        return torch.float64 if param_dtype == torch.float64 else torch.float32
    return getattr(torch, state_dtype)


ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped", "match_param_rms", "none")
NS_DTYPES = ("auto", *DTYPES)
QUANTIZED = ("int8", "int4", "float8")
STATE_DTYPES = ("auto", "float32", "bfloat16", *QUANTIZED)

COMMON_OPTIONS: dict[str, Option] = {
    "lr": Option(1e-3, "a number >= 0 or a 0-d float tensor", _lr, "learning rate"),
    "weight_decay": Option(0.1, "a number >= 0", _number(0.0), "decay, multiplied by the plain lr"),
    "maximize": Option(False, "true or false", _is_bool, "ascend instead of descend"),
    "nonfinite": Option(
        "propagate",
        *_choice("propagate", "skip", "error"),
        "what a non-finite gradient does; the same in all groups",
        saved=False,
    ),
    "state_dtype": Option(
        "auto",
        *_choice(*STATE_DTYPES),
        "dtype of the state; auto: float32, float64 for float64 parameters; see Memory",
        saved=False,
    ),
    "stochastic_rounding": Option(
        False,
        "true or false",
        _is_bool,
        "round bfloat16 weights up or down at random, each as often as it is near",
        saved=False,
    ),
    "rounding_seed": Option(
        0, "an integer >= 0", _non_negative_int, "seed of stochastic_rounding", saved=False
    ),
}

MATRIX_OPTIONS: dict[str, Option] = {
    **COMMON_OPTIONS,
    "cautious_weight_decay": Option(
        True, "true or false", _is_bool, "decay only where update and weight agree in sign"
    ),
    "momentum": Option(0.95, "a number in [0, 1)", _number(0.0, 1.0), "EMA factor of the gradient"),
    "nesterov": Option(True, "true or false", _is_bool, "look ahead by one EMA step"),
    "ns_method": Option(
        "polar_express",
        "'polar_express', 'newton_schulz', 'you', or a list of (a, b, c) triples",
        _ns_method,
        "polynomial schedule of the orthogonalization",
    ),
    "ns_steps": Option(
        None,
        "an integer in the schedule's range",
        _optional_positive_int,
        "number of iterations; 5 of a named schedule, else one a triple",
    ),
    "ns_dtype": Option(
        "auto",
        *_choice(*NS_DTYPES),
        "dtype of the iteration; auto: float16 on CUDA, float32 on CPU, float64 for float64",
        saved=False,
    ),
    "adjust_lr_fn": Option(
        "original", *_choice(*ADJUST_LR_FNS), "how a matrix's shape scales its lr"
    ),
    "flatten": Option(
        False, "true or false", _is_bool, "one matrix (dim 0, all others): convolutions"
    ),
    "split": Option(
        None,
        "a list of row counts, or a table with kind = 'blocks' | 'strided' | 'interleaved_qkv' | "
        "'fused_dim'",
        _split,
        "rows of a fused weight that are matrices of their own",
    ),
    "wire_dtype": Option(
        "float16",
        *_choice("float16", "bfloat16", "float32"),
        "dtype in which directions and updates travel; float16 is scaled by a power of two",
        saved=False,
    ),
    "max_stage_bytes": Option(
        1 << 30,
        "an integer >= 1",
        _positive_int,
        "most work memory of one stage in bytes, momentum not counted; one matrix always fits",
        saved=False,
    ),
    "batch_size": Option(
        None,
        "an integer >= 1, or none",
        _optional_positive_int,
        "most matrices in one launch; 1 is the per-matrix reference loop",
        saved=False,
    ),
}

ADAM_OPTIONS: dict[str, Option] = {
    **COMMON_OPTIONS,
    "betas": Option((0.9, 0.95), "two numbers in [0, 1)", _betas, "EMA factors of both moments"),
    "eps": Option(1e-8, "a number >= 0", _number(0.0), "added to the root of the second moment"),
    "fused": Option(
        None,
        "true, false or none",
        lambda v: v is None or _is_bool(v),
        "torch's fused kernel; none: on GPUs, unless foreach",
        saved=False,
    ),
    "foreach": Option(
        None,
        "true, false or none",
        lambda v: v is None or _is_bool(v),
        "torch's foreach kernel",
        saved=False,
    ),
}

BETA2 = Option(
    0.95, "a number in [0, 1)", _number(0.0, 1.0), "EMA factor of the update's second moment"
)
PP_ITERATIONS = Option(
    2,
    "an integer from 1 to 100",
    lambda v: _positive_int(v) and v <= 100,
    "orthogonalizations by which a tall matrix is balanced",
)
PP_BETA = Option(
    0.5,
    "a number in (0, 1]",
    lambda v: v > 0 and _number(0.0, 1.0, closed=True)(v),
    "exponent of each balancing of rows; lower is more cautious",
)
