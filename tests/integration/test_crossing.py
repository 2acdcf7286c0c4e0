"""A checkpoint of one algorithm, or of another project, loads into a run of another one."""

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from torchtitan.components.optimizer import (  # noqa: E402
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict  # noqa: E402

from tests.helpers.optimizers import (  # noqa: E402
    assert_same,
    generator,
    register_averaged,
    set_gradients,
    snapshot,
    train,
)
from titan_muon.integration import cpu_runtime  # noqa: E402
from titan_muon.integration.checkpoint import (  # noqa: E402
    CrossingPlanner,
    MuonCheckpointManager,
    with_crossing,
)
from titan_muon.integration.optimizers_container import MuonOptimizersContainer  # noqa: E402

register_averaged()
NAMES = ["Muon", "NorMuon", "AdaMuon", "Aurora", "Averaged", "AdamW", "Adam"]
MATRICES = ("layers.0.wq.weight", "layers.0.experts")
ADAM = {"AdamW", "Adam"}


class _Model(nn.Module):
    """Two matrices, one of them a stack, and what goes to AdamW."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(9, width)
        layer = nn.Module()
        layer.wq = nn.Linear(width, 6, bias=False)
        layer.experts = nn.Parameter(torch.zeros(3, 6, width))
        self.layers = nn.ModuleDict({"0": layer})
        self.norm = nn.RMSNorm(width)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator()))


def _container(name: str, model: nn.Module | None = None, **options: Any) -> Any:
    config = MuonOptimizersContainer.Config(name=name, lr=0.1, **options)
    return MuonOptimizersContainer(config, model_parts=[model or _Model()])


def _save(flat: dict[str, Any], folder: Path) -> None:
    dcp.save({"optimizer": flat}, checkpoint_id=folder, no_dist=True)


def _load(container: Any, folder: Path) -> list[str]:
    """Load as the manager does; return what it would log."""
    planner = CrossingPlanner(container.momentum_from, folder)
    dcp.load({"optimizer": container}, checkpoint_id=folder, planner=planner, no_dist=True)
    return [f"{count} {note}" for note, count in planner.notes.items()]


def _state(container: Any) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: value.clone() for key, value in container.optimizers[0].state[p].items()}
        for group in container.optimizers[0].param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


def _trained(name: str, **options: Any) -> Any:
    container = _container(name, **options)
    train(container.optimizers[0], 2)
    return container


@pytest.mark.parametrize(("old", "new"), list(itertools.product(NAMES, NAMES)))
def test_every_algorithm_continues_every_other(old, new, tmp_path):
    source = _trained(old)
    _save(source.state_dict(), tmp_path)
    target = _container(new, copy.deepcopy(source.model_parts[0]))
    before = [g["algorithm"] for g in target.optimizers[0].param_groups]
    notes = _load(target, tmp_path)
    assert [g["algorithm"] for g in target.optimizers[0].param_groups] == before
    saved, loaded = _state(source), _state(target)
    fresh = set()
    for name, state in loaded.items():
        for key, value in state.items():
            kept = key in saved[name] and saved[name][key].shape == value.shape
            fresh |= set() if kept else {key}
            expected = saved[name][key] if kept else torch.zeros_like(value)
            assert torch.equal(value, expected), (name, key)
            assert not kept or value.any() or name == "norm.weight"
    # Whatever does not come from the checkpoint is said, and nothing else.
    said = "; ".join(notes)
    assert all(key in said for key in fresh)
    assert bool(notes) == bool(fresh)
    # Only the matrices change hands.
    assert all(note.startswith("2 ") or {old, new} <= ADAM for note in notes)
    train(target.optimizers[0], 2, first=2)
    assert all(v.isfinite().all() for state in _state(target).values() for v in state.values())


@pytest.mark.parametrize(
    ("old", "new", "options", "note"),
    [
        ("AdamW", "Muon", {}, "momentum_buffer starts at zero, the checkpoint has AdamW's exp_avg"),
        ("AdamW", "Muon", {"momentum_from": "exp_avg"}, "momentum_buffer starts from exp_avg"),
        ("Muon", "AdamW", {}, "exp_avg, exp_avg_sq and step start at zero, the checkpoint has mom"),
        ("Muon", "NorMuon", {}, "second_moment_buffer starts at zero, the checkpoint has none"),
        (
            "NorMuon",
            "AdaMuon",
            {},
            "second_moment_buffer starts at zero, the checkpoint has it in another shape",
        ),
    ],
)
def test_log_says_what_became_of_the_state(old, new, options, note, tmp_path):
    _save(_trained(old).state_dict(), tmp_path)
    assert any(note in said for said in _load(_container(new, **options), tmp_path))


@pytest.mark.parametrize("new", ["Muon", "NorMuon", "AdaMuon", "Aurora", "Averaged"])
def test_momentum_starts_from_the_mean_gradient_of_adamw(new, tmp_path):
    source = _trained("AdamW")
    _save(source.state_dict(), tmp_path)
    target = _container(new, momentum_from="exp_avg")
    _load(target, tmp_path)
    saved, loaded = _state(source), _state(target)
    for name in MATRICES:
        assert torch.equal(loaded[name]["momentum_buffer"], saved[name]["exp_avg"])
        assert loaded[name]["momentum_buffer"].any()
    # Nothing is borrowed for the others.
    assert torch.equal(loaded["norm.weight"]["exp_avg"], saved["norm.weight"]["exp_avg"])


def _stock(model: nn.Module, options: dict[str, Any]) -> OptimizersContainer:
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    return OptimizersContainer(config, model_parts=[model])


@pytest.mark.parametrize("momentum_from", ["zeros", "exp_avg"])
def test_torchtitans_own_adamw_is_continued(momentum_from, tmp_path):
    model = _Model()
    kwargs = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    stock = _stock(model, kwargs)
    for step in range(2):
        set_gradients(list(model.parameters()), step)
        stock.step()
    _save(stock.state_dict(), tmp_path)
    target = _container("NorMuon", copy.deepcopy(model), momentum_from=momentum_from)
    _load(target, tmp_path)
    state, theirs = _state(target), stock.optimizers[0].state
    by_name = dict(model.named_parameters())
    for name, own in state.items():
        saved = theirs[by_name[name]]
        if name in MATRICES:
            wanted = (
                saved["exp_avg"] if momentum_from == "exp_avg" else torch.zeros_like(by_name[name])
            )
            assert torch.equal(own["momentum_buffer"], wanted)
        else:
            torch.testing.assert_close(own, dict(saved), rtol=0, atol=0)


def test_torchtitan_adamw_to_adamw_is_bitwise(tmp_path):
    model = _Model()
    kwargs = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    stock = _stock(model, kwargs)
    set_gradients(list(model.parameters()))
    stock.step()
    _save(stock.state_dict(), tmp_path)
    target = _container("AdamW", copy.deepcopy(model), implementation="for-loop")
    assert _load(target, tmp_path) == []
    for one, weights in ((stock, model), (target, target.model_parts[0])):
        set_gradients(list(weights.parameters()), 1)
        one.step()
    for a, b in zip(model.parameters(), target.model_parts[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_torch_muon_momentum_is_the_same_mean(tmp_path):
    model = _Model()
    named = [("layers.0.wq.weight", model.layers["0"].wq.weight)]
    theirs = torch.optim.Muon(named, lr=0.1, weight_decay=0.0)
    for step in range(2):
        set_gradients([named[0][1]], step)
        theirs.step()
    flat = get_flat_optim_state_dict(theirs)
    target = _container("Muon", copy.deepcopy(model))
    _save({**target.state_dict(), **flat}, tmp_path)
    _load(target, tmp_path)
    loaded = _state(target)["layers.0.wq.weight"]["momentum_buffer"]
    assert torch.equal(loaded, theirs.state[named[0][1]]["momentum_buffer"])
    # Both advance it alike.
    for weight, one in ((named[0][1], theirs), (None, target.optimizers[0])):
        params = [weight] if weight is not None else list(target.model_parts[0].parameters())
        g = generator(77)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g) if p.shape == named[0][1].shape else None
        one.step()
    advanced = _state(target)["layers.0.wq.weight"]["momentum_buffer"]
    expected = theirs.state[named[0][1]]["momentum_buffer"]
    # lerp, once of a float32 and once of a Python float.
    torch.testing.assert_close(advanced, expected, rtol=1e-6, atol=1e-7)


def test_option_added_later_does_not_break_an_old_checkpoint(tmp_path):
    source = _trained("NorMuon")
    old = {k: v for k, v in source.state_dict().items() if not k.endswith((".beta2", ".maximize"))}
    _save(old, tmp_path)
    target = _container("NorMuon", beta2=0.5)
    assert _load(target, tmp_path) == []
    assert target.optimizers[0].param_groups[1]["beta2"] == 0.5
    torch.testing.assert_close(_state(target), _state(source), rtol=0, atol=0)


def test_option_taken_away_does_not_break_an_old_checkpoint(tmp_path):
    source = _trained("Muon")
    flat = source.state_dict()
    flat |= {f"param_groups.{name}.gone_option": 3 for name in _state(source)}
    _save(flat, tmp_path)
    target = _container("Muon")
    assert _load(target, tmp_path) == []
    assert "gone_option" not in target.optimizers[0].param_groups[0]


def _wider(flat: dict[str, Any]) -> dict[str, Any]:
    return _trained("Muon", model=_Model(width=5)).state_dict()


def _without(*endings: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda flat: {k: v for k, v in flat.items() if not k.endswith(endings)}


def _integers(flat: dict[str, Any]) -> dict[str, Any]:
    return {k: v.long() if k.endswith("wq.weight.momentum_buffer") else v for k, v in flat.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_wider, r"exp_avg is \(9, 4\) float32 here, and exp_avg is \(9, 5\) float32 in the check"),
        (
            _integers,
            r"layers\.0\.wq\.weight: momentum_buffer is \(6, 4\) float32 here, and momentum_buffer "
            r"is \(6, 4\) int64 in the checkpoint",
        ),
        (_without("norm.weight.exp_avg_sq"), r"norm\.weight: the checkpoint lacks exp_avg_sq"),
        (
            _without("wq.weight.momentum_buffer"),
            r"no optimizer state of layers\.0\.wq\.weight; .*exclude_from_loading",
        ),
    ],
)
@pytest.mark.parametrize("new", ["Muon", "NorMuon", "AdamW"])
def test_state_that_does_not_fit_is_refused_before_anything_is_touched(
    change, message, new, tmp_path
):
    if new == "AdamW":
        message = message.replace("momentum_buffer is", "exp_avg is", 1)
        message = message.replace("and momentum_buffer", "and its counterpart")
    _save(change(_trained("Muon").state_dict()), tmp_path)
    target = _trained(new)
    before = snapshot(target.optimizers[0])
    with pytest.raises(CheckpointException, match=message):
        _load(target, tmp_path)
    assert_same(snapshot(target.optimizers[0]), before)


@pytest.mark.parametrize(("saved", "here"), [(2, 1), (1, 2), (2, 2)])
def test_another_number_of_data_ranks_is_refused_in_words(saved, here, tmp_path):
    # What torchtitan's data loader puts into a checkpoint: an entry a rank, and their number.
    loaders = {f"dp_rank_{rank}": b"" for rank in range(saved)} | {"world_size": saved}
    dcp.save({"dataloader": loaders}, checkpoint_id=tmp_path, no_dist=True)
    live = {"dataloader": {f"dp_rank_{here - 1}": b"", "world_size": here}}
    planner = CrossingPlanner("zeros", tmp_path)
    if saved == here:
        dcp.load(live, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        return
    message = rf"{saved} data-parallel ranks saved it and this run has {here}.*exclude_from_loading"
    with pytest.raises(CheckpointException, match=message):
        dcp.load(live, checkpoint_id=tmp_path, planner=planner, no_dist=True)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damaged_file_is_named_before_anything_is_touched(damage, tmp_path):
    _save(_trained("Muon").state_dict(), tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    if damage == "missing":
        file.unlink()
        message = rf"the file {file.name} is missing"
    else:
        kept = size - 1 if damage == "truncated" else 0
        file.write_bytes(file.read_bytes()[:kept])
        message = rf"the file {file.name} has {kept} bytes and should have {size}"
    target = _trained("Muon")
    before = snapshot(target.optimizers[0])
    with pytest.raises(CheckpointException, match=message):
        _load(target, tmp_path)
    assert_same(snapshot(target.optimizers[0]), before)


def test_our_code_unpickles_nothing_itself():
    """DCP reads pickles; the package adds no reader of its own."""
    root = Path(__file__).parents[2] / "titan_muon"
    for path in root.rglob("*.py"):
        text = path.read_text()
        for call in ("pickle.load", "torch.load(", "marshal.load", "dill.", "joblib.", "eval("):
            assert call not in text, (path, call)


def test_config_of_the_manager_keeps_every_field():
    from torchtitan.components.checkpoint import CheckpointManager

    stock = CheckpointManager.Config(enable=True, interval=7, async_mode="async", load_step=3)
    ours = with_crossing(stock)
    assert type(ours) is MuonCheckpointManager.Config
    assert all(getattr(ours, k) == getattr(stock, k) for k in ("enable", "interval", "async_mode"))
    assert ours.load_step == 3
    assert with_crossing(ours) is ours


@pytest.mark.slow
def test_trainers_go_on_with_another_optimizer_on_another_mesh(tmp_path):
    """torchtitan's own AdamW, then NorMuon with tensor parallelism, then AdamW again."""
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("crossing_runs.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    with (tmp_path / "log").open("w") as file:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-5000:]
    results = {n: json.loads((tmp_path / f"{n}.json").read_text()) for n in ("normuon", "adamw")}
    for rank in results["normuon"]:
        assert len(rank["losses"]) == 2
        # Ten matrices; all weights, and AdamW's state of the seven other parameters.
        assert len(rank["exp_avg"]) == len(rank["zero"]) == 10
        assert {name.partition("/")[2] for name in rank["exp_avg"]} == {"momentum_buffer"}
        assert {name.partition("/")[2] for name in rank["zero"]} == {"second_moment_buffer"}
        assert len(rank["same"]) == 17 + 3 * 7
        assert rank["other"] == []
        assert (
            "Optimizer state of 10 parameters: momentum_buffer starts from exp_avg."
            in (rank["lines"])
        )
    for rank in results["adamw"]:
        assert len(rank["losses"]) == 1
        assert len(rank["zero"]) == 3 * 10
        assert len(rank["same"]) == 17 + 3 * 7
        assert rank["other"] == rank["exp_avg"] == []
        assert "exp_avg, exp_avg_sq and step start at zero" in rank["lines"][0]
