"""What changes around an optimizer between two steps, and the defaults of torch around it."""

from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.optimizers import (
    ALGORITHMS,
    assert_same,
    parameters,
    set_gradients,
    snapshot,
    train,
)
from titan_muon import Muon
from titan_muon.kernels.pieces import PieceTable, Row
from titan_muon.optim.members import Gradients

SHAPES = ((4, 6), (3, 6, 4))


def _optimizer(algorithm: str, **options) -> Muon:
    params = parameters(*SHAPES, seed=0)
    if algorithm == "muon":
        # Reads the weights as well.
        options = {"adjust_lr_fn": "match_param_rms", **options}
    return Muon([{"params": params, "algorithm": algorithm}], **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_state_that_was_replaced_is_what_steps_use(algorithm):
    straight, moved = _optimizer(algorithm), _optimizer(algorithm)
    for optimizer in (straight, moved):
        train(optimizer, 2)
    for param, state in list(moved.state.items()):
        moved.state[param] = {key: value.clone() for key, value in state.items()}
    held = [value for state in moved.state.values() for value in state.values()]
    for optimizer in (straight, moved):
        train(optimizer, 2, first=2)
    assert_same(snapshot(straight), snapshot(moved))
    now = [value for state in moved.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_state_of_another_form_is_refused_by_name():
    optimizer = _optimizer("normuon")
    train(optimizer, 1)
    first = optimizer.param_groups[0]["params"][0]
    before = snapshot(optimizer)
    optimizer.state[first]["momentum_buffer"] = optimizer.state[first]["momentum_buffer"].double()
    with pytest.raises(ValueError, match=r"parameter 0: its state momentum_buffer is .*float64"):
        optimizer.step()
    optimizer.state[first]["momentum_buffer"] = optimizer.state[first]["momentum_buffer"].float()
    assert_same(before, snapshot(optimizer))


def test_group_that_was_replaced_is_what_steps_use():
    optimizer = _optimizer("muon", weight_decay=0.0)
    train(optimizer, 1)
    optimizer.param_groups[0] = type(optimizer.param_groups[0])(optimizer.param_groups[0])
    optimizer.param_groups[0]["lr"] = 0.0
    weights = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    train(optimizer, 1, first=1)
    assert all(map(torch.equal, weights, optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_default_dtype_changes_nothing(algorithm, default):
    plain = _optimizer(algorithm, nonfinite="skip")
    train(plain, 1)
    other = _optimizer(algorithm, nonfinite="skip")
    set_gradients(other.param_groups[0]["params"])
    torch.set_default_dtype(default)
    try:
        other.step()
        other.load_state_dict(other.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(snapshot(plain), snapshot(other))


def test_foreach_with_a_tensor_lr_is_refused_before_a_step():
    weights = [nn.Parameter(torch.ones(4))]
    with pytest.raises(ValueError, match="foreach = True takes no tensor lr on a CPU"):
        Muon([{"params": weights, "algorithm": "adamw", "foreach": True, "lr": torch.tensor(0.1)}])


def test_guard_without_parameters():
    Muon([{"params": []}], nonfinite="skip").step()


def test_unnamed_groups_draw_noise_of_their_own():
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(4)]
    groups = [
        {"params": [w], "algorithm": algorithm, "stochastic_rounding": True, "lr": 1e-4}
        for w, algorithm in zip(weights, ["muon", "muon", "adamw", "adamw"], strict=True)
    ]
    optimizer = Muon(groups)
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(3):
        for weight in weights:
            weight.grad = gradient.clone()
        optimizer.step()
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[2], weights[3])


def test_gradients_that_come_and_go_leave_no_tables_behind():
    members = [
        mock.Mock(momentum=torch.zeros(2), gradient=lambda present=present: present)
        for present in (None, torch.ones(2))
    ]
    table = PieceTable([Row(i, 1, 2, 0, 2, 2 * i, 2, i) for i in range(2)], 2)
    for _ in range(3):
        ops = mock.Mock()
        Gradients(members).commit(table, torch.ones(2), ops)
        assert ops.merge.call_args.args[2].tensors == (0,)
    assert not table._parts


def test_who_watches_a_step_sees_the_replaced_state():
    optimizer = _optimizer("muon")
    train(optimizer, 1)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].clone()
    seen = []

    def works(parts):
        seen.extend(member.momentum for part in parts for member in part.members)
        return parts

    with mock.patch.object(optimizer.observer, "works", works):
        train(optimizer, 1, first=1)
    held = [optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]]
    assert all(a is b for a, b in zip(seen, held, strict=True))
