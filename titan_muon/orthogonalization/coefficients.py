"""Named polynomial schedules: numbers, sources, step ranges, and Gram restarts.

One step of a schedule maps every singular value ``s`` of a matrix to ``a*s + b*s**3 + c*s**5``.
No schedule here makes singular values exactly 1: each lands them in a band around 1, stated with
its numbers. :func:`titan_muon.orthogonalization.polar.polar_factor` is exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Triple = tuple[float, float, float]

DEFAULT_STEPS = 5
# Steps between two restarts of the Gram evaluation. Rounding of the Gram matrix grows with the
# slopes `a` of the steps since it was formed. Five steps in float16, 256 x 640, relative error for
# restarts before step 2 / 3 / 4 / never, on condition 1e6: polar_express 5e-2 / 2e-2 / 1e-1 / 6e-1,
# newton_schulz 2e-2 / 9e-3 / 2e-2 / 1e-1, you 2e-2 / 9e-3 / 2e-2 / 1e-1; on gaussian matrices the
# choice hardly matters.
_RESTART_EVERY = 3


@dataclass(frozen=True)
class Schedule:
    """A resolved iteration: what one call of the orthogonalizer runs.

    Attributes:
        name: Name in :data:`SCHEDULES`, or ``"custom"``.
        triples: (a, b, c) of each step, in order.
        safety: The input is divided by ``safety`` times its Frobenius norm.
        restarts: Step indices, ascending and above 0, before which the Gram evaluation forms the
            matrix and its Gram matrix anew, so that rounding does not build up.
    """

    name: str
    triples: tuple[Triple, ...]
    safety: float
    restarts: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleFamily:
    """A named source of schedules.

    Attributes:
        triples: (a, b, c) of each step; the last one repeats up to ``max_steps``.
        safety: See :class:`Schedule`.
        max_steps: Largest number of steps.
        band: Where five steps land singular values between 0.002 and 1 of the normalised matrix.
        source: Where the numbers come from.
    """

    triples: tuple[Triple, ...]
    safety: float
    max_steps: int
    band: tuple[float, float]
    source: str


SCHEDULES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        "polar_express": ScheduleFamily(
            triples=(
                (8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
            ),
            safety=1.02,
            max_steps=5,
            band=(0.858, 1.142),
            source="Amsel, Persson, Musco, Gower: The Polar Express, arXiv:2505.16932",
        ),
        "newton_schulz": ScheduleFamily(
            triples=((3.4445, -4.7750, 2.0315),),
            safety=1.0,
            max_steps=10,
            band=(0.68, 1.21),
            source="Jordan: Muon, https://kellerjordan.github.io/posts/muon/",
        ),
        "you": ScheduleFamily(
            triples=(
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ),
            safety=1.0,
            max_steps=5,
            band=(0.85, 1.15),
            source="Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534; "
            "used by KellerJordan/modded-nanogpt",
        ),
    }
)


def schedule_names() -> tuple[str, ...]:
    """Return the names that :func:`resolve_schedule` knows."""
    return tuple(SCHEDULES)


def resolve_schedule(method: str | Sequence[Sequence[float]], steps: int | None = None) -> Schedule:
    """Turn a schedule's name, or a user's own triples, into the steps to run.

    Args:
        method: A name from :func:`schedule_names`, or a list of (a, b, c), one per step.
        steps: Number of steps; None means 5 of a named schedule, and all triples of a list.

    Returns:
        The schedule. Hashable.

    Raises:
        ValueError: An unknown name, a step count outside the schedule's range or other than the
            number of triples, or a list that is not made of finite triples.
        TypeError: ``method`` or ``steps`` is of another type.
    """
    if not isinstance(method, str):
        triples = _custom_triples(method)
        if steps not in (None, len(triples)):
            raise ValueError(
                f"ns_steps = {steps!r}, but ns_method has {len(triples)} triples, one a step; "
                "leave ns_steps out, or list as many triples."
            )
        return Schedule("custom", triples, 1.0, _restarts(len(triples)))
    if method not in SCHEDULES:
        raise ValueError(
            f"ns_method {method!r} is unknown. Use one of {', '.join(SCHEDULES)}, "
            "or a list of (a, b, c) triples, one per step."
        )
    family = SCHEDULES[method]
    steps = DEFAULT_STEPS if steps is None else steps
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(
            f"ns_steps must be an integer, got {steps!r} of type {type(steps).__name__}."
        )
    if not 1 <= steps <= family.max_steps:
        raise ValueError(
            f"ns_steps must be in 1..{family.max_steps} for ns_method {method!r}, got {steps}."
        )
    last = len(family.triples) - 1
    triples = tuple(family.triples[min(i, last)] for i in range(steps))
    return Schedule(method, triples, family.safety, _restarts(steps))


def _restarts(steps: int) -> tuple[int, ...]:
    return tuple(range(_RESTART_EVERY, steps, _RESTART_EVERY))


def _custom_triples(method: Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    if not isinstance(method, Sequence) or isinstance(method, bytes):
        raise TypeError(
            f"ns_method must be a name ({', '.join(SCHEDULES)}) or a list of (a, b, c) triples, "
            f"got {method!r} of type {type(method).__name__}."
        )
    if not method:
        raise ValueError("ns_method is an empty list; give one (a, b, c) triple per step.")
    return tuple(_triple(index, item) for index, item in enumerate(method))


def _triple(index: int, item: Sequence[float]) -> Triple:
    message = f"ns_method[{index}] must be three finite numbers (a, b, c), got {item!r}."
    if not isinstance(item, Sequence) or isinstance(item, str | bytes) or len(item) != 3:
        raise ValueError(message)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in item):
        raise ValueError(message)
    a, b, c = (float(value) for value in item)
    if not all(math.isfinite(value) for value in (a, b, c)):
        raise ValueError(message)
    return (a, b, c)
