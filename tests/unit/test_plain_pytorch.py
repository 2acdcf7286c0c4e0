"""The optimizer where plain PyTorch programs put one: scalers, compiled regions, hooks, copies."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.optimizers import ALGORITHMS, assert_same, generator, parameters, snapshot
from titan_muon import HybridMuonAdamW, Muon, param_groups


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 24), nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 6)
    )


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(step)
    return torch.randint(50, (16,), generator=g), torch.randn(16, 6, generator=g)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens, target = _batch(step)
    return (model(tokens) - target).square().mean()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grad_scaler_steps_and_skips(algorithm):
    models = [_model() for _ in range(2)]
    scaled, plain = (
        Muon(param_groups(m, algorithm if algorithm != "adam" else "muon"), lr=0.01) for m in models
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        scaler.scale(_loss(models[0], step)).backward()
        scaler.unscale_(scaled)
        norms = [torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)]
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        _loss(models[1], step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1))
        plain.step()
        plain.zero_grad()
        # 1024 is a power of two: scaling and unscaling are exact.
        assert torch.equal(*norms)
    assert_same(snapshot(scaled), snapshot(plain))
    before = snapshot(scaled)
    scaler.scale(_loss(models[0], 2)).backward()
    next(models[0].parameters()).grad[0, 0] = float("inf")
    scaler.step(scaled)
    scaler.update()
    assert_same(snapshot(scaled), before)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
def test_step_inside_a_compiled_region(algorithm):
    results = []
    for compiled in (False, True):
        model = _model()
        optimizer = Muon(param_groups(model, algorithm), lr=0.01)

        def train_step(tokens, target, model=model, optimizer=optimizer):
            loss = (model(tokens) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss * 2

        # Graph breaks are allowed, other results are not; eager keeps the kernels the same.
        run = (
            torch.compile(train_step, backend="eager", fullgraph=False) if compiled else train_step
        )
        losses = [run(*_batch(step)).item() for step in range(3)]
        results.append((snapshot(optimizer), losses))
        torch._dynamo.reset()
    assert results[0][1] == results[1][1]
    assert_same(results[0][0], results[1][0])
    assert results[0][1][0] != results[0][1][2]


def test_compiled_model_is_routed_and_stepped_alike():
    results = []
    for compiled in (False, True):
        model = _model()
        run = torch.compile(model, backend="eager") if compiled else model
        optimizer = HybridMuonAdamW(run, muon_lr=0.02, adamw_lr=0.01)
        for step in range(2):
            _loss(run, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
        torch._dynamo.reset()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_autocast_trains_float32_weights():
    model = _model()
    optimizer = HybridMuonAdamW(model, muon_lr=0.02, adamw_lr=0.01)
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss(model, 0)
        loss.float().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    params = parameters((4, 6), (3,))
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert [p.grad is None for p in params] == [set_to_none] * 2
    assert set_to_none or not any(p.grad.any() for p in params)


def test_accumulated_gradients_are_one_gradient():
    results = []
    for halves in (False, True):
        model = _model()
        optimizer = HybridMuonAdamW(model, muon_lr=0.02, adamw_lr=0.01)
        tokens, target = _batch(0)
        for part in (slice(0, 8), slice(8, 16)) if halves else (slice(0, 16),):
            error = (model(tokens[part]) - target[part]).square().sum() / 96
            error.backward()
        optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        # The same sums in another order; AdamW's first step is near lr * sign(gradient).
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def test_copy_follows_its_own_model():
    model = _model()
    optimizer = HybridMuonAdamW(model, muon_lr=0.02, adamw_lr=0.01)
    pair = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), pair):
        for step in range(2):
            _loss(m, step).backward()
            o.step()
            o.zero_grad()
    for a, b in zip(model.parameters(), pair[0].parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b


def test_optimizer_in_backward_hooks():
    """One optimizer a parameter, stepped as soon as its gradient is there."""
    models = [_model() for _ in range(2)]
    whole = HybridMuonAdamW(models[0], muon_lr=0.02, adamw_lr=0.01)
    single: dict[nn.Parameter, Muon] = {}

    def step_now(param: nn.Parameter) -> None:
        single[param].step()
        param.grad = None

    for group in HybridMuonAdamW(models[1], muon_lr=0.02, adamw_lr=0.01).param_groups:
        for param in group["params"]:
            own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            single[param] = Muon([{**own, "params": [param]}])
            param.register_post_accumulate_grad_hook(step_now)
    for step in range(2):
        _loss(models[0], step).backward()
        whole.step()
        whole.zero_grad()
        _loss(models[1], step).backward()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
