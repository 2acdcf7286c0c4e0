"""Which parameter goes to which algorithm: the default routing, exceptions, and torch's groups."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.routing import Owner, default_route

__all__ = [
    "HIDDEN",
    "Assignment",
    "Rule",
    "assign",
    "canonical_name",
    "param_groups",
    "to_groups",
]

# The reason of what the default routing takes for a hidden matrix.
HIDDEN = "hidden matrix"
# Segments that wrappers put into names: activation checkpointing, torch.compile, FSDP1.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Rule:
    """An exception to the default routing.

    Args:
        pattern: Regular expression, searched in the canonical name.
        algorithm: Name of the algorithm of the parameters that match; None leaves each with the
            one it is routed to.
        options: Options of their group; with None, an algorithm takes those that it has.
    """

    pattern: str
    algorithm: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Assignment:
    """The decision on one parameter.

    Args:
        name: Canonical name (wrapper segments removed).
        param: The parameter.
        algorithm: Canonical algorithm name.
        options: Options of its group.
        reason: Why, in a few words; for the start-up table.
        pattern: Of the rule that applies, None without one.
    """

    name: str
    param: nn.Parameter
    algorithm: str
    options: Mapping[str, Any]
    reason: str
    pattern: str | None = None

    @property
    def is_exception(self) -> bool:
        """Whether a rule chose the algorithm."""
        return self.pattern is not None and self.reason == _by_rule(self.pattern)


def canonical_name(name: str) -> str:
    """Return a parameter's name without the segments that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def assign(
    model: nn.Module,
    matrices: tuple[str, Mapping[str, Any]],
    rest: tuple[str, Mapping[str, Any]],
    *,
    rules: Sequence[Rule] = (),
    splits: Mapping[str, Any] | None = None,
) -> list[Assignment]:
    """Decide on every trainable parameter of a model, each exactly once.

    Args:
        model: Any module, before or after sharding. Not modified.
        matrices: Algorithm and options of the hidden matrices.
        rest: Algorithm and options of all other parameters.
        rules: Exceptions; the first that matches wins.
        splits: ``split`` option of fused weights by canonical name.

    Returns:
        Assignments in the order of ``named_parameters``. A tied parameter has one; a rule or a
        split applies to it under any of its names.

    Raises:
        ValueError: Unknown algorithm, a pattern that is no regular expression, or a rule whose
            options hold its algorithm or parameters.
        TypeError: ``model`` is no module, or a rule no :class:`Rule`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"routing needs the nn.Module itself, for its names, got {type(model).__name__}"
        )
    compiled = [(rule, _compile(rule.pattern)) for rule in _checked(rules)]
    result = []
    for name, param, owners in _owned_parameters(model):
        reason, extra = default_route(param, owners)
        names = [full for _, full in owners]
        rule = next((r for r, p in compiled if any(p.search(n) for n in names)), None)
        (algorithm, options), why = (matrices, HIDDEN) if reason is None else (rest, reason)
        if rule is not None and rule.algorithm is not None:
            algorithm, options, why = rule.algorithm, rule.options, _by_rule(rule.pattern)
        elif rule is not None:
            options = {**options, **_known(rule.options, algorithm)}
        if get_algorithm(algorithm).is_matrix:
            for split in (splits[n] for n in names if splits and n in splits):
                extra = {**extra, "split": split}
            options = {**extra, **options}
        pattern = None if rule is None else rule.pattern
        canonical = get_algorithm(algorithm).name
        result.append(Assignment(name, param, canonical, dict(options), why, pattern))
    return result


def to_groups(assignments: Sequence[Assignment]) -> list[dict[str, Any]]:
    """Return torch param groups: one for each algorithm and set of options, in first-seen order."""
    groups: dict[str, dict[str, Any]] = {}
    for item in assignments:
        # repr: options may hold lists and tables.
        key = repr((item.algorithm, sorted(item.options.items(), key=lambda kv: kv[0])))
        group = groups.setdefault(
            key, {"params": [], "param_names": [], "algorithm": item.algorithm, **item.options}
        )
        group["params"].append(item.param)
        group["param_names"].append(item.name)
    return list(groups.values())


def param_groups(
    model: nn.Module,
    algorithm: str = "muon",
    *,
    rest: str = "adamw",
    rules: Sequence[Rule] = (),
) -> list[dict[str, Any]]:
    """Return the param groups of a model: hidden matrices to ``algorithm``, the others to ``rest``.

    Embeddings, learned tokens and positions, the output head (tied or not), norms, biases, other
    0-D and 1-D parameters, matrices of one row or one column, depthwise convolutions and LoRA
    factors are the rest; other convolutions, patch embeddings included, are flattened.

    Args:
        model: Any module, before or after ``fully_shard``. Not modified.
        algorithm: Algorithm of the hidden matrices.
        rest: Algorithm of all other parameters.
        rules: Exceptions by pattern; the first that matches wins.

    Returns:
        Groups for :class:`titan_muon.Muon`, without options except those of the rules.

    Raises:
        ValueError: Unknown algorithm, a pattern that is no regular expression, or one that decides
            on no parameter.
        TypeError: ``model`` is no module, or a rule no :class:`Rule`.
    """
    assignments = assign(model, (algorithm, {}), (rest, {}), rules=rules)
    matched = {item.pattern for item in assignments}
    for rule in rules:
        if rule.pattern not in matched:
            raise ValueError(
                f"param_groups: pattern {rule.pattern!r} decides on no trainable parameter of the "
                "model; correct it, or put it before the pattern that takes its parameters"
            )
    return to_groups(assignments)


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Owner]]]:
    """Yield name, parameter, and every (module, full name) that holds it, tied ones once."""
    owners: dict[int, list[Owner]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = canonical_name(f"{prefix}.{name}" if prefix else name)
            owners.setdefault(id(param), []).append((module, full))
    for name, param in model.named_parameters():
        if param.requires_grad:
            yield canonical_name(name), param, owners[id(param)]


def _checked(rules: Any) -> Sequence[Rule]:
    what = "rules must be a list of titan_muon.Rule(pattern, algorithm, options)"
    if not isinstance(rules, list | tuple):
        raise TypeError(f"{what}, got {type(rules).__name__}")
    for index, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            raise TypeError(f"{what}; rules[{index}] is {rule!r}")
        if not isinstance(rule.pattern, str) or not isinstance(rule.options, Mapping):
            raise TypeError(
                f"rules[{index}] = {rule!r}: pattern must be a string and options a dict"
            )
        for key in ("params", "param_names", "algorithm"):
            if key in rule.options:
                raise ValueError(
                    f"rules[{index}]: {key} is not an option; pattern and algorithm of the Rule "
                    "decide it"
                )
    return rules


def _by_rule(pattern: str) -> str:
    return f"pattern {pattern!r}"


def _known(options: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in get_algorithm(algorithm).options}


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
