"""A whole model with one call."""

from typing import Any

from torch import nn

from titan_muon.optim.algorithms import algorithm_names, get_algorithm
from titan_muon.optim.muon import Muon
from titan_muon.optim.param_groups import param_groups

__all__ = ["HybridMuonAdamW"]


def HybridMuonAdamW(  # noqa: N802
    model: nn.Module,
    muon_lr: float = 2e-2,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    *,
    algorithm: str = "muon",
    **options: Any,
) -> Muon:
    """Return one optimizer for a model: Muon for its hidden matrices, AdamW for the rest.

    Args:
        model: Any module, before or after ``fully_shard``. Not modified.
        muon_lr: Learning rate of the matrices; with the default ``adjust_lr_fn`` the spectral norm
            of a step.
        adamw_lr: Learning rate of all other parameters.
        weight_decay: Decay factor of both, multiplied by the plain lr.
        algorithm: ``muon``, ``normuon``, or a registered algorithm of the Muon family.
        **options: Options of :class:`titan_muon.Muon`.

    Raises:
        ValueError: ``lr``, which no group would use; an algorithm that does not work on matrices;
            and what :class:`titan_muon.Muon` refuses.
        TypeError: ``model`` is no module.
    """
    if "lr" in options:
        raise ValueError(
            f"HybridMuonAdamW: lr = {options['lr']!r} would reach no parameter; give muon_lr for "
            "the matrices and adamw_lr for the others."
        )
    if not get_algorithm(algorithm).is_matrix:
        family = [name for name in algorithm_names() if get_algorithm(name).is_matrix]
        raise ValueError(
            f"HybridMuonAdamW: algorithm = {algorithm!r} does not work on matrices; use one of "
            f"{', '.join(map(repr, family))}, or Muon(param_groups(model, {algorithm!r}))."
        )
    groups = param_groups(model, algorithm)
    for group in groups:
        group["lr"] = adamw_lr if group["algorithm"] == "adamw" else muon_lr
    return Muon(groups, weight_decay=weight_decay, **options)
