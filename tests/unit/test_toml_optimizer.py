"""``[optimizer]``: recipes, flags over them, and exceptions by pattern."""

import pytest

pytest.importorskip("torchtitan")

from torch import nn

from tests.helpers.toml_files import MODEL, load, table
from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.optimizers_container import assign_all
from titan_muon.integration.start_table import unused_options
from titan_muon.integration.toml import Selection, load_train_config
from titan_muon.integration.toml_optimizer import (
    OptimizerRequest,
    build_optimizer,
    recipe_names,
)
from titan_muon.integration.toml_place import ConfigError, Place


@pytest.mark.parametrize(
    "name", ["muon", "MUON", "NorMuon", "normuon", "AdaMuon", "ADAMUON", "AuRORA", "adamW", "ADAM"]
)
def test_names_in_any_letter_case_choose_their_recipe(tmp_path, name):
    config, _ = load(tmp_path, table("optimizer", f"name = '{name}'"))
    assert isinstance(config.optimizer, OptimizerConfig)
    assert config.optimizer.name.lower() == name.lower()
    muon_family = name.lower() not in ("adamw", "adam")
    assert config.optimizer.adjust_lr_fn == ("match_rms_adamw" if muon_family else None)
    assert config.optimizer.lr == 3e-4


def test_without_optimizer_table_the_model_keeps_its_own(tmp_path):
    config, _ = load(tmp_path, "")
    assert config.optimizer.param_groups[0].optimizer_name == "AdamW"


def test_empty_optimizer_table_asks_for_the_default(tmp_path):
    config, _ = load(tmp_path, "[optimizer]")
    assert isinstance(config.optimizer, OptimizerConfig)
    assert config.optimizer.name == "Muon"


def test_optimizer_table_replaces_the_groups_of_the_model(tmp_path):
    text = """
[optimizer]
split = [256, 256, 256]
ns_method = [[3.0, -4.0, 2.0], [2.0, -1.5, 0.5]]
[optimizer.adamw]
betas = [0.8, 0.9]
[[optimizer.param_groups]]
pattern = 'layers\\.0\\.'
name = "adamw"
lr = 1e-4
[[optimizer.param_groups]]
pattern = "w1"
name = "NorMuon"
split = { kind = "blocks", rows = 64 }
"""
    optimizer = load(tmp_path, text)[0].optimizer
    assert optimizer.name == "Muon"
    assert optimizer.split == [256, 256, 256]
    assert optimizer.ns_method == [[3.0, -4.0, 2.0], [2.0, -1.5, 0.5]]
    assert optimizer.adamw.betas == (0.8, 0.9)
    first, second = optimizer.param_groups
    assert (first.pattern, first.optimizer_name) == (r"layers\.0\.", "AdamW")
    assert first.optimizer_kwargs == {"lr": 1e-4}
    assert second.optimizer_kwargs == {"split": {"kind": "blocks", "rows": 64}}


@pytest.mark.parametrize("flag", [None, "normuon"])
def test_groups_without_name_leave_parameters_with_their_algorithm(tmp_path, flag):
    text = table("[optimizer.param_groups]", "pattern = 'wo|norm|embed'", "lr = 0.5", "ns_steps=3")
    chosen = OptimizerRequest(name=flag) if flag else OptimizerRequest()
    file = tmp_path / "run.toml"
    file.write_text(MODEL + text)
    config, _ = load_train_config(Selection(file=str(file), optimizer=chosen))
    model = nn.ModuleDict({"wo": nn.Linear(8, 8), "wk": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    model["tok_embeddings"] = nn.Embedding(8, 8)
    found = {a.name: a for a in assign_all(config.optimizer, [model])}
    assert found["wo.weight"].algorithm == found["wk.weight"].algorithm == (flag or "muon")
    assert found["norm.weight"].algorithm == found["tok_embeddings.weight"].algorithm == "adamw"
    lrs = {name: item.options["lr"] for name, item in found.items() if not name.endswith("bias")}
    assert lrs == dict.fromkeys(lrs, 0.5) | {"wk.weight": config.optimizer.lr}
    assert found["wo.weight"].options["ns_steps"] == 3
    assert "ns_steps" not in found["norm.weight"].options
    assert unused_options(config.optimizer, [found["norm.weight"]]) == [
        "ns_steps of pattern 'wo|norm|embed'"
    ]


def test_foreign_spelling_in_a_group_says_ours(tmp_path):
    text = table("[optimizer.param_groups]", "pattern = 'norm'", "algorithm = 'adamw'")
    with pytest.raises(ConfigError, match=r"algorithm is not an option; write name\."):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (OptimizerRequest(recipe="moun"), 'command line: [optimizer] recipe = "moun"'),
        (OptimizerRequest(recipe="./r.toml"), 'command line: [optimizer] recipe = "./r.toml"'),
        (OptimizerRequest(imports=["no_such"]), "command line: [optimizer] imports"),
        (OptimizerRequest(name="Moun"), "command line: [optimizer] name"),
    ],
)
def test_mistakes_in_a_flag_do_not_name_the_file(tmp_path, chosen, message):
    file = tmp_path / "run.toml"
    file.write_text(MODEL + table("optimizer", "lr = 0.5"))
    with pytest.raises(ConfigError) as raised:
        load_train_config(Selection(file=str(file), optimizer=chosen))
    assert str(raised.value).startswith(message)


def test_recipe_beside_the_file_and_none(tmp_path):
    recipe = "[optimizer]\nname = 'NorMuon'\nlr = 0.5\n[optimizer.adamw]\nlr = 0.25\n"
    (tmp_path / "mine.toml").write_text(recipe)
    text = table("optimizer", "recipe = 'mine.toml'", "momentum = 0.5")
    optimizer = load(tmp_path, text)[0].optimizer
    assert (optimizer.name, optimizer.lr, optimizer.adamw.lr) == ("NorMuon", 0.5, 0.25)
    assert optimizer.momentum == 0.5
    assert optimizer.adjust_lr_fn is None
    flag = Selection(file=str(tmp_path / "x.toml"), optimizer=OptimizerRequest(recipe="mine.toml"))
    assert load_train_config(flag)[0].optimizer.lr == 0.5
    assert load(tmp_path, table("optimizer", "recipe = 'none'"))[0].optimizer.lr is None
    assert load(tmp_path, table("optimizer", "recipe = 'AdamW'"))[0].optimizer.name == "AdamW"


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("[training]\nsteps = 1", ("[training]", "optimizer")),
        ("", ("[optimizer]", "none")),
        ("[optimizer]\nrecipe = 'muon'", ("another",)),
        ("[optimizer]\nname = 'Moon'", ("name", "'Moon'")),
        ("[optimizer]\nlrr = 1.0", ("lrr", "'lr'")),
        ("[optimizer]\nlr = -1.0", ("lr = -1.0",)),
    ],
)
def test_mistakes_in_a_recipe_name_the_recipe(tmp_path, recipe, parts):
    (tmp_path / "r.toml").write_text(recipe)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, table("optimizer", "recipe = './r.toml'"))
    for part in ("r.toml", *parts):
        assert part in str(raised.value)
    assert "x.toml" not in str(raised.value)


def test_every_recipe_loads():
    assert recipe_names() == ["adam", "adamuon", "adamw", "aurora", "muon", "normuon"]
    for recipe in recipe_names():
        request = OptimizerRequest(recipe=recipe)
        config = build_optimizer(request, None, Place("x.toml", "optimizer"))
        assert config.name.lower() == recipe
