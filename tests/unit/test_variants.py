"""AdaMuon and Aurora against twenty lines of float64 each, and what must hold for any input."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.optimizers import generator, parameters, set_gradients, train
from titan_muon import Muon
from titan_muon.optim.algorithms import MatrixAlgorithm, get_algorithm
from titan_muon.optim.matrix_math import batch_update, matrix_cost

VARIANTS = ("adamuon", "aurora")
STEPS = 4
LR, DECAY, MOMENTUM = 0.05, 0.3, 0.8
TRIPLE = (3.4445, -4.7750, 2.0315)
OPTIONS = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_method": "newton_schulz"}

Rule = Callable[[Tensor, dict[str, Tensor]], Tensor]


def polar(matrix: Tensor) -> Tensor:
    """Five quintic steps on singular values, which no product of ours does."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = TRIPLE
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def adamuon(direction: Tensor, state: dict[str, Tensor]) -> Tensor:
    q = polar(torch.sign(direction))
    state["v"] = 0.9 * state.get("v", torch.zeros_like(q)) + 0.1 * q**2
    scaled = q / (state["v"].sqrt() + 1e-8)
    return 0.2 * math.sqrt(q.numel()) * scaled / torch.linalg.matrix_norm(scaled)


def aurora(direction: Tensor, state: dict[str, Tensor]) -> Tensor:
    m, n = direction.shape
    if m <= n:
        return polar(direction)
    scale = 1 / direction.norm(dim=1)
    q = polar(torch.diag(scale) @ direction)
    for _ in range(2):
        scale = scale * (n / m / q.square().sum(1)) ** 0.4
        q = polar(torch.diag(scale) @ direction)
    return math.sqrt(m / n) * q


CASES = {
    "adamuon": (adamuon, {"beta2": 0.9, "adjust_lr_fn": "match_rms_adamw"}),
    "aurora": (aurora, {"pp_iterations": 3, "pp_beta": 0.4}),
}


def reference(start: Tensor, grads: Sequence[Tensor], rows: list[int], rule: Rule) -> Tensor:
    """One matrix, its rows cut into blocks: Nesterov, the rule, cautious decay, write."""
    result = []
    for block, weight in enumerate(start.split(rows)):
        buffer, state = torch.zeros_like(weight), {}
        for grad in (g.split(rows)[block] for g in grads):
            buffer = MOMENTUM * buffer + (1 - MOMENTUM) * grad
            update = rule((1 - MOMENTUM) * grad + MOMENTUM * buffer, state)
            decay = torch.where(update * weight > 0, LR * DECAY * weight, 0.0)
            weight = weight - decay - LR * update
        result.append(weight)
    return torch.cat(result)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("shape", "split"),
    [((9, 5), None), ((5, 9), None), ((6, 6), None), ((3, 8, 4), None), ((12, 5), [7, 5])],
    ids=["tall", "wide", "square", "experts", "split"],
)
def test_equals_float64_reference(name, shape, split):
    rule, options = CASES[name]
    (param,) = parameters(shape, dtype=torch.float64)
    start, grads = param.detach().clone(), []
    optimizer = Muon([{"params": [param], "algorithm": name, "split": split, **options}], **OPTIONS)
    for step in range(STEPS):
        set_gradients([param], step)
        grads.append(param.grad.clone())
        optimizer.step()
    stacks = torch.stack([start, *grads], dim=-3).view(-1, STEPS + 1, *shape[-2:])
    expected = [reference(w, g, split or [shape[-2]], rule) for w, *g in stacks]
    # float64 on both sides; where two steps have nearly no q, AdaMuon divides by little.
    got = param.detach().view(-1, *shape[-2:])
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_aurora_balances_rows_and_stays_semi_orthogonal():
    x = torch.randn(2, 64, 16, generator=generator())
    x[:, :8] *= 1e-20
    x[:, 9] = 0
    x[1] *= 1e-6
    lengths, values = {}, {}
    for name, algorithm in (("muon", get_algorithm("muon")), ("aurora", get_algorithm("aurora"))):
        group = Muon([{"params": parameters((64, 16)), "algorithm": name}]).param_groups[0]
        assert isinstance(algorithm, MatrixAlgorithm)
        update, _ = batch_update(x.clone(), {}, None, algorithm, group, normalized=False)
        assert not update[:, 9].any()
        lengths[name] = update.norm(dim=-1)[:, torch.arange(64) != 9]
        values[name] = torch.linalg.svdvals(update)
    # All rows near sqrt(16 / 63) = 0.50, those of 1e-20 too, which have next to none with Muon.
    assert lengths["muon"].min() < 1e-12
    assert 0.45 < lengths["aurora"].min()
    assert lengths["aurora"].max() < 0.56
    # The band of polar_express.
    assert 0.85 < values["aurora"].min()
    assert values["aurora"].max() < 1.15


def test_aurora_is_muon_on_wide_and_square_matrices():
    results = []
    for name in ("muon", "aurora"):
        params = parameters((5, 9), (6, 6))
        train(Muon([{"params": params, "algorithm": name}]), 3)
        results.append(params)
    for muon, aurora_ in zip(*results, strict=True):
        assert torch.equal(muon, aurora_)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)], ids=str)
def test_adamuon_has_the_size_of_adamw(shape):
    (param,) = parameters(shape)
    group = {"params": [param], "algorithm": "adamuon", "adjust_lr_fn": "match_rms_adamw"}
    optimizer = Muon([group], lr=1.0, weight_decay=0.0)
    for step in range(3):
        before = param.detach().clone()
        train(optimizer, 1, first=step)
        rms = (param.detach() - before).square().mean().sqrt()
        # Weights of size 1 are stored in float32.
        assert rms.item() == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("scale", [1e-12, 1e12], ids=str)
def test_scale_of_gradients_does_not_matter(name, scale):
    results = []
    for factor in (1.0, scale):
        params = parameters((5, 9), (9, 5))
        optimizer = Muon([{"params": params, "algorithm": name}], lr=0.1)
        for step in range(3):
            set_gradients(params, step)
            for p in params:
                p.grad = p.grad * factor
            optimizer.step()
        results.append(torch.cat([p.detach().view(-1) for p in params]))
    # Rounding of the scaled gradients, amplified by the iteration and by AdaMuon's division.
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_bad_values_show_and_stay_in_their_matrix(name, bad):
    params = {key: parameters((4, 9, 5), (4, 5, 9)) for key in ("bad", "good")}
    for key, pair in params.items():
        optimizer = Muon([{"params": pair, "algorithm": name}], lr=0.1)
        for step in range(2):
            set_gradients(pair, step)
            if key == "bad" and step == 0:
                for p in pair:
                    p.grad[1, 2, 3] = bad
            optimizer.step()
    for broken, whole in zip(params["bad"], params["good"], strict=True):
        assert broken[1].isnan().all()
        rest = [0, 2, 3]
        # The same batch with other numbers in one matrix: the products are the same.
        assert torch.equal(broken[rest], whole[rest])


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_matrices_stay_zero(name):
    params = [nn.Parameter(torch.ones(3, *shape)) for shape in ((4, 6), (6, 4))]
    optimizer = Muon([{"params": params, "algorithm": name}], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator())
            p.grad[1] = 0
        optimizer.step()
    for p in params:
        assert torch.equal(p[1], torch.ones_like(p[1]))
        assert (p[[0, 2]] != 1).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_state_is_near_float32_state(name):
    results = []
    for dtype in ("float32", "bfloat16"):
        params = parameters((5, 9), (9, 5))
        optimizer = Muon([{"params": params, "algorithm": name, "state_dtype": dtype}], lr=0.1)
        train(optimizer, 3)
        assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {
            getattr(torch, dtype)
        }
        results.append(torch.cat([p.detach().view(-1) for p in params]))
    start = torch.cat([p.detach().view(-1) for p in parameters((5, 9), (9, 5))])
    # Eight bits of momentum, whose signs AdaMuon takes: far below what a step moves.
    assert (results[1] - results[0]).norm() <= 0.1 * (results[0] - start).norm()


def test_float16_updates_use_wide_arithmetic():
    algorithm = get_algorithm("adamuon")
    assert isinstance(algorithm, MatrixAlgorithm)
    narrow = torch.randn(2, 6, 4, generator=generator()).mul_(1e-3).half()
    moments = [torch.rand(2, 6, 4, generator=generator(1)).mul_(1e-6) for _ in range(2)]
    got, want = (
        algorithm.update(q, {"second_moment_buffer": v}, {"beta2": 0.9})
        for q, v in zip((narrow.clone(), narrow.double()), moments, strict=True)
    )
    # Squares of 1e-3 are not normal in float16; one rounding of the result is what remains.
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=0)
    torch.testing.assert_close(*moments, rtol=1e-6, atol=0)
    assert got.dtype == torch.float16


def test_work_is_shared_out_by_orthogonalizations():
    cpu, dtype = torch.device("cpu"), torch.float32
    costs = {}
    for name in ("muon", *VARIANTS):
        group = {"params": parameters((4, 4)), "algorithm": name}
        group = Muon([group], **({"pp_iterations": 3} if name == "aurora" else {})).param_groups[0]
        algorithm = get_algorithm(name)
        assert isinstance(algorithm, MatrixAlgorithm)
        for shape in ((8, 4), (4, 8)):
            costs[name, shape] = matrix_cost(*shape, algorithm, group, cpu, dtype)
    muon, extra = costs["muon", (8, 4)], 4 * 32
    assert costs["aurora", (8, 4)] == (3 * muon[0], muon[1] + 2 * extra)
    assert costs["aurora", (4, 8)][0] == muon[0]
    assert costs["adamuon", (8, 4)] == (muon[0], muon[1] + 3 * extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_iterations": 0}, "pp_iterations = 0 is not allowed; use an integer from 1 to 100"),
        ({"pp_iterations": 10**30}, "is not allowed; use an integer from 1 to 100"),
        ({"pp_beta": 0.0}, r"pp_beta = 0.0 is not allowed; use a number in \(0, 1\]"),
        ({"pp_beta": "0.5"}, "pp_beta = '0.5' is not allowed"),
        ({"pp_bta": 0.5}, "pp_bta is not an option of Aurora, did you mean 'pp_beta'"),
    ],
    ids=str,
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": parameters((4, 6)), "algorithm": "aurora", **options}])
    assert Muon([{"params": parameters((4, 6)), "algorithm": "Aurora", "pp_beta": 1}])
