"""Which parameter goes to which algorithm: by module type first, by name second."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from titan_muon.optim.algorithms import get_algorithm

__all__ = ["Assignment", "Rule", "assign", "canonical_name", "param_groups", "to_groups"]

# Segments that wrappers put into names: activation checkpointing, torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_HEADS = ("lm_head", "output", "head", "unembed", "unembedding")
_EMBEDDINGS = ("embed", "embedding", "embeddings", "tok_embeddings", "embed_tokens", "wte", "wpe")
_NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _BatchNorm)


@dataclass(frozen=True)
class Rule:
    """An exception to the default routing.

    Args:
        pattern: Regular expression, searched in the canonical name.
        algorithm: Name of the algorithm of the parameters that match.
        options: Options of their group.
    """

    pattern: str
    algorithm: str
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
        pattern: The rule's pattern, None for the default routing.
    """

    name: str
    param: Tensor
    algorithm: str
    options: Mapping[str, Any]
    reason: str
    pattern: str | None = None


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
        Assignments in the order of ``named_parameters``.
    """
    compiled = [(rule, re.compile(rule.pattern)) for rule in rules]
    result = []
    for name, param, owners in _owned_parameters(model):
        reason, extra = _default_route(name, param, owners)
        rule = next((r for r, pattern in compiled if pattern.search(name)), None)
        if rule is not None:
            algorithm, options, why = rule.algorithm, rule.options, f"pattern {rule.pattern!r}"
        elif reason is None:
            (algorithm, options), why = matrices, "hidden matrix"
        else:
            (algorithm, options), why = rest, reason
        if get_algorithm(algorithm).is_matrix:
            if splits and name in splits:
                extra = {**extra, "split": splits[name]}
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

    Embeddings, the output head (tied or not), norms, biases, other 0-D and 1-D parameters,
    depthwise convolutions and LoRA factors are the rest; convolutions are flattened.

    Args:
        model: Any module, before or after ``fully_shard``. Not modified.
        algorithm: Algorithm of the hidden matrices.
        rest: Algorithm of all other parameters.
        rules: Exceptions by pattern; the first that matches wins.

    Returns:
        Groups for :class:`titan_muon.Muon`, without options except those of the rules.

    Raises:
        ValueError: Unknown algorithm, or a rule that matches no parameter.
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


_Owner = tuple[nn.Module, str]


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, list[_Owner]]]:
    """Yield name, parameter, and every (module, full name) that holds it, tied ones once."""
    owners: dict[int, list[_Owner]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = canonical_name(f"{prefix}.{name}" if prefix else name)
            owners.setdefault(id(param), []).append((module, full))
    for name, param in model.named_parameters():
        if param.requires_grad:
            yield canonical_name(name), param, owners[id(param)]


def _default_route(
    name: str, param: Tensor, owners: Sequence[_Owner]
) -> tuple[str | None, dict[str, Any]]:
    """Return why a parameter is no hidden matrix (None if it is one), and options it needs."""
    by_module = [_by_module(module) for module, _ in owners]
    by_name = [_by_name(full) for _, full in owners]
    reason = next((r for r in (*by_module, *by_name) if r), None)
    if reason is None and param.ndim < 2:
        reason = f"{param.ndim}-D"
    convolution = any(isinstance(module, _ConvNd) for module, _ in owners)
    return reason, {"flatten": True} if convolution else {}


def _by_module(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, _NORM_TYPES) or "Norm" in type(module).__name__:
        return "norm"
    if isinstance(module, _ConvNd) and module.groups > 1 and module.groups == module.in_channels:
        return "depthwise convolution"
    return None


def _by_name(name: str) -> str | None:
    *modules, leaf = name.lower().split(".")
    owner = modules[-1] if modules else ""
    if any("bias" in part.split("_") for part in name.lower().split(".")):
        return "bias"
    if owner in _HEADS and len(modules) <= 2 or leaf in _HEADS:
        return "output head"
    if owner in _EMBEDDINGS or leaf in _EMBEDDINGS:
        return "embedding"
    if leaf.startswith("lora_") or owner.startswith("lora_"):
        return "LoRA factor"
    return None
