"""Steps of the optimizer: one property suite for all algorithms, and what it is given."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.helpers.optimizers import (
    ALGORITHMS,
    assert_same,
    generator,
    parameters,
    register_averaged,
    set_gradients,
    snapshot,
    train,
)
from titan_muon import Muon, NorMuon, param_groups

EVERY = (*ALGORITHMS, register_averaged())
SHAPES = ((4, 6), (6, 4), (3, 4, 6), (5, 5))


def _optimizer(algorithm: str, shapes=SHAPES, **options) -> tuple[Muon, list[nn.Parameter]]:
    params = parameters(*shapes)
    return Muon([{"params": params, "algorithm": algorithm}], **options), params


@pytest.mark.parametrize("algorithm", EVERY)
class TestEveryAlgorithm:
    def test_state_exists_from_construction_and_keeps_its_keys(self, algorithm):
        optimizer, params = _optimizer(algorithm)
        before = [{k: (v.shape, v.dtype) for k, v in optimizer.state[p].items()} for p in params]
        assert all(before)
        assert all(not v.any() for p in params for v in optimizer.state[p].values())
        train(optimizer, 2)
        after = [{k: (v.shape, v.dtype) for k, v in optimizer.state[p].items()} for p in params]
        assert after == before

    def test_loss_falls(self, algorithm):
        optimizer, params = _optimizer(algorithm, lr=0.1, weight_decay=0.0)
        targets = [torch.randn(p.shape, generator=generator(9)) for p in params]

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            total = sum((p - t).square().mean() for p, t in zip(params, targets, strict=True))
            total.backward()
            return total

        first = loss().item()
        for _ in range(40):
            optimizer.step(loss)
        # Every algorithm moves by a bounded amount a step; 40 steps cross most of the distance.
        assert loss().item() < 0.2 * first

    def test_maximize_is_the_step_on_negative_gradients(self, algorithm):
        up, up_params = _optimizer(algorithm, maximize=True)
        down, down_params = _optimizer(algorithm)
        for step in range(3):
            set_gradients(up_params, step)
            set_gradients(down_params, step)
            for p in down_params:
                p.grad.neg_()
            up.step()
            down.step()
        for a, b in zip(up_params, down_params, strict=True):
            assert torch.equal(a, b)
            assert a.grad.norm() > 0

    def test_gradients_are_not_modified(self, algorithm):
        optimizer, params = _optimizer(algorithm, maximize=True)
        set_gradients(params)
        before = [p.grad.clone() for p in params]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))

    def test_parameter_without_gradient_is_untouched(self, algorithm):
        optimizer, params = _optimizer(algorithm)
        train(optimizer, 1)
        alone, alone_params = _optimizer(algorithm)
        train(alone, 1)
        weight = params[1].detach().clone()
        state = {k: v.clone() for k, v in optimizer.state[params[1]].items()}
        set_gradients(params, 1)
        set_gradients(alone_params, 1)
        params[1].grad = None
        optimizer.step()
        alone.step()
        assert torch.equal(params[1], weight)
        torch.testing.assert_close(optimizer.state[params[1]], state, rtol=0, atol=0)
        # The others step as if nothing were missing.
        for index in (0, 2, 3):
            assert torch.equal(params[index], alone_params[index])

    def test_no_gradient_at_all_changes_nothing(self, algorithm):
        optimizer, _ = _optimizer(algorithm)
        before = snapshot(optimizer)
        optimizer.step()
        assert_same(snapshot(optimizer), before)

    def test_zero_lr_moves_nothing(self, algorithm):
        optimizer, params = _optimizer(algorithm, lr=0.0)
        before = [p.detach().clone() for p in params]
        train(optimizer, 2)
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))

    def test_tensor_lr_equals_number_and_follows_changes(self, algorithm):
        number, params = _optimizer(algorithm, lr=0.25)
        rate = torch.tensor(0.25)
        tensor, tensor_params = _optimizer(algorithm, lr=rate)
        for step, lr in enumerate((0.25, 0.125, 0.5)):
            number.param_groups[0]["lr"] = lr
            rate.fill_(lr)
            set_gradients(params, step)
            set_gradients(tensor_params, step)
            number.step()
            tensor.step()
        for a, b in zip(params, tensor_params, strict=True):
            # Adam forms lr / bias correction in float32 where lr is a tensor, else in float64.
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    def test_closure_runs_with_gradients_once(self, algorithm):
        optimizer, params = _optimizer(algorithm)
        calls = []

        def closure() -> float:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            loss.backward()
            calls.append(loss.item())
            return loss.item()

        assert optimizer.step(closure) == calls[0]
        assert len(calls) == 1
        assert not any(torch.equal(p.grad, torch.zeros_like(p)) for p in params)

    def test_hooks_run_around_the_step(self, algorithm):
        optimizer, params = _optimizer(algorithm)
        before = params[0].detach().clone()
        seen = []
        optimizer.register_step_pre_hook(
            lambda o, *_: seen.append(("pre", torch.equal(params[0], before)))
        )
        optimizer.register_step_post_hook(
            lambda o, *_: seen.append(("post", torch.equal(params[0], before)))
        )
        train(optimizer, 1)
        assert seen == [("pre", True), ("post", False)]

    @pytest.mark.parametrize(
        ("dtype", "grad_dtype", "state_dtype"),
        list(
            itertools.product(
                (torch.float16, torch.bfloat16, torch.float32, torch.float64),
                (torch.float16, torch.bfloat16, torch.float32, torch.float64),
                ("auto", "float32", "bfloat16"),
            )
        ),
    )
    def test_dtype_mixes(self, algorithm, dtype, grad_dtype, state_dtype):
        params = parameters((4, 6), (3, 5, 4), dtype=dtype)
        wide = parameters((4, 6), (3, 5, 4), dtype=dtype)
        wide = [nn.Parameter(p.detach().double()) for p in wide]
        start = [p.detach().clone() for p in wide]
        optimizer = Muon(
            [{"params": params, "algorithm": algorithm}], lr=0.1, state_dtype=state_dtype
        )
        reference = Muon([{"params": wide, "algorithm": algorithm}], lr=0.1)
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        expected = expected if state_dtype == "auto" else getattr(torch, state_dtype)
        for step in range(2):
            set_gradients(params, step, dtype=grad_dtype)
            for w, p in zip(wide, params, strict=True):
                w.grad = p.grad.double()
            optimizer.step()
            reference.step()
        for p, w, s in zip(params, wide, start, strict=True):
            assert p.dtype == dtype
            assert p.grad.dtype == grad_dtype
            for key, value in optimizer.state[p].items():
                by_row = key != "step" and value.shape != p.shape
                kept = torch.float32 if key == "step" else expected
                assert value.dtype == (torch.promote_types(kept, torch.float32) if by_row else kept)
            # Two roundings of the weight, one a step, and the state's rounding on the movement:
            # 2**-8 a rounding in bfloat16, amplified by up to 8 in five iterations of these sizes.
            error = (p.double() - w).norm()
            eps = torch.finfo(dtype).eps
            coarse = 0.1 if state_dtype == "bfloat16" else 1e-4
            assert error <= 2 * eps * s.norm() + coarse * (w - s).norm()

    def test_many_parameters_equal_each_alone(self, algorithm):
        together, params = _optimizer(algorithm)
        train(together, 2)
        for index in range(len(SHAPES)):
            alone = parameters(*SHAPES)[index]
            optimizer = Muon([{"params": [alone], "algorithm": algorithm}])
            for step in range(2):
                reference = parameters(*SHAPES)
                set_gradients(reference, step)
                alone.grad = reference[index].grad
                optimizer.step()
            # Batched products of another batch size may sum in another order.
            torch.testing.assert_close(alone, params[index], rtol=1e-5, atol=1e-6)

    def test_not_contiguous_parameters(self, algorithm):
        (plain,) = parameters((4, 6))
        transposed = nn.Parameter(plain.detach().mT.contiguous().mT)
        assert not transposed.is_contiguous()
        for p in (plain, transposed):
            train(Muon([{"params": [p], "algorithm": algorithm}], lr=0.1), 2)
        torch.testing.assert_close(plain, transposed, rtol=1e-6, atol=1e-6)

    def test_gradients_laid_out_otherwise_than_their_weights(self, algorithm):
        """torch's fused kernels read them in the order of memory, or refuse them."""
        plain, other = parameters((4, 6), (4, 6))
        with torch.no_grad():
            other.copy_(plain)
        fused = {"fused": True} if algorithm in ("adam", "adamw") else {}
        optimizers = [
            Muon([{"params": [p], "algorithm": algorithm, **fused}], lr=0.1) for p in (plain, other)
        ]
        for step in range(2):
            set_gradients([plain], step)
            other.grad = plain.grad.mT.contiguous().mT
            assert other.grad.stride() != other.stride()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(plain, other, rtol=1e-6, atol=1e-6)


def test_zero_gradients_and_no_history_move_nothing_but_plain_decay():
    for cautious, left in ((True, 1.0), (False, 1 - 0.5 * 0.2)):
        params = parameters((4, 6), (3, 6, 4))
        before = [p.detach().clone() for p in params]
        optimizer = Muon(params, lr=0.5, weight_decay=0.2, cautious_weight_decay=cautious)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, b in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), b * left, rtol=2e-7, atol=0)  # one rounding
            assert not optimizer.state[p]["momentum_buffer"].any()


def test_zero_gradient_after_history_still_moves():
    (p,) = parameters((4, 6))
    optimizer = Muon([p], lr=0.5, weight_decay=0.0)
    train(optimizer, 1)
    buffer = optimizer.state[p]["momentum_buffer"].clone()
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.95 * buffer)
    assert (p - before).norm() > 0.5


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 1e7])
def test_scale_of_the_gradient_does_not_matter(algorithm, scale):
    results = []
    for factor in (1.0, scale):
        (p,) = parameters((8, 12))
        optimizer = Muon([{"params": [p], "algorithm": algorithm}], lr=0.5, weight_decay=0.0)
        set_gradients([p])
        p.grad.mul_(factor)
        optimizer.step()
        results.append(p.detach())
    # The division by the norm is exact up to rounding; NorMuon's eps of 1e-8 acts on q, not on g.
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_nonfinite_gradient_stays_in_its_own_matrix(algorithm, bad):
    params = parameters((3, 4, 6), (4, 6), (4, 6))
    optimizer = Muon([{"params": params, "algorithm": algorithm}])
    set_gradients(params)
    params[0].grad[1, 2, 3] = bad
    optimizer.step()
    assert not params[0][1].isfinite().any()
    assert params[0][0].isfinite().all()
    assert params[0][2].isfinite().all()
    assert all(p.isfinite().all() for p in params[1:])


@pytest.mark.parametrize("algorithm", EVERY)
def test_sparse_gradients_are_refused_by_name(algorithm):
    embedding = nn.Embedding(5, 4, sparse=True)
    group = {"params": [("embed", embedding.weight)], "algorithm": algorithm}
    optimizer = Muon([group])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="embed: sparse gradients are not supported"):
        optimizer.step()


def test_partial_gradients_of_elementwise_algorithms_are_refused_by_name():
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    whole = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()], src_data_rank=None)
    param = nn.Parameter(whole)
    optimizer = Muon([{"params": [("embed", param)], "algorithm": "adamw"}])
    param.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False)
    with pytest.raises(NotImplementedError, match="embed: the gradient has placements"):
        optimizer.step()
    assert torch.equal(param.to_local(), torch.ones(4, 6))


@pytest.mark.parametrize("rows", [3, 9])
def test_parameter_that_changed_its_shape_is_named(rows):
    # Where shards lie was found out with the old shape: rows would be missed, or read past the end.
    param = nn.Parameter(torch.ones(6, 4))
    optimizer = Muon([("grown.weight", param)], lr=1.0)
    param.grad = torch.ones(6, 4)
    optimizer.step()
    param.data, param.grad = torch.ones(rows, 4), None
    param.grad = torch.ones(rows, 4)
    with pytest.raises(ValueError, match=rf"grown\.weight: .*\({rows}, 4\).*\(6, 4\)"):
        optimizer.step()


def test_one_optimizer_for_a_model_steps_each_part_by_its_own_algorithm():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "hidden": nn.Linear(4, 4)})
    optimizer = NorMuon(param_groups(model, "normuon"), lr=0.1)
    apart = nn.ModuleDict({"embed": nn.Embedding(7, 4), "hidden": nn.Linear(4, 4)})
    apart.load_state_dict(model.state_dict())
    rest = [p for n, p in apart.named_parameters() if n != "hidden.weight"]
    others = [
        NorMuon([apart["hidden"].weight], lr=0.1),
        torch.optim.AdamW(rest, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for step in range(3):
        for part in (model, apart):
            # Each by name: the groups order parameters in their own way.
            for index, (_, p) in enumerate(part.named_parameters()):
                set_gradients([p], 10 * step + index)
        optimizer.step()
        for other in others:
            other.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, apart.get_parameter(name)), name


# What params may be.


def test_params_as_torch_takes_them():
    w = parameters((4, 6), (6, 4))
    assert Muon(p for p in w).param_groups[0]["params"] == w
    assert Muon([{"params": w[0]}]).param_groups[0]["params"] == w[:1]
    assert Muon([{"params": (p for p in w)}]).param_groups[0]["params"] == w
    named = Muon([("a", w[0]), ("b", w[1])])
    assert named.param_groups[0]["param_names"] == ["a", "b"]
    assert named.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda w: w, TypeError, "should be an iterable of Tensors or dicts"),
        (lambda w: [], ValueError, "empty parameter list"),
        (lambda w: [{"params": {w}}], TypeError, "ordered collections"),
        (lambda w: [{"params": [w]}, w], TypeError, "param group 1: a param group must be a dict"),
        (lambda w: [{"lr": 1.0}], TypeError, "must be a dict with 'params'"),
        (lambda w: [{"params": [w]}, {"params": [w]}], ValueError, "more than one parameter group"),
        (lambda w: [w, w], ValueError, "param group 0: parameter . is listed twice"),
        (lambda w: [("a", w), ("b", w)], ValueError, "param group 0: . is listed twice"),
        (lambda w: [{"params": [w], "algorithm": "x"}], ValueError, "param group 0: unknown algor"),
        (lambda w: [w * 2], ValueError, "non-leaf"),
        (lambda w: [("a", w), w], ValueError, "Some param names are missing"),
    ],
)
def test_params_that_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        Muon(params(parameters((4, 6))[0]))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(()), ValueError, r"layers\.0\.w: shape \(\) has no rows and columns"),
        (torch.zeros(6), ValueError, r"layers\.0\.w: shape \(6,\) has no rows and columns"),
        (torch.zeros(2, 3, dtype=torch.complex64), TypeError, r"layers\.0\.w: dtype torch.complex"),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, r"layers\.0\.w: dtype torch.int32"),
        (torch.zeros(2, 3).to(torch.float8_e4m3fn), TypeError, r"w: dtype torch.float8_e4m3fn"),
    ],
)
def test_parameters_that_a_group_cannot_take_are_named(value, error, message):
    parameter = nn.Parameter(value, requires_grad=False)
    with pytest.raises(error, match=message):
        Muon([("layers.0.w", parameter)])
    if error is TypeError:
        with pytest.raises(error, match=message):
            Muon([{"params": [("layers.0.w", parameter)], "algorithm": "adamw"}])


@pytest.mark.parametrize(
    "group",
    [
        lambda w: {"params": [torch.nn.Parameter(torch.zeros(3))]},
        lambda w: {"params": [torch.nn.Parameter(torch.zeros(3, 2))], "split": [1, 1]},
        lambda w: {"params": [torch.nn.Parameter(torch.zeros(3, 2))], "lr": -1},
        lambda w: {"params": [torch.nn.Parameter(torch.zeros(3, 2))], "algorithm": "nope"},
        lambda w: {"params": [torch.nn.Parameter(torch.zeros(3, 2)), w]},
    ],
    ids=["1-D", "split", "lr", "algorithm", "twice"],
)
def test_refused_group_leaves_the_optimizer_as_it_was(group):
    (w,) = parameters((4, 6))
    optimizer = Muon([w])
    train(optimizer, 1)
    before, known = snapshot(optimizer), set(optimizer.state)
    with pytest.raises(ValueError, match=r"param group 1|unknown algorithm|more than one"):
        optimizer.add_param_group(group(w))
    assert_same(snapshot(optimizer), before)
    assert set(optimizer.state) == known
    train(optimizer, 1)


def test_group_whose_state_cannot_be_made_is_refused_whole(monkeypatch):
    (w,) = parameters((4, 6))
    optimizer = NorMuon([w])
    from titan_muon.optim import muon

    real = muon.create_state
    made = []

    def fail_on_second(param, group, rule):
        made.append(param)
        if len(made) == 2:
            raise NotImplementedError("Partial")
        return real(param, group, rule)

    monkeypatch.setattr(muon, "create_state", fail_on_second)
    with pytest.raises(NotImplementedError, match="Partial"):
        optimizer.add_param_group({"params": parameters((4, 6), (4, 6))})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == {w}


def test_added_group_steps():
    first, second = parameters((4, 6), (4, 6))
    optimizer = Muon([first])
    train(optimizer, 1)
    optimizer.add_param_group({"params": [second], "algorithm": "adamw", "lr": 0.5})
    before = second.detach().clone()
    train(optimizer, 1)
    assert not torch.equal(second, before)
    assert set(optimizer.state[second]) == {"step", "exp_avg", "exp_avg_sq"}


def test_empty_group_is_tolerated():
    (w,) = parameters((4, 6))
    for algorithm in EVERY:
        optimizer = Muon([{"params": [], "algorithm": algorithm}, {"params": [w]}])
        train(optimizer, 1)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        train(optimizer, 1)


# Learning-rate schedules and gradient scaling.


@pytest.mark.parametrize("tensor", [False, True])
def test_scheduler_keeps_the_base_lr_of_each_group(tensor):
    first, second = parameters((4, 6), (6,))
    rates = [2e-2, 1e-5]
    optimizer = Muon(
        [
            {"params": [first], "lr": torch.tensor(rates[0]) if tensor else rates[0]},
            {"params": [second], "algorithm": "adamw", "lr": rates[1]},
        ]
    )
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for step in range(6):
        factor = min(1.0, (step + 1) / 4)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            assert float(group["lr"]) == pytest.approx(rate * factor, rel=1e-6)
        train(optimizer, 1, first=step)
        scheduler.step()
    saved = optimizer.state_dict()["param_groups"]
    assert [float(g["initial_lr"]) for g in saved] == pytest.approx(rates)


def test_one_cycle_scheduler():
    optimizer = Muon(parameters((4, 6)))
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False)
    seen = []
    for step in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        train(optimizer, 1, first=step)
        scheduler.step()
    # A 25th of the peak, near the peak, then down: each step reads what the schedule wrote.
    assert seen[0] == pytest.approx(0.1 / 25)
    assert 0.5 * 0.1 < seen[1] <= 0.1
    assert seen[2] < seen[1]
