"""Every option works in one group of several, and only there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.optimizers import parameters, set_gradients
from titan_muon import Muon
from titan_muon.optim.algorithms import get_algorithm

SHAPES = ((6, 10), (10, 6), (4, 4, 6))
# Another value than the default, and the algorithm it is tried with.
VALUES: dict[str, tuple[str, Any]] = {
    "lr": ("muon", 0.5),
    "weight_decay": ("muon", 0.7),
    "maximize": ("muon", True),
    "state_dtype": ("muon", "bfloat16"),
    "stochastic_rounding": ("muon", True),
    "rounding_seed": ("muon", 3),
    "cautious_weight_decay": ("muon", False),
    "momentum": ("muon", 0.5),
    "nesterov": ("muon", False),
    "ns_method": ("muon", "newton_schulz"),
    "ns_steps": ("muon", 3),
    "ns_dtype": ("muon", "bfloat16"),
    "adjust_lr_fn": ("muon", "match_rms_adamw"),
    "flatten": ("muon", True),
    "split": ("muon", {"kind": "strided", "count": 2}),
    "batch_size": ("muon", 1),
    "max_stage_bytes": ("muon", 1),
    "wire_dtype": ("muon", "float32"),
    "beta2": ("normuon", 0.5),
    "pp_iterations": ("aurora", 3),
    "pp_beta": ("aurora", 0.25),
    "betas": ("adamw", (0.5, 0.6)),
    "eps": ("adamw", 1e-2),
    "fused": ("adamw", True),
    "foreach": ("adamw", True),
}
# They say how, not what: here the numbers are the same, or nearly.
HOW = {"batch_size", "max_stage_bytes", "wire_dtype", "fused", "foreach"}
# Belongs to a whole step; groups that differ are refused, which has a test of its own.
WHOLE_STEP = {"nonfinite"}


def _weights(key: str) -> list[nn.Parameter]:
    rounded = key in ("stochastic_rounding", "rounding_seed")
    return parameters(*SHAPES, dtype=torch.bfloat16 if rounded else torch.float32)


def _steps(groups: list[dict[str, Any]]) -> list[Tensor]:
    optimizer = Muon(groups, lr=0.05, weight_decay=0.1)
    for step in range(2):
        for group in groups:
            set_gradients(group["params"], step)
        optimizer.step()
    return [p.detach() for group in groups for p in group["params"]]


def test_list_above_is_complete():
    names = ("muon", "normuon", "adamuon", "aurora", "adamw", "adam")
    known = {key for name in names for key in get_algorithm(name).options}
    assert set(VALUES) | WHOLE_STEP == known


@pytest.mark.parametrize("key", VALUES)
def test_option_works_in_its_own_group_only(key):
    algorithm, value = VALUES[key]
    base = {"algorithm": algorithm}
    if key == "rounding_seed":
        base["stochastic_rounding"] = True
    assert value != get_algorithm(algorithm).options[key].default
    # Named, because the noise of an unnamed parameter depends on the place of its group.
    names = [[f"{letter}{number}" for number in range(len(SHAPES))] for letter in "ab"]

    def group(number: int, **options: Any) -> dict[str, Any]:
        return {**base, "params": _weights(key), "param_names": names[number], **options}

    both = _steps([group(0, **{key: value}), group(1)])
    alone = _steps([group(0, **{key: value})])
    default = _steps([group(1)])
    count = len(SHAPES)
    for number, (a, b) in enumerate(zip(both, [*alone, *default], strict=True)):
        if key in HOW:
            # Batches and kernels may add in another order.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b), number
    changed = any(not torch.equal(a, b) for a, b in zip(both[:count], both[count:], strict=True))
    assert changed or key in HOW
