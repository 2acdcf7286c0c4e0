"""torchtitan's container: routing of a model, one-way state, and what wins on resume."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from tests.helpers.optimizers import assert_same, generator, snapshot, train  # noqa: E402
from titan_muon.integration.optimizers_container import MuonOptimizersContainer  # noqa: E402


def _model() -> nn.Module:
    model = nn.ModuleDict(
        {
            "tok_embeddings": nn.Embedding(9, 4),
            "layers": nn.ModuleDict({"0": nn.ModuleDict({"wq": nn.Linear(4, 6, bias=False)})}),
            "norm": nn.RMSNorm(4),
            "lm_head": nn.Linear(4, 9, bias=False),
        }
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator()))
    return model


def _container(model: nn.Module | None = None, **options) -> MuonOptimizersContainer:
    config = MuonOptimizersContainer.Config(**{"name": "Muon", "lr": 0.1, **options})
    return MuonOptimizersContainer(config, model_parts=[model or _model()])


def _through_dcp(source: MuonOptimizersContainer, target: MuonOptimizersContainer) -> None:
    """Load as the distributed checkpoint does: fill the target's own dict, then hand it over."""
    saved = copy.deepcopy(source.state_dict())
    flat = target.state_dict()
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            value.copy_(saved[key])
        else:
            flat[key] = saved[key]
    target.load_state_dict(flat)


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "AdaMuon", "Aurora", "AdamW", "Adam"])
def test_resumed_equals_uninterrupted(name):
    source = _container(name=name)
    train(source.optimizers[0], 2)
    target = _container(copy.deepcopy(source.model_parts[0]), name=name)
    _through_dcp(source, target)
    for container in (source, target):
        train(container.optimizers[0], 2, first=2)
    assert_same(snapshot(target.optimizers[0]), snapshot(source.optimizers[0]))


def test_state_dict_steps_nothing_and_is_flat():
    container = _container(name="NorMuon")
    before = snapshot(container.optimizers[0])
    keys = set(container.state_dict())
    assert_same(snapshot(container.optimizers[0]), before)
    assert {k for k in keys if k.startswith("state.layers.0.wq.weight.")} == {
        "state.layers.0.wq.weight.momentum_buffer",
        "state.layers.0.wq.weight.second_moment_buffer",
    }
    assert "param_groups.layers.0.wq.weight.ns_dtype" not in keys
    train(container.optimizers[0], 1)
    assert set(container.state_dict()) == keys


@pytest.mark.parametrize("name", ["AdaMuon", "Aurora"])
def test_variants_step_a_torchtitan_model(name):
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    model = llama3_debugmodel().model_spec.model.build()
    torch.manual_seed(0)
    model.init_states()
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    container = _container(model, name=name, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
    train(container.optimizers[0], 1)
    matrices = 0
    for group in container.optimizers[0].param_groups:
        for key, p in zip(group["param_names"], group["params"], strict=True):
            assert p.isfinite().all()
            if group["algorithm"] == name.lower():
                matrices += 1
                rms = (p.detach() - start[key]).square().mean().sqrt().item()
                # lr 0.1 of RMS 0.2; singular values of a polar factor lie within [0.86, 1.14].
                assert rms == pytest.approx(0.02, rel=0.15), key
    assert matrices == 30


def test_adamuon_says_that_normuon_kept_rows_only():
    source, target = _container(name="NorMuon"), _container(name="AdaMuon")
    train(source.optimizers[0], 1)
    before = snapshot(target.optimizers[0])
    shapes = r"'second_moment_buffer' has shape \(6, 1\) in the state dict and \(6, 4\)"
    with pytest.raises(ValueError, match=shapes):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_same(snapshot(target.optimizers[0]), before)


def test_config_wins_at_the_position_of_the_schedule(caplog):
    def schedule(container):
        return LambdaLR(container.optimizers[0], lambda step: 1 / (step + 1))

    source = _container(weight_decay=0.1)
    scheduler = schedule(source)
    for step in range(3):
        train(source.optimizers[0], 1, first=step)
        scheduler.step()
    target = _container(lr=0.2, weight_decay=0.3, momentum=0.5)
    resumed = schedule(target)
    with caplog.at_level(logging.INFO):
        _through_dcp(source, target)
    for group in target.optimizers[0].param_groups:
        # The fourth step of the schedule on the new base.
        assert group["lr"] == pytest.approx(0.2 / 4, rel=1e-12)
        assert group["initial_lr"] == 0.2
        assert group["weight_decay"] == 0.3
    assert target.optimizers[0].param_groups[1]["momentum"] == 0.5
    for line in (
        "weight_decay is 0.3 from the config; the checkpoint has 0.1",
        "momentum is 0.5 from the config; the checkpoint has 0.95",
        "initial_lr is 0.2 from the config; the checkpoint has 0.1",
    ):
        assert line in caplog.text
    assert "betas" not in caplog.text
    # The scheduler goes on from there.
    resumed.load_state_dict({**scheduler.state_dict(), "base_lrs": resumed.base_lrs})
    resumed.step()
    assert target.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 / 5, rel=1e-12)


def test_muon_resumes_from_normuon_and_stays_muon(caplog):
    source = _container(name="NorMuon")
    train(source.optimizers[0], 2)
    target = _container(name="Muon")
    with caplog.at_level(logging.INFO):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    theirs, ours = (
        {
            n: (g["algorithm"], c.optimizers[0].state[p])
            for g in c.optimizers[0].param_groups
            for n, p in zip(g["param_names"], g["params"], strict=True)
        }
        for c in (source, target)
    )
    algorithm, state = ours["layers.0.wq.weight"]
    assert algorithm == "muon"
    assert set(state) == {"momentum_buffer"}
    expected = theirs["layers.0.wq.weight"][1]["momentum_buffer"]
    assert torch.equal(state["momentum_buffer"], expected)
    assert "algorithm is muon from the config; the checkpoint has normuon" in caplog.text
    train(target.optimizers[0], 1)


def test_refused_load_touches_nothing():
    target = _container()
    train(target.optimizers[0], 1)
    before = snapshot(target.optimizers[0])
    flat = copy.deepcopy(_container(lr=0.5).state_dict())
    del flat["state.lm_head.weight.exp_avg"]
    with pytest.raises(ValueError, match=r"lm_head\.weight: the state dict has \['exp_avg_sq'"):
        target.load_state_dict(flat)
    assert_same(snapshot(target.optimizers[0]), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_groups": [(r"w[123]", "AdamW")]}, r"pattern 'w\[123\]' decides on no trainable"),
        ({"param_groups": [("weight", "AdamW")]}, "no parameter of the model goes to the Muon"),
        ({"name": "Moun"}, "unknown algorithm 'Moun', did you mean 'muon'"),
        ({"lr": -1.0}, "lr = -1.0 is not allowed"),
    ],
)
def test_config_that_cannot_run_is_refused(options, message):
    from torchtitan.components.optimizer import ParamGroupConfig

    if "param_groups" in options:
        groups = [
            ParamGroupConfig(pattern=p, optimizer_name=n, optimizer_kwargs={})
            for p, n in options["param_groups"]
        ]
        options = {"param_groups": groups}
    with pytest.raises(ValueError, match=message):
        _container(**options)
