"""The optimizer config: what it hands to the optimizer, and the doors that lead to it."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import apply_overrides
from torchtitan.config.override import OverrideConfig, parse_cli_imports
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from titan_muon.integration import config_registry
from titan_muon.integration.config import AdamWConfig, OptimizerConfig
from titan_muon.integration.manager import TrainConfigManager
from titan_muon.integration.optimizers_container import MuonOptimizersContainer
from titan_muon.integration.toml import Selection, load_train_config
from titan_muon.integration.toml_optimizer import optimizer_config
from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim.algorithms import algorithm_names, all_option_names, get_algorithm

ROOT = Path(__file__).parents[2]
FUSED = {"fused": True, "foreach": False}


def test_every_option_has_a_field_and_every_field_an_option():
    # torchtitan's implementation stands for fused and foreach.
    wanted = {
        key
        for name in ("muon", "normuon", "adamuon", "aurora", "adamw", "adam")
        for key in get_algorithm(name).options
    } - {"fused", "foreach"}
    other = {f.name for f in dataclasses.fields(OptimizersContainer.Config)}
    other |= {"name", "split_fused", "momentum_from", "qk_clip_threshold"}
    other |= {"adamw", "imports", "options"}
    assert {f.name for f in dataclasses.fields(OptimizerConfig)} - other == wanted
    assert {f.name for f in dataclasses.fields(AdamWConfig)} <= set(get_algorithm("adamw").options)


def test_unset_options_are_left_to_the_algorithm():
    config = OptimizerConfig()
    assert config.matrix_spec() == ("muon", {})
    assert config.rest_spec() == ("adamw", FUSED)
    assert config.ignored_options() == []


def test_rest_inherits_lr_and_decay_and_nothing_else():
    config = OptimizerConfig(
        name="normuon", lr=0.02, weight_decay=0.3, maximize=True, beta2=0.9, eps=1e-6
    )
    matrix = {"lr": 0.02, "weight_decay": 0.3, "maximize": True, "beta2": 0.9}
    assert config.matrix_spec() == ("normuon", matrix)
    rest = {"lr": 0.02, "weight_decay": 0.3, "maximize": True, **FUSED}
    assert config.rest_spec() == ("adamw", rest)
    config.adamw = AdamWConfig(lr=1e-3, betas=(0.8, 0.9))
    rest.update(lr=1e-3, betas=(0.8, 0.9))
    assert config.rest_spec() == ("adamw", rest)
    assert config.ignored_options() == ["eps"]


@pytest.mark.parametrize(("name", "algorithm"), [("AdamW", "adamw"), ("adam", "adam")])
def test_the_same_config_as_adamw(name, algorithm):
    config = OptimizerConfig(
        name=name,
        lr=1e-3,
        momentum=0.9,
        ns_steps=3,
        betas=(0.8, 0.9),
        adamw=AdamWConfig(lr=1e-4),
    )
    config.check()
    options = {"lr": 1e-3, "betas": (0.8, 0.9), **FUSED}
    assert config.matrix_spec() == (algorithm, options)
    assert config.rest_spec() == (algorithm, {**options, "lr": 1e-4})
    assert config.ignored_options() == ["momentum", "ns_steps"]


@pytest.mark.parametrize(
    ("implementation", "kernels"),
    [
        ("fused", {"fused": True, "foreach": False}),
        ("foreach", {"fused": False, "foreach": True}),
        ("for-loop", {"fused": False, "foreach": False}),
        ("fused_opt_states_bf16", {"fused": True, "foreach": False, "state_dtype": "bfloat16"}),
    ],
)
def test_implementation_reaches_adamw_alone(implementation, kernels):
    config = OptimizerConfig(implementation=implementation)
    assert config.rest_spec() == ("adamw", kernels)
    assert config.matrix_spec() == ("muon", {})
    config.adamw.state_dtype = "float32"
    assert config.rest_spec()[1].get("state_dtype") == "float32"


def test_groups_start_from_what_their_algorithm_has_anyway():
    config = OptimizerConfig(lr=0.02, momentum=0.9, adamw=AdamWConfig(lr=1e-3, eps=1e-6))
    config.param_groups = [
        ParamGroupConfig(pattern="a", optimizer_name="adamw", optimizer_kwargs={"eps": 1e-5}),
        ParamGroupConfig(pattern="b", optimizer_name="NorMuon", optimizer_kwargs={"beta2": 0.5}),
        ParamGroupConfig(pattern="c", optimizer_name="Adam", optimizer_kwargs={"fused": False}),
    ]
    config.check()
    assert config.group_specs() == [
        ("a", "adamw", {"lr": 1e-3, "eps": 1e-5, **FUSED}),
        ("b", "normuon", {"lr": 0.02, "momentum": 0.9, "beta2": 0.5}),
        ("c", "adam", {"lr": 1e-3, "eps": 1e-6, "fused": False, "foreach": False}),
    ]
    config.beta2 = 0.7
    assert config.ignored_options() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dtype": "int8"},
        {"adamw": AdamWConfig(state_dtype="int4")},
        {
            "param_groups": [
                ParamGroupConfig(
                    pattern="wo", optimizer_name="Muon", optimizer_kwargs={"state_dtype": "float8"}
                )
            ]
        },
    ],
)
def test_quantised_state_without_torchao_is_refused_early(changes, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"optimizer: state_dtype = '.*' needs torchao: pip"):
        OptimizerConfig(**changes).check()
    OptimizerConfig(state_dtype="bfloat16").check()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"name": "Moun"}, ("optimizer.name", "'Moun'", "'muon'")),
        ({"lr": -1.0}, ("optimizer: lr = -1.0", ">= 0")),
        ({"options": {"rank": 3}}, ("rank is not an option of Muon",)),
        ({"imports": ["not_there"]}, ("optimizer.imports", "'not_there'", "PYTHONPATH")),
        ({"ns_method": "newton_schulz", "ns_steps": 11}, ("1..10", "11")),
        ({"split": {"kind": "blockz", "rows": 64}}, ("optimizer: split kind 'blockz'", "'blocks'")),
        ({"split": {"kind": "blocks"}}, ("needs the positive integer rows; got {}",)),
        ({"split": {"kind": "fused_dim", "rows": 2}}, ("needs nothing beside it",)),
        (
            {
                "param_groups": [
                    ParamGroupConfig(
                        pattern="wo",
                        optimizer_name="Muon",
                        optimizer_kwargs={"split": {"kind": "strided", "rows": 2}},
                    )
                ]
            },
            ("optimizer.param_groups.0: split kind 'strided' needs the positive integer count",),
        ),
        ({"adamw": AdamWConfig(betas=(0.9, 1.0))}, ("optimizer.adamw: betas",)),
        ({"optimizer_factory_kwargs_by_name": {"DistMuon": {}}}, ("DistMuon", "Leave it out")),
        (
            {
                "param_groups": [
                    ParamGroupConfig(
                        pattern="wo", optimizer_name="Muon", optimizer_kwargs={"nonfinite": "skip"}
                    )
                ]
            },
            ("optimizer.param_groups.0: nonfinite = 'skip'", "as a whole"),
        ),
        (
            {"param_groups": [ParamGroupConfig(pattern="(", optimizer_name="Muon")]},
            ("optimizer.param_groups.0", "regular expression"),
        ),
    ],
)
def test_check(changes, parts):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the parts are the match
        OptimizerConfig(**changes).check()
    for part in parts:
        assert part in str(raised.value)


def test_a_registered_algorithm(tmp_path, monkeypatch):
    (tmp_path / "third_party.py").write_text(
        "from titan_muon.optim.algorithms import MatrixAlgorithm, register_algorithm\n"
        "from titan_muon.optim.options import MATRIX_OPTIONS, Option\n"
        "class Ranked(MatrixAlgorithm):\n"
        "    name, title = 'ranked', 'Ranked'\n"
        "    options = {**MATRIX_OPTIONS, 'rank': Option(1, 'an int', lambda v: v >= 1, 'rank')}\n"
        "register_algorithm(Ranked())\n"
    )
    from titan_muon.optim.algorithms import base

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party", raising=False)
    options = {"imports": ["third_party"], "lr": 0.1, "options": {"rank": 3}}
    config = optimizer_config("RANKED", **options)
    recipe = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    assert config.matrix_spec() == ("ranked", {"lr": 0.1, "rank": 3, **recipe})
    bare = optimizer_config("ranked", "none", **options)
    assert bare.matrix_spec() == ("ranked", {"lr": 0.1, "rank": 3})
    flag = [
        "--optimizer.imports",
        "third_party",
        "--optimizer.name",
        "Ranked",
        "--training.steps=3",
    ]
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    manager = TrainConfigManager(cuda_graphs=False)
    swept = manager.parse_args([str(file), *flag, "--optimizer.options.rank", "7"])
    assert swept.optimizer.matrix_spec()[1]["rank"] == 7
    assert swept.training.steps == 3
    with pytest.raises(ConfigError, match=r"command line: \[optimizer\].*rank = 0"):
        manager.parse_args([str(file), *flag, "--optimizer.options.rank=0"])
    assert config.rest_spec()[0] == "adamw"
    assert "ranked" in algorithm_names()
    assert "rank" in all_option_names()
    with pytest.raises(ConfigError, match=r"rank belongs in \[optimizer\.options\]"):
        optimizer_config("ranked", imports=["third_party"], rank=3)
    with pytest.raises(ConfigError, match="rank = 0"):
        optimizer_config("ranked", imports=["third_party"], options={"rank": 0})


def overridden(*tokens: str):
    config = llama3_debugmodel()
    apply_overrides(OverrideConfig(imports=parse_cli_imports(list(tokens))), config)
    return config.optimizer


def test_override_door_on_a_stock_config():
    door = "titan_muon.integration.override.muon"
    optimizer = overridden(door)
    assert isinstance(optimizer, OptimizerConfig)
    assert optimizer._owner is MuonOptimizersContainer
    assert optimizer == optimizer_config("Muon")
    assert optimizer.param_groups == []
    kwargs = '{"name": "normuon", "lr": 1, "adamw": {"betas": [0.8, 0.9]}, "recipe": "muon"}'
    optimizer = overridden(f"{door}={kwargs}")
    assert (optimizer.name, optimizer.lr) == ("NorMuon", 1.0)
    assert optimizer.adamw.betas == (0.8, 0.9)
    assert optimizer.adjust_lr_fn == "match_rms_adamw"


def test_override_door_refuses_by_name():
    with pytest.raises(ConfigError, match=r"--override\.imports.*momentun.*'momentum'"):
        overridden('titan_muon.integration.override.muon={"momentun": 0.9}')


def test_override_door_keeps_the_implementation():
    config = llama3_debugmodel()
    config.optimizer.implementation = "foreach"
    imports = ["titan_muon.integration.override.muon"]
    apply_overrides(OverrideConfig(imports=imports), config)
    assert config.optimizer.implementation == "foreach"


@pytest.mark.parametrize("run", config_registry.__all__)
def test_registry_functions_equal_their_train_configs(run):
    file = ROOT / "train_configs" / f"{run}.toml"
    by_function = getattr(config_registry, run)().to_dict()
    by_file = load_train_config(Selection(file=str(file)))[0].to_dict()
    # The rest of a model spec holds functions, made anew by every call.
    one, other = by_function.pop("model_spec"), by_file.pop("model_spec")
    assert (one["name"], one["flavor"]) == (other["name"], other["flavor"])
    assert by_function == by_file


def test_torchtitan_finds_the_registry():
    from torchtitan.config import ConfigManager

    args = ["--module", "titan_muon.integration", "--config", "llama3_debug_normuon"]
    config, _ = ConfigManager()._load_config(args)
    assert config.optimizer.name == "NorMuon"
    # tyro must get the subclass and its own fields through.
    parsed = ConfigManager().parse_args([*args, "--optimizer.lr", "0.5"])
    assert isinstance(parsed.optimizer, OptimizerConfig)
    assert parsed.optimizer.lr == 0.5
    assert parsed.optimizer._owner is MuonOptimizersContainer


def test_a_built_package_holds_the_recipes(tmp_path):
    """configs/ is the only copy in the source; setup.py maps it into the wheel."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("titan_muon", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "built" / "titan_muon"
    recipes = {path.name: path.read_text() for path in (ROOT / "configs").iterdir()}
    assert {path.name: path.read_text() for path in (built / "recipes").iterdir()} == recipes
    assert (built / "py.typed").is_file()
    modules = {path.relative_to(tmp_path) for path in (tmp_path / "titan_muon").rglob("*.py")}
    for module in modules:
        assert (tmp_path / "built" / module).is_file()
