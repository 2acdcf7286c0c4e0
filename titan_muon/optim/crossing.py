"""Which state a parameter starts from where a checkpoint was written by another algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from titan_muon.optim.state import MOMENTUM

__all__ = ["MOMENTUM_SOURCES", "MomentumSource", "StateTensor", "choose_sources"]

MomentumSource = Literal["zeros", "exp_avg"]
MOMENTUM_SOURCES: tuple[MomentumSource, ...] = ("zeros", "exp_avg")
_EXP_AVG = "exp_avg"
_ADAM = frozenset({_EXP_AVG, "exp_avg_sq", "step"})


@dataclass(frozen=True)
class StateTensor:
    """Global shape and dtype of a state tensor, live or saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def choose_sources(
    name: str,
    needed: Mapping[str, StateTensor],
    saved: Mapping[str, StateTensor],
    momentum_from: MomentumSource,
) -> tuple[dict[str, str | None], list[str]]:
    """Decide from which saved tensor each state tensor of one parameter is loaded.

    Args:
        name: The parameter, for errors.
        needed: Its live state.
        saved: What the checkpoint holds of it.
        momentum_from: Where the momentum starts if the checkpoint has AdamW's state.

    Returns:
        The saved key for each needed one, None for zeros; and a phrase for each difference.

    Raises:
        ValueError: The checkpoint has no state of the parameter, lacks a part of it, or has it in
            another shape or kind of dtype. Names key, shapes and dtypes.
    """
    if not needed:
        return {}, []
    if not saved:
        raise ValueError(
            f"the checkpoint has no optimizer state of {name}; start all of it anew with "
            "checkpoint.exclude_from_loading = ['optimizer']."
        )
    if set(saved) == set(needed) and MOMENTUM not in needed:
        return {key: _same(name, key, needed[key], key, saved[key]) for key in needed}, []
    if MOMENTUM in needed:
        return _matrix_sources(name, needed, saved, momentum_from)
    if MOMENTUM not in saved and not saved.keys() >= _ADAM:
        missing = sorted(set(needed) - set(saved))
        raise ValueError(
            f"{name}: the checkpoint lacks {', '.join(missing)}; it has {', '.join(sorted(saved))}."
        )
    has = MOMENTUM if MOMENTUM in saved else _EXP_AVG
    _check_model(name, needed, saved[has])
    kept = {key: key for key in needed if saved.get(key) == needed[key] and saved.keys() >= _ADAM}
    if set(kept) == set(needed):
        return dict(kept), []
    return dict.fromkeys(needed), [f"{_listed(needed)} start at zero, the checkpoint has {has}"]


def _matrix_sources(
    name: str,
    needed: Mapping[str, StateTensor],
    saved: Mapping[str, StateTensor],
    momentum_from: MomentumSource,
) -> tuple[dict[str, str | None], list[str]]:
    sources: dict[str, str | None] = {}
    notes = []
    if MOMENTUM in saved:
        sources[MOMENTUM] = _same(name, MOMENTUM, needed[MOMENTUM], MOMENTUM, saved[MOMENTUM])
    elif _EXP_AVG in saved:
        # Both are exponential averages of the gradient.
        source = _same(name, MOMENTUM, needed[MOMENTUM], _EXP_AVG, saved[_EXP_AVG])
        sources[MOMENTUM] = source if momentum_from == _EXP_AVG else None
        notes.append(
            f"{MOMENTUM} starts from exp_avg"
            if sources[MOMENTUM]
            else f"{MOMENTUM} starts at zero, the checkpoint has AdamW's exp_avg "
            "(momentum_from = 'exp_avg' would take it)"
        )
    else:
        raise ValueError(
            f"{name}: the checkpoint lacks {MOMENTUM}; it has {', '.join(sorted(saved))}."
        )
    for key in set(needed) - {MOMENTUM}:
        # The momentum fits, so another shape is another algorithm's buffer of that name.
        fits = key in saved and saved[key].shape == needed[key].shape
        sources[key] = key if fits else None
        if not fits:
            has = "has it in another shape" if key in saved else "has none"
            notes.append(f"{key} starts at zero, the checkpoint {has}")
    return sources, notes


def _same(name: str, key: str, needed: StateTensor, source: str, saved: StateTensor) -> str:
    """Return ``source``, which must fit."""
    if saved.shape != needed.shape or saved.dtype.is_floating_point != (
        needed.dtype.is_floating_point
    ):
        raise ValueError(
            f"{name}: {key} is {needed} here, and {source} is {saved} in the checkpoint. Was it "
            "written by another model?"
        )
    return source


def _check_model(name: str, needed: Mapping[str, StateTensor], saved: StateTensor) -> None:
    """Refuse state of another model even where none of it is loaded."""
    if needed.keys() >= _ADAM:
        _same(name, _EXP_AVG, needed[_EXP_AVG], "its counterpart", saved)


def _listed(needed: Mapping[str, StateTensor]) -> str:
    *first, last = sorted(needed)
    return f"{', '.join(first)} and {last}" if first else last
