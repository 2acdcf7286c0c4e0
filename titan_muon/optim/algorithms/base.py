"""What an algorithm is, and the registry of algorithms by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from titan_muon.optim.options import MATRIX_OPTIONS, Option, check_values, nearest

__all__ = [
    "Algorithm",
    "Buffer",
    "ElementwiseAlgorithm",
    "MatrixAlgorithm",
    "Polar",
    "algorithm_names",
    "all_option_names",
    "check_options",
    "get_algorithm",
    "register_algorithm",
]

Polar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Buffer:
    """One state tensor that an algorithm keeps for each parameter.

    Args:
        name: Key in the optimizer state, and so in checkpoints.
        like: ``"grad"``: the parameter's shape; ``"rows"``: one value a row, ``(..., M, 1)``.
        signed: Whether values may be negative. Quantised state has twice the levels where not.
    """

    name: str
    like: Literal["grad", "rows"]
    signed: bool = True

    @property
    def by_row(self) -> bool:
        """Whether the buffer holds one value a matrix row."""
        return self.like == "rows"


class Algorithm(ABC):
    """A named update rule with options; subclasses hold math only, on plain tensors."""

    name: ClassVar[str]
    title: ClassVar[str]
    options: ClassVar[Mapping[str, Option]]

    @property
    def is_matrix(self) -> bool:
        """Whether the algorithm works on whole matrices (the Muon family)."""
        return isinstance(self, MatrixAlgorithm)


class MatrixAlgorithm(Algorithm):
    """An algorithm of the Muon family: a rule for the orthogonalized update of a whole matrix.

    The optimizer keeps ``momentum_buffer``, orthogonalizes, scales and writes; a subclass states
    what else it remembers (``buffers``), what it does to the orthogonalized update, and, if it
    overrides ``orthogonalize``, what is orthogonalized.
    """

    options = MATRIX_OPTIONS
    buffers: ClassVar[tuple[Buffer, ...]] = ()

    @property
    def reads_directions(self) -> bool:
        """Whether ``orthogonalize`` is overridden: directions then keep the dtype of the state."""
        return type(self).orthogonalize is not MatrixAlgorithm.orthogonalize

    def orthogonalize(self, directions: Tensor, polar: Polar, options: Mapping[str, Any]) -> Tensor:
        """Return the orthogonalized directions.

        Args:
            directions: (B, M, N), whole matrices, each times some positive factor. May be modified.
            polar: Orthogonalizes (B, M, N) of any float dtype and any size as the group's
                ``ns_method``, ``ns_steps`` and ``ns_dtype`` say, into a new tensor.
            options: The param group.
        """
        return polar(directions)

    def orthogonalizations(self, rows: int, columns: int, options: Mapping[str, Any]) -> int:
        """Return how often ``orthogonalize`` calls ``polar``, by which work is shared out."""
        return 1

    def update(
        self, update: Tensor, buffers: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Tensor:
        """Return the update that is scaled and written.

        Args:
            update: (B, M, N), orthogonalized whole matrices. May be modified and returned.
            buffers: This algorithm's buffers by name, (B, M, N) or (B, M, 1); modified in place.
            options: The param group.
        """
        return update


class ElementwiseAlgorithm(Algorithm):
    """An algorithm that treats every element alone, so shards are stepped where they lie."""

    @abstractmethod
    def create_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the zero state of one parameter (a DTensor's state is a DTensor)."""

    @abstractmethod
    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Update local shards and their local state in place."""

    def step_if(
        self,
        take: Tensor,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Do what :meth:`step` does, or nothing, as the device says; the host does not wait.

        Args:
            take: 0-d, 0 where nothing may change.
            params, grads, states, group: As for :meth:`step`.
        """
        # One parameter at a time: what it was is kept until it is known that it may change.
        for param, grad, state in zip(params, grads, states, strict=True):
            live = [param, *state.values()]
            before = [tensor.clone() for tensor in live]
            self.step([param], [grad], [state], group)
            for tensor, old in zip(live, before, strict=True):
                tensor.copy_(torch.where(take.to(tensor.device) > 0, tensor, old))


_REGISTRY: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm available by name in param groups, TOML and checkpoints.

    Args:
        algorithm: Instance with ``name`` (lower case), ``title`` and ``options``.

    Raises:
        ValueError: Name or title is taken by another class, the name is not lower case, an option
            that the optimizer itself reads is missing, or a buffer's name is taken.
        TypeError: Not an instance of either kind, ``name`` or ``title`` is missing, an option
            is not an :class:`Option`, or a buffer not a :class:`Buffer` of a known kind.
    """
    if not isinstance(algorithm, MatrixAlgorithm | ElementwiseAlgorithm):
        raise TypeError(
            f"register_algorithm takes an instance of a subclass of MatrixAlgorithm or "
            f"ElementwiseAlgorithm, got {algorithm!r}"
        )
    for attribute in ("name", "title"):
        if not isinstance(getattr(algorithm, attribute, None), str):
            raise TypeError(f"{type(algorithm).__name__}: set {attribute} to a string")
    name = algorithm.name
    if not name or name != name.lower():
        raise ValueError(f"algorithm name {name!r} must be lower case and not empty")
    _check_contract(algorithm)
    for spelling in (name, algorithm.title):
        known = _find(spelling)
        if known is not None and _path(known) != _path(algorithm):
            raise ValueError(
                f"an algorithm named {spelling!r} is registered already: {_path(known)}"
            )
    _REGISTRY[name] = algorithm
    return algorithm


def _check_contract(algorithm: Algorithm) -> None:
    name, is_matrix = algorithm.name, isinstance(algorithm, MatrixAlgorithm)
    for key, option in algorithm.options.items():
        if not isinstance(option, Option):
            raise TypeError(f"{name}: option {key!r} must be an Option, got {type(option)}")
    needed = set(MATRIX_OPTIONS) if is_matrix else {"lr", "weight_decay"}
    missing = sorted(needed - set(algorithm.options))
    if missing:
        start = "MATRIX_OPTIONS" if is_matrix else "COMMON_OPTIONS"
        raise ValueError(
            f"{name}: options lacks {', '.join(missing)}; write options = {{**{start}, ...}}"
        )
    buffers = algorithm.buffers if isinstance(algorithm, MatrixAlgorithm) else ()
    for buffer in buffers:
        if not isinstance(buffer, Buffer) or buffer.like not in ("grad", "rows"):
            raise TypeError(
                f"{name}: buffers holds {buffer!r}; each must be Buffer(name, like), like being "
                "'grad' or 'rows'"
            )
    names = [buffer.name for buffer in buffers]
    if "momentum_buffer" in names or len(set(names)) < len(names):
        raise ValueError(f"{name}: buffers {names} repeat a name; momentum_buffer is taken")


def _path(algorithm: Algorithm) -> tuple[str, str]:
    """Name a class by its place, so that running its definition again replaces it."""
    return type(algorithm).__module__, type(algorithm).__qualname__


def _find(name: str) -> Algorithm | None:
    wanted = name.lower()
    if wanted in _REGISTRY:
        return _REGISTRY[wanted]
    return next((a for a in _REGISTRY.values() if a.title.lower() == wanted), None)


def get_algorithm(name: str) -> Algorithm:
    """Return the algorithm of that name or title, in any letter case.

    Raises:
        ValueError: No such algorithm; lists all names and the nearest one.
    """
    algorithm = _find(name) if isinstance(name, str) else None
    if algorithm is None:
        names = ", ".join(a.title for a in _REGISTRY.values())
        hint = nearest(name, _REGISTRY) if isinstance(name, str) else "."
        raise ValueError(f"unknown algorithm {name!r}{hint} Known: {names}.")
    return algorithm


def algorithm_names() -> list[str]:
    """Return the names of all registered algorithms, sorted."""
    return sorted(_REGISTRY)


def all_option_names() -> set[str]:
    """Return every option name that some registered algorithm knows."""
    return {key for algorithm in _REGISTRY.values() for key in algorithm.options}


def check_options(algorithm: str, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse unknown options and values out of range.

    An option that only another algorithm knows passes, if that one allows its value: the same
    configuration can be run with several algorithms.

    Args:
        algorithm: Name of the algorithm.
        options: Explicit options by name.
        where: Prefix of the message.

    Raises:
        ValueError: Unknown name (with the nearest one and the list) or value out of range.
    """
    chosen = get_algorithm(algorithm)
    known = all_option_names()
    for key in options:
        if key not in known:
            allowed = ", ".join(sorted(chosen.options))
            raise ValueError(
                f"{where}: {key} is not an option of {chosen.title}{nearest(key, known)} "
                f"Options: {allowed}."
            )
    others = {key: option for other in _REGISTRY.values() for key, option in other.options.items()}
    check_values({**others, **chosen.options}, options, where=where)
