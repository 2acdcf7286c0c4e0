"""An inf or NaN in a gradient: it propagates, the whole step is skipped, or its name is said."""

import copy
import math
import re

import pytest
import torch

from tests.helpers.optimizers import (
    ALGORITHMS,
    assert_same,
    parameters,
    register_averaged,
    set_gradients,
    snapshot,
    train,
)
from titan_muon import Muon
from titan_muon.optim.algorithms.base import ElementwiseAlgorithm

EVERY = (*ALGORITHMS, register_averaged())
BAD = {"inf": math.inf, "minus inf": -math.inf, "nan": math.nan}


def _weights(optimizer: Muon) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _build(nonfinite: str | None, dtype=torch.float32, **adamw) -> Muon:
    """One group of every algorithm."""
    params = parameters(*[(4, 6), (3, 6, 4)] * len(EVERY), dtype=dtype)
    groups = [
        {"params": params[2 * i : 2 * i + 2], "algorithm": name, **adamw}
        for i, name in enumerate(EVERY)
    ]
    return Muon(groups, lr=0.1, **({} if nonfinite is None else {"nonfinite": nonfinite}))


def _poison(optimizer: Muon, index: int, value: float) -> None:
    set_gradients(_weights(optimizer), 50)
    gradient = _weights(optimizer)[index].grad
    assert gradient is not None
    gradient.view(-1)[1] = value


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("guilty", [0, 3, 2 * EVERY.index("adamw"), 2 * EVERY.index("adam") + 1])
def test_skipped_step_changes_no_bit_and_the_next_is_normal(guilty, value):
    optimizer, undisturbed = _build("skip"), _build(None)
    for one in (optimizer, undisturbed):
        train(one, 2)
    before = snapshot(optimizer)
    _poison(optimizer, guilty, value)
    optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1
    for one in (optimizer, undisturbed):
        train(one, 2, first=2)
    left, right = snapshot(optimizer), snapshot(undisturbed)
    torch.testing.assert_close(left["params"], right["params"], rtol=0, atol=0)
    torch.testing.assert_close(left["state"], right["state"], rtol=0, atol=0)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"fused": True}),
        (torch.float32, {"fused": False, "foreach": True}),
        # State is float32 then, so that every parameter takes the path of mixed dtypes.
        (torch.bfloat16, {"fused": True}),
        (torch.float16, {}),
        (torch.float64, {}),
    ],
)
def test_every_kernel_of_adamw_and_every_dtype_skips(dtype, options):
    optimizer = _build("skip", dtype, **options)
    train(optimizer, 1)
    before = snapshot(optimizer)
    _poison(optimizer, 0, math.nan)
    optimizer.step()
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=1)
    moved = zip(snapshot(optimizer)["params"], before["params"], strict=True)
    assert not any(torch.equal(a, b) for a, b in moved)


def test_host_reads_nothing_with_skip(monkeypatch):
    optimizer = _build("skip")
    train(optimizer, 1)

    def refuse(self, *args):
        raise AssertionError("the host waits for a value")

    _poison(optimizer, 0, math.nan)
    for name in ("item", "__bool__", "__float__", "__int__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    # On a CPU torch's kernels of Adam read their step counts.
    monkeypatch.setattr(optimizer, "_step_elements", lambda take: None)
    optimizer.step()


def test_third_party_elementwise_algorithm_is_undone_too():
    class Sign(ElementwiseAlgorithm):
        name, title, options = "sign_nonfinite_test", "Sign", {}

        def create_state(self, param, group):
            return {}

        def step(self, params, grads, states, group):
            for p, g, s in zip(params, grads, states, strict=True):
                s["sum"].add_(g)
                p.sub_(g.sign())

    for take in (0.0, 1.0):
        param, state = torch.ones(3), {"sum": torch.zeros(3)}
        grad = torch.tensor([1.0, math.nan if take == 0 else -2.0, 3.0])
        Sign().step_if(torch.tensor(take), [param], [grad], [state], {})
        expected = torch.ones(3) if take == 0 else 1 - grad.sign()
        assert torch.equal(param, expected)
        assert torch.equal(state["sum"], torch.zeros(3) if take == 0 else grad)


def test_propagate_is_the_default():
    optimizer = _build(None)
    _poison(optimizer, 0, math.nan)
    optimizer.step()
    assert _weights(optimizer)[0].isnan().any()
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("mode", ["skip", "error"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_gradients_pass(mode, dtype):
    # Their sum, and the sum of their squares, is inf.
    (w,) = parameters((8, 8), dtype=dtype)
    w.grad = torch.full_like(w, torch.finfo(dtype).max)
    optimizer = Muon([{"params": [w], "algorithm": "adam"}], nonfinite=mode)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.state[w]["step"] == 1


def test_missing_and_empty_gradients_are_finite():
    params = parameters((4, 6), (0, 6), (4, 6))
    optimizer = Muon(params, nonfinite="skip")
    set_gradients(params[:2])
    before = params[0].detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(params[0], before)
    for p in params:
        p.grad = None
    optimizer.step()
    assert optimizer.skipped_steps == 0


class TestError:
    def _named(self) -> tuple[Muon, list[torch.Tensor]]:
        params = parameters((4, 6), (4, 6), (5,))
        named = list(zip(("a.weight", "b.weight", "c.bias"), params, strict=True))
        groups = [{"params": named[:2]}, {"params": named[2:], "algorithm": "adamw"}]
        return Muon(groups, nonfinite="error"), params

    @pytest.mark.parametrize("value", BAD.values(), ids=BAD)
    def test_names_the_guilty_and_changes_nothing(self, value):
        optimizer, params = self._named()
        train(optimizer, 1)
        before = snapshot(optimizer)
        set_gradients(params, 2)
        params[1].grad[0, 0] = value
        params[2].grad[0] = math.inf
        kind = "nan" if value != value else "inf"
        expected = rf"2 of 3 parameters are not finite: b\.weight \({kind}\), c\.bias \(inf\)\."
        with pytest.raises(FloatingPointError, match=expected) as error:
            optimizer.step()
        assert "a.weight" not in str(error.value)
        assert_same(snapshot(optimizer), before)
        train(optimizer, 1, first=3)

    def test_says_what_clipping_made_of_it(self):
        for value, text in (
            (math.inf, r"1 of 3 .* b\.weight \(nan\).*turns an inf into NaN and the rest into zer"),
            (math.nan, r"3 of 3 .*All of them are NaN: clipping .* spreads one NaN to every grad"),
        ):
            optimizer, params = self._named()
            set_gradients(params)
            params[1].grad[0, 0] = value
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            with pytest.raises(FloatingPointError, match=text):
                optimizer.step()

    def test_long_lists_are_cut_and_groups_without_names_have_numbers(self):
        params = parameters(*[(2, 3)] * 14)
        optimizer = Muon([{"params": params[:1]}, {"params": params[1:]}], nonfinite="error")
        set_gradients(params)
        for p in params[1:]:
            p.grad[0, 0] = math.inf
        with pytest.raises(FloatingPointError) as error:
            optimizer.step()
        assert "13 of 14" in str(error.value)
        assert "param group 1: parameter 0 (inf)" in str(error.value)
        assert str(error.value).count("(inf)") == 10
        assert "and 3 more." in str(error.value)

    def test_is_refused_while_a_graph_is_captured(self, monkeypatch):
        optimizer, params = self._named()
        set_gradients(params)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"nonfinite = 'error' .* use nonfinite = 'skip'"):
            optimizer.step()


def test_first_skip_under_capture_is_refused(monkeypatch):
    params = parameters((4, 6))
    optimizer = Muon(params, nonfinite="skip")
    set_gradients(params)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="take one step with nonfinite = 'skip' before"):
        optimizer.step()


def test_groups_must_agree():
    params = parameters((4, 6), (4, 6))
    groups = [{"params": params[:1], "nonfinite": "skip"}, {"params": params[1:]}]
    with pytest.raises(ValueError, match=r"'propagate' in param group 1 and 'skip' in group 0"):
        Muon(groups)
    optimizer = Muon(params[:1], nonfinite="skip")
    with pytest.raises(ValueError, match="say the same in every group"):
        optimizer.add_param_group({"params": params[1:], "nonfinite": "error"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:]})
    assert optimizer.param_groups[1]["nonfinite"] == "skip"


def test_wrong_value_lists_the_right_ones():
    allowed = re.escape("nonfinite = 'ignore' is not allowed; use one of 'propagate', 'skip'")
    with pytest.raises(ValueError, match=allowed):
        Muon(parameters((2, 2)), nonfinite="ignore")


def test_is_no_part_of_a_checkpoint_and_survives_load_and_copy():
    optimizer = _build("skip")
    assert "nonfinite" not in optimizer.state_dict()["param_groups"][0]
    optimizer.load_state_dict(copy.deepcopy(_build("propagate").state_dict()))
    assert {g["nonfinite"] for g in optimizer.param_groups} == {"skip"}
    twin = copy.deepcopy(optimizer)
    before = snapshot(twin)
    _poison(twin, 0, math.nan)
    twin.step()
    assert_same(snapshot(twin), before)
    assert (twin.skipped_steps, optimizer.skipped_steps) == (1, 0)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8", "int4", "float8"])
def test_narrow_state_keeps_every_bit(state_dtype):
    if state_dtype != "bfloat16":
        pytest.importorskip("torchao", reason="quantised state needs torchao")
    params = parameters(*[(64, 128)] * 2 * len(ALGORITHMS))
    groups = [
        {"params": params[2 * i : 2 * i + 2], "algorithm": name}
        for i, name in enumerate(ALGORITHMS)
    ]
    optimizer = Muon(groups, lr=0.1, nonfinite="skip", state_dtype=state_dtype)
    train(optimizer, 2)
    before = [_inner(v).clone() for p in params for v in optimizer.state[p].values()]
    weights = [p.detach().clone() for p in params]
    _poison(optimizer, 3, math.nan)
    optimizer.step()
    after = [_inner(v) for p in params for v in optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, params, strict=True))
    train(optimizer, 1, first=3)
    assert not any(torch.equal(a, b) for a, b in zip(weights, params, strict=True))
    assert all(p.isfinite().all() for p in params)


def _inner(value: torch.Tensor) -> torch.Tensor:
    """Return everything that a state tensor stores, as bytes."""
    flatten = getattr(value, "__tensor_flatten__", None)
    parts = [getattr(value, name) for name in flatten()[0]] if flatten else [value]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
