"""State: saved, loaded, pickled and copied; what a refused load leaves behind."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers.optimizers import (
    ALGORITHMS,
    assert_same,
    parameters,
    register_averaged,
    set_gradients,
    snapshot,
    train,
)
from titan_muon import Muon, NorMuon, param_groups

EVERY = (*ALGORITHMS, register_averaged())
SHAPES = ((4, 6), (3, 6, 4))


def _optimizer(algorithm: str, seed: int = 0, **options) -> Muon:
    params = parameters(*SHAPES, seed=seed)
    return Muon([{"params": params, "algorithm": algorithm}], **options)


def _weights(optimizer: Muon) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy_weights(source: Muon, target: Muon) -> None:
    with torch.no_grad():
        for s, t in zip(_weights(source), _weights(target), strict=True):
            t.copy_(s)


@pytest.mark.parametrize("algorithm", EVERY)
class TestEveryAlgorithm:
    def test_resumed_equals_uninterrupted(self, algorithm):
        optimizer = _optimizer(algorithm, lr=0.1)
        train(optimizer, 2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed = _optimizer(algorithm, seed=7)
        _copy_weights(optimizer, resumed)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        train(optimizer, 2, first=2)
        train(resumed, 2, first=2)
        assert_same(snapshot(resumed), snapshot(optimizer))

    def test_load_keeps_tensors_and_dtypes(self, algorithm):
        source = _optimizer(algorithm)
        train(source, 1)
        target = _optimizer(algorithm, state_dtype="bfloat16")
        pointers = [v.data_ptr() for p in _weights(target) for v in target.state[p].values()]
        dtypes = [v.dtype for p in _weights(target) for v in target.state[p].values()]
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
        loaded = [v for p in _weights(target) for v in target.state[p].values()]
        assert [v.data_ptr() for v in loaded] == pointers
        assert [v.dtype for v in loaded] == dtypes
        wanted = [v for p in _weights(source) for v in source.state[p].values()]
        for got, want in zip(loaded, wanted, strict=True):
            assert torch.equal(got, want.to(got.dtype))
        # The state dict is not modified, and shares nothing with the optimizer afterwards.
        before = copy.deepcopy(saved)
        train(target, 1)
        torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)
        assert saved["param_groups"] == before["param_groups"]

    @pytest.mark.parametrize("protocol", ["pickle", "deepcopy"])
    def test_copy_steps_like_the_original(self, algorithm, protocol):
        optimizer = _optimizer(algorithm, lr=0.1, momentum=0.5, betas=(0.5, 0.6))
        train(optimizer, 2)
        twin = (
            copy.deepcopy(optimizer)
            if protocol == "deepcopy"
            else pickle.loads(pickle.dumps(optimizer))
        )
        assert not any(a is b for a, b in zip(_weights(optimizer), _weights(twin), strict=True))
        untouched = snapshot(optimizer)
        train(twin, 2, first=2)
        assert_same(snapshot(optimizer), untouched)
        train(optimizer, 2, first=2)
        assert_same(snapshot(optimizer), snapshot(twin))

    @pytest.mark.parametrize("before", EVERY)
    def test_state_dict_decides_on_the_algorithm(self, algorithm, before):
        source = _optimizer(algorithm, lr=0.25, weight_decay=0.5, momentum=0.75)
        train(source, 2)
        target = _optimizer(before, seed=3, ns_dtype="float64", fused=False)
        train(target, 1)
        _copy_weights(source, target)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        group = target.param_groups[0]
        assert group["algorithm"] == algorithm
        assert set(group) == set(source.param_groups[0])
        # What a checkpoint does not hold stays as built.
        for key, value in (("ns_dtype", "float64"), ("fused", False)):
            if key in group:
                assert group[key] == value
                group[key] = source.param_groups[0][key]
        assert_same(snapshot(target), snapshot(source))
        train(source, 2, first=5)
        train(target, 2, first=5)
        assert_same(snapshot(target), snapshot(source))

    def test_distributed_checkpoint_api(self, algorithm):
        model, other = (nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3)) for _ in "ab")
        source = Muon(param_groups(model, algorithm), lr=0.1)
        target = Muon(param_groups(other, algorithm), lr=0.2)
        train(source, 2)
        other.load_state_dict(model.state_dict())
        saved = copy.deepcopy(get_optimizer_state_dict(model, source))
        assert {"0.weight", "1.weight", "1.bias"} == set(saved["state"])
        set_optimizer_state_dict(other, target, saved)
        train(source, 2, first=2)
        train(target, 2, first=2)
        assert_same(snapshot(target), snapshot(source))


def _changed(optimizer: Muon, change) -> dict:
    state_dict = copy.deepcopy(optimizer.state_dict())
    for value in state_dict["state"][0].values():
        value.fill_(7.0)
    state_dict["param_groups"][0]["lr"] = 9.0
    change(state_dict)
    return state_dict


def _set(*path):
    *keys, last, value = path

    def change(state_dict):
        target = state_dict
        for key in keys:
            target = target[key]
        target[last] = value

    return change


def _drop(*path):
    *keys, last = path

    def change(state_dict):
        target = state_dict
        for key in keys:
            target = target[key]
        del target[last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("state", 1, "momentum_buffer"), r"b: the state dict has \['second_moment_buffer'\]"),
        (_drop("state", 1), "b: the state dict has no state, the algorithm needs"),
        (_set("state", 1, "extra", torch.ones(2)), r"b: the state dict has \['extra'"),
        (_set("state", 1, "momentum_buffer", torch.ones(4, 6)), r"b: .* shape \(4, 6\) in the"),
        (_set("state", 1, "second_moment_buffer", torch.ones(3, 1)), r"b: 'second_moment_buffer'"),
        (_set("state", 1, 3), "state of parameter 1 is a int, no dict of tensors"),
        (_set("state", 1, "momentum_buffer", "x"), "b: 'momentum_buffer' is a str in the"),
        (
            _set("state", 1, "momentum_buffer", torch.ones(3, 6, 4, dtype=torch.complex64)),
            "b: 'momentum_buffer' is of dtype torch.complex64",
        ),
        (
            _set("state", 1, "momentum_buffer", torch.ones(3, 6, 4, device="meta")),
            "b: 'momentum_buffer' is on the meta device",
        ),
        (_drop("param_groups", 1, "params"), "param group 1 of the state dict has no 'params'"),
        (_drop("param_groups"), r"has 'state' and 'param_groups', got the keys \['state'\]"),
        (_set("state", []), r"got the keys \['param_groups', 'state'\]"),
        (_drop("param_groups", 1), "has 1 param groups, the optimizer 2"),
        (_set("param_groups", 1, "params", [2, 3]), "param group 1 has 2 parameters"),
        (_set("param_groups", 1, "lr", -1.0), "param group 1: lr = -1.0 is not allowed"),
        (_set("param_groups", 1, "ns_steps", 99), "param group 1: ns_steps must be in"),
        (_set("param_groups", 1, "algorithm", "gone"), "unknown algorithm 'gone'"),
        (_set("param_groups", 0, "algorithm", "adamw"), "a: .* the algorithm needs"),
        (_set("param_groups", 1, "split", "[1, 1]"), "split .* sums to 2"),
    ],
)
def test_refused_load_touches_nothing(change, message):
    a, b = parameters((4, 6), (3, 6, 4))
    optimizer = NorMuon([{"params": [("a", a)]}, {"params": [("b", b)]}])
    train(optimizer, 1)
    before = snapshot(optimizer)
    pointers = [v.data_ptr() for p in (a, b) for v in optimizer.state[p].values()]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(_changed(optimizer, change))
    assert_same(snapshot(optimizer), before)
    assert [v.data_ptr() for p in (a, b) for v in optimizer.state[p].values()] == pointers
    twin = NorMuon([{"params": [nn.Parameter(a.detach().clone())]}])
    twin.load_state_dict(
        {
            "state": {0: copy.deepcopy(optimizer.state_dict()["state"][0])},
            "param_groups": [{"params": [0]}],
        }
    )
    train(optimizer, 1, first=1)
    train(twin, 1, first=1)
    assert torch.equal(twin.param_groups[0]["params"][0], a)


def test_step_count_that_is_no_number_is_refused_before_anything_changes():
    optimizer = Muon([{"params": parameters((6,)), "algorithm": "adamw"}])
    train(optimizer, 1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="'step' is a str in the state dict"):
        optimizer.load_state_dict(_changed(optimizer, _set("state", 0, "step", "x")))
    assert_same(snapshot(optimizer), before)


def test_whole_checkpoint_is_no_state_dict():
    optimizer = Muon(parameters((4, 6)))
    with pytest.raises(ValueError, match=r"got the keys \[\]"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="got a list"):
        optimizer.load_state_dict([])
    with pytest.raises(ValueError, match=r"got the keys \['model', 'optimizer'\]"):
        optimizer.load_state_dict({"model": {}, "optimizer": optimizer.state_dict()})


def test_vector_cannot_become_a_muon_parameter():
    optimizer = Muon([{"params": parameters((6,)), "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="no rows and columns"):
        optimizer.load_state_dict(_changed(optimizer, _set("param_groups", 0, "algorithm", "muon")))


def test_changed_matrix_rule_is_in_force_after_the_load():
    split = {"kind": "strided", "count": 2}
    source = NorMuon([{"params": parameters((4, 3, 2)), "flatten": True, "split": split}])
    train(source, 1)
    target = NorMuon([{"params": parameters((4, 3, 2))}])
    train(target, 1)
    _copy_weights(source, target)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert target.param_groups[0]["split"] == split
    train(source, 2, first=1)
    train(target, 2, first=1)
    assert_same(snapshot(target), snapshot(source))


def test_saved_options_win_and_others_stay():
    source = _optimizer("muon", lr=0.5, momentum=0.25, adjust_lr_fn="none", ns_dtype="float64")
    target = _optimizer("muon", ns_dtype="bfloat16", batch_size=3, state_dtype="bfloat16")
    target.load_state_dict(source.state_dict())
    group = target.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.5, 0.25, "none")
    assert (group["ns_dtype"], group["batch_size"], group["state_dtype"]) == (
        "bfloat16",
        3,
        "bfloat16",
    )


def test_state_dict_without_an_option_keeps_the_live_one():
    target = _optimizer("muon", momentum=0.25)
    state_dict = _optimizer("muon").state_dict()
    del state_dict["param_groups"][0]["momentum"]
    target.load_state_dict(state_dict)
    assert target.param_groups[0]["momentum"] == 0.25


@pytest.mark.parametrize("saved", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_live_lr_tensor_keeps_its_identity(saved):
    rate = torch.tensor(0.1)
    target = _optimizer("muon", lr=rate)
    state_dict = _optimizer("muon", lr=saved).state_dict()
    target.load_state_dict(state_dict)
    assert target.param_groups[0]["lr"] is rate
    assert rate == 0.5
    rate.fill_(0.75)
    assert state_dict["param_groups"][0]["lr"] == 0.5


def test_loaded_lr_tensor_is_a_copy():
    target = _optimizer("muon", lr=0.1)
    state_dict = _optimizer("muon", lr=torch.tensor(0.5)).state_dict()
    target.load_state_dict(state_dict)
    target.param_groups[0]["lr"].fill_(0.75)
    assert state_dict["param_groups"][0]["lr"] == 0.5


def test_scheduler_resumes_on_its_base_lr():
    def build():
        optimizer = _optimizer("muon", lr=0.4)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))

    optimizer, scheduler = build()
    for step in range(3):
        train(optimizer, 1, first=step)
        scheduler.step()
    resumed, resumed_scheduler = build()
    resumed.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    for _ in range(2):
        assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert resumed.param_groups[0]["initial_lr"] == 0.4
        scheduler.step()
        resumed_scheduler.step()


def test_groups_keep_their_identity_through_a_load():
    target = _optimizer("muon")
    groups = target.param_groups
    first = groups[0]
    target.load_state_dict(_optimizer("adamw").state_dict())
    assert target.param_groups is groups
    assert groups[0] is first


def test_load_hooks():
    optimizer = _optimizer("muon")
    seen = []

    def replace(opt, state_dict):
        seen.append("pre")
        return {**state_dict, "param_groups": [{**state_dict["param_groups"][0], "lr": 0.75}]}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(("post", opt.param_groups[0]["lr"]))
    )
    optimizer.load_state_dict(_optimizer("muon").state_dict())
    assert seen == ["pre", ("post", 0.75)]


def test_state_dict_hooks():
    optimizer = _optimizer("muon")
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: seen.append(sorted(state)))
    optimizer.state_dict()
    assert seen == ["pre", ["param_groups", "state"]]


def test_state_dict_is_written_with_pending_gradients():
    optimizer = _optimizer("normuon")
    set_gradients(_weights(optimizer))
    keys = [set(s) for s in optimizer.state_dict()["state"].values()]
    assert keys == [{"momentum_buffer", "second_moment_buffer"}] * 2
    assert all(p.grad is not None for p in _weights(optimizer))


@pytest.mark.parametrize("algorithm", EVERY)
def test_key_sets_do_not_depend_on_which_parameters_stepped(algorithm):
    optimizer, fresh = _optimizer(algorithm), _optimizer(algorithm)
    set_gradients(_weights(optimizer)[:1])
    optimizer.step()
    left, right = optimizer.state_dict(), fresh.state_dict()
    assert {n: set(s) for n, s in left["state"].items()} == {
        n: set(s) for n, s in right["state"].items()
    }
    assert [set(g) for g in left["param_groups"]] == [set(g) for g in right["param_groups"]]


def test_state_of_torch_adamw_loads():
    (w,) = parameters((4, 6))
    reference = torch.optim.AdamW([w], lr=0.05, betas=(0.8, 0.9), weight_decay=0.2)
    for step in range(2):
        set_gradients([w], step)
        reference.step()
    twin = nn.Parameter(w.detach().clone())
    optimizer = Muon([{"params": [twin], "algorithm": "adamw"}])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert set(optimizer.param_groups[0]) == set(
        Muon([{"params": parameters((2, 2)), "algorithm": "adamw"}]).param_groups[0]
    )
    for step in (2, 3):
        for p, o in ((w, reference), (twin, optimizer)):
            set_gradients([p], step)
            o.step()
    assert torch.equal(twin, w)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "newton_schulz"),
        ({"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3}, [(2.0, -1.5, 0.5)] * 3),
    ],
)
def test_state_of_torch_muon_loads_and_goes_on(options, method):
    (w,) = parameters((4, 6))
    options = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.8, **options}
    reference = torch.optim.Muon([w], **options)
    for step in range(2):
        set_gradients([w], step)
        reference.step()
    twin = nn.Parameter(w.detach().clone())
    optimizer = Muon([twin], cautious_weight_decay=False, ns_dtype="float32")
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    group = optimizer.param_groups[0]
    assert group["adjust_lr_fn"] == "original"
    assert group["ns_method"] == method
    assert "ns_coefficients" not in group
    before = w.detach().clone()
    for step in (2, 3):
        for p, o in ((w, reference), (twin, optimizer)):
            set_gradients([p], step)
            o.step()
    momentum = optimizer.state[twin]["momentum_buffer"]
    # The same mean, by lerp with another rounding of 1 - momentum.
    expected = reference.state[w]["momentum_buffer"]
    torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-7)
    # torch iterates in bfloat16, whose rounding of 4e-3 a step grows over the steps.
    moved = (w - before).norm()
    assert ((twin - w).norm() / moved).item() < 5e-2


@pytest.mark.parametrize("algorithm", ALGORITHMS[:4])
def test_flat_state_dict_of_torch_round_trips(algorithm):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        return model, Muon(param_groups(model, algorithm), lr=0.1, wire_dtype="float32")

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build(0)
    train(optimizer, 2)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert {f"state.0.weight.{key}" for key in optimizer.state[model[0].weight]} <= set(flat)
    # What never enters a checkpoint does not enter this one.
    hidden = {"wire_dtype", "ns_dtype", "nonfinite", "fused", "foreach", "max_stage_bytes"}
    assert not {key for key in flat if key.rpartition(".")[2] in hidden}
    flat = copy.deepcopy(flat)
    other, loaded = build(1)
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    set_optimizer_state_dict(other, loaded, flat, options=options)
    assert_same(snapshot(loaded), snapshot(optimizer))
    train(optimizer, 1, first=2)
    train(loaded, 1, first=2)
    assert_same(snapshot(loaded), snapshot(optimizer))


def test_group_shows_all_keys_but_iterates_over_the_saved_ones():
    group = _optimizer("muon").param_groups[0]
    saved = set(_optimizer("muon").state_dict()["param_groups"][0])
    assert set(iter(group)) == saved
    assert "ns_dtype" not in saved
    assert "ns_dtype" in group
    assert set({**group}) == set(dict(group)) == set(group.keys()) > saved
    assert dict(copy.deepcopy(group).items())["ns_dtype"] == "auto"


def test_copy_of_a_copy_keeps_constructor_options():
    optimizer = _optimizer("muon", momentum=0.5)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    twin.add_param_group({"params": parameters((4, 6))})
    assert twin.param_groups[1]["momentum"] == 0.5
