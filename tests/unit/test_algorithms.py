"""Algorithms against torch's own optimizers, and one registered from outside."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.optimizers import (
    AveragedAlgorithm,
    generator,
    parameters,
    register_averaged,
    set_gradients,
    train,
)
from titan_muon import Muon
from titan_muon.optim.algorithms import (
    Buffer,
    ElementwiseAlgorithm,
    MatrixAlgorithm,
    algorithm_names,
    get_algorithm,
    register_algorithm,
)
from titan_muon.optim.options import COMMON_OPTIONS, MATRIX_OPTIONS, Option
from titan_muon.orthogonalization import orthogonalize_batch, resolve_schedule


def _both(ours: Muon, theirs: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                set_gradients(group["params"], step)
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}, {}], ids=str
)
@pytest.mark.parametrize(
    ("algorithm", "reference"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)]
)
def test_equals_torch_bitwise(algorithm, reference, kernel, dtype):
    shapes = ((4, 6), (7,), (), (3, 4, 5))
    ours, theirs = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, **kernel}
    # torch keeps its state in the parameter's dtype.
    state_dtype = "bfloat16" if dtype == torch.bfloat16 else "auto"
    mine = Muon([{"params": ours, "algorithm": algorithm, "state_dtype": state_dtype, **options}])
    other = reference(theirs, **options)
    _both(mine, other)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in other.state[b].items():
            assert torch.equal(mine.state[a][key], value), key


@pytest.mark.parametrize("algorithm", ["adamw", "adam"])
def test_mixed_dtypes_equal_float32_on_the_same_values(algorithm):
    low = parameters((4, 6), (7,), dtype=torch.bfloat16)
    optimizer = Muon([{"params": low, "algorithm": algorithm}], lr=0.05)
    reference = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[algorithm]
    for p in low:
        wide = nn.Parameter(p.detach().float())
        other = reference([wide], lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(3):
            set_gradients([p], step, dtype=torch.float32)
            wide.data.copy_(p.detach().float())
            wide.grad = p.grad
            other.step()
            optimizer.step()
            # The same kernel on the same float32 numbers, then one rounding.
            assert torch.equal(p, wide.bfloat16())
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[wide]["exp_avg_sq"])
        p.grad = None


def test_chunks_of_a_mixed_parameter_equal_one_piece(monkeypatch):
    from titan_muon.optim import elements

    results = []
    for chunk in (1 << 24, 5):
        monkeypatch.setattr(elements, "CHUNK", chunk)
        (p,) = parameters((4, 6), dtype=torch.bfloat16)
        p = nn.Parameter(p.detach().mT)
        optimizer = Muon([{"params": [p], "algorithm": "adamw"}], lr=0.1)
        train(optimizer, 3)
        results.append((p.detach(), optimizer.state[p]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][1]["step"] == 3


def test_what_is_left_of_parameters_shares_chunks(monkeypatch):
    from titan_muon.optim import elements
    from titan_muon.optim.algorithms import adamw

    sizes = []

    def counted(params, *args, **options):
        sizes.append([p.numel() for p in params])
        return kernel(params, *args, **options)

    kernel = adamw.adam
    monkeypatch.setattr(adamw, "adam", counted)
    monkeypatch.setattr(elements, "CHUNK", 16)
    params = parameters((4, 6), (5,), (40,), (2, 4), dtype=torch.bfloat16)
    optimizer = Muon([{"params": params, "algorithm": "adamw"}], lr=0.1)
    train(optimizer, 1)
    assert sizes == [[16], [16], [16], [8, 8], [8, 5]]
    assert all(optimizer.state[p]["step"] == 1 for p in params)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 8)], ids=str)
def test_equals_torch_muon(shape, nesterov, adjust_lr_fn):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    (ours,), (theirs,) = parameters(shape), parameters(shape)
    start = ours.detach().clone()
    mine = Muon(
        [ours],
        **options,
        adjust_lr_fn=adjust_lr_fn,
        ns_method="newton_schulz",
        ns_dtype="bfloat16",
        cautious_weight_decay=False,
    )
    other = torch.optim.Muon([theirs], **options, adjust_lr_fn=adjust_lr_fn)
    _both(mine, other)
    key = "momentum_buffer"
    assert torch.equal(mine.state[ours][key], other.state[theirs][key])
    # torch rounds the direction to bfloat16 before it takes the norm, we after; four steps of
    # five iterations at 2**-8 a rounding leave a few per cent of the movement.
    assert (ours - theirs).norm() <= 0.06 * (theirs - start).norm()


def _manual(p: Tensor, grads: Sequence[Tensor], keep: float, lr: float) -> Tensor:
    """Twenty lines of what the algorithm from outside must do: momentum 0, no decay."""
    schedule = resolve_schedule("polar_express", 5)
    average = torch.zeros_like(p)
    for grad in grads:
        stacks = grad.reshape(-1, *grad.shape[-2:])
        q = orthogonalize_batch(stacks, schedule, dtype=torch.float64).reshape(grad.shape)
        average = keep * average + (1 - keep) * q
        p = p - lr * average
    return p


@pytest.mark.parametrize("shape", [(4, 6), (3, 6, 4)], ids=str)
def test_algorithm_from_outside_computes_what_it_says(shape):
    name = register_averaged()
    (p,) = parameters(shape, dtype=torch.float64)
    start = p.detach().clone()
    optimizer = Muon(
        [{"params": [p], "algorithm": name, "keep": 0.25}],
        lr=0.1,
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
        adjust_lr_fn="none",
    )
    grads = []
    for step in range(3):
        set_gradients([p], step)
        grads.append(p.grad.clone())
        optimizer.step()
    # float64 on both sides.
    torch.testing.assert_close(p.detach(), _manual(start, grads, 0.25, 0.1), rtol=1e-10, atol=1e-10)
    state = optimizer.state[p]
    assert set(state) == {"momentum_buffer", "average_buffer", "count_buffer"}
    assert state["average_buffer"].shape == p.shape
    assert state["count_buffer"].shape == (*p.shape[:-1], 1)
    assert (state["count_buffer"] == 3).all()


def test_buffers_follow_the_rows_of_a_split():
    name = register_averaged()
    splits = ([2, 4], {"kind": "strided", "count": 3}, {"kind": "blocks", "rows": 3})
    for split in (
        *splits,
        {"kind": "interleaved_qkv", "n_kv_heads": 1, "heads_per_kv": 1, "head_dim": 2},
    ):
        (p,) = parameters((2, 6, 5))
        optimizer = Muon([{"params": [p], "algorithm": name, "split": split, "keep": 0.0}])
        train(optimizer, 2)
        state = optimizer.state[p]
        assert (state["count_buffer"] == 2).all()
        # The average of one step alone is the update itself: rows in the parameter's order.
        before = p.detach().clone()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.param_groups[0]["adjust_lr_fn"] = "none"
        optimizer.param_groups[0]["lr"] = 1.0
        train(optimizer, 1, first=2)
        torch.testing.assert_close(before - p.detach(), state["average_buffer"])


def test_registered_algorithm_is_known_everywhere():
    name = register_averaged()
    assert name in algorithm_names()
    assert get_algorithm("AVERAGED_test").name == name
    # Errors and start-up table show the title, so it must be a name too.
    assert get_algorithm(get_algorithm(name).title.upper()).name == name
    with pytest.raises(ValueError, match="keep = 2 is not allowed; use a number in"):
        Muon([{"params": parameters((4, 6)), "algorithm": name, "keep": 2}])
    # Its option passes wherever it is not used.
    assert "keep" not in Muon(parameters((4, 6)), keep=0.5).param_groups[0]
    saved = Muon([{"params": parameters((4, 6)), "algorithm": name}]).state_dict()
    assert saved["param_groups"][0]["keep"] == 0.5


def test_constructor_value_is_checked_by_the_groups_own_algorithm():
    narrow = Option(0.0, "0", lambda v: v == 0, "no memory")
    options = {**MATRIX_OPTIONS, "momentum": narrow}
    register_algorithm(_algorithm(name="narrow_test", options=options))
    group = {"params": parameters((4, 6)), "algorithm": "narrow_test"}
    assert Muon([group]).param_groups[0]["momentum"] == 0.0
    with pytest.raises(ValueError, match="param group 0: momentum = 0.9 is not allowed; use 0"):
        Muon([group], momentum=0.9)


class SignAlgorithm(ElementwiseAlgorithm):
    """The sign of the gradient."""

    name = "sign_test"
    title = "Sign"
    options = COMMON_OPTIONS

    def create_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"count": torch.zeros((), device=param.device)}

    def step(self, params, grads, states, group) -> None:
        for p, g, s in zip(params, grads, states, strict=True):
            s["count"].add_(1)
            p.add_(g.sign(), alpha=-group["lr"])


def test_elementwise_algorithm_from_outside():
    register_algorithm(SignAlgorithm())
    params = parameters((4, 6), (3,))
    before = [p.detach().clone() for p in params]
    optimizer = Muon([{"params": params, "algorithm": "sign_test"}], lr=0.5)
    train(optimizer, 1)
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p, b - 0.5 * p.grad.sign())
        assert optimizer.state[p]["count"] == 1


def _algorithm(base=MatrixAlgorithm, **attributes) -> Any:
    return type("Outside", (base,), {"name": "outside_test", "title": "Outside", **attributes})()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: object(), TypeError, "takes an instance of a subclass of MatrixAlgorithm"),
        (lambda: AveragedAlgorithm, TypeError, "takes an instance"),
        (lambda: _algorithm(title=None), TypeError, "set title to a string"),
        (lambda: _algorithm(name="Outside"), ValueError, "must be lower case"),
        (lambda: _algorithm(name="muon"), ValueError, "'muon' is registered already"),
        (lambda: _algorithm(title="MUON"), ValueError, "'MUON' is registered already"),
        (
            lambda: _algorithm(options={**MATRIX_OPTIONS, "keep": 0.5}),
            TypeError,
            "option 'keep' must be an Option",
        ),
        (
            lambda: _algorithm(options={"lr": MATRIX_OPTIONS["lr"]}),
            ValueError,
            r"lacks .*momentum.*\*\*MATRIX_OPTIONS",
        ),
        (
            lambda: _algorithm(buffers=(Buffer("momentum_buffer", "grad"),)),
            ValueError,
            "momentum_buffer is taken",
        ),
        (
            lambda: _algorithm(buffers=(Buffer("a", "grad"), Buffer("a", "rows"))),
            ValueError,
            "repeat a name",
        ),
        (lambda: _algorithm(name=""), ValueError, "must be lower case and not empty"),
        (lambda: _algorithm(buffers=("a",)), TypeError, "buffers holds 'a'; each must be Buffer"),
        (lambda: _algorithm(buffers=(Buffer("a", "cols"),)), TypeError, "like being 'grad' or"),
    ],
)
def test_registration_is_checked(make, error, message):
    before = algorithm_names()
    with pytest.raises(error, match=message):
        register_algorithm(make())
    assert algorithm_names() == before


@pytest.mark.parametrize("method", ["orthogonalize", "update"])
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda x: x[:, :2], r"torch.float32 \(1, 2, 6\)"),
        (lambda x: x.sum(), r"torch.float32 \(\)"),
        (lambda x: x.long(), r"torch.int64 \(1, 4, 6\)"),
        (lambda x: None, "NoneType"),
    ],
    ids=["rows", "scalar", "integers", "none"],
)
def test_algorithm_that_returns_something_else_is_named(monkeypatch, method, wrong, got):
    name = register_averaged()
    algorithm = get_algorithm(name)
    monkeypatch.setattr(type(algorithm), method, lambda self, x, *_: wrong(x))
    optimizer = Muon([{"params": parameters((4, 6)), "algorithm": name}])
    match = rf"{algorithm.title}: {method} returned {got}; .* float tensor of shape \(1, 4, 6\)"
    with pytest.raises(ValueError, match=match):
        train(optimizer, 1)


def test_running_a_definition_again_replaces_it():
    first = register_algorithm(_algorithm(name="again_test"))
    second = register_algorithm(_algorithm(name="again_test"))
    assert get_algorithm("again_test") is second is not first


def test_normuon_keeps_the_norm_of_every_matrix():
    update = torch.randn(3, 4, 6, generator=generator(), dtype=torch.float64)
    update[1] = 0
    second = torch.rand(3, 4, 1, generator=generator(1), dtype=torch.float64)
    before = update.norm(dim=(-2, -1))
    result = get_algorithm("normuon").update(
        update.clone(), {"second_moment_buffer": second}, {"beta2": 0.9}
    )
    torch.testing.assert_close(result.norm(dim=(-2, -1)), before, rtol=1e-12, atol=0)
    assert not result[1].any()
