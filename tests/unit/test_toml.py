"""Train config files: values arrive, and every kind of mistake has its one message."""

import dataclasses
import re

import pytest

pytest.importorskip("torchtitan")

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import InterleavedHuggingFaceTextDataLoader

from tests.helpers.toml_files import MODEL, load, table
from titan_muon.integration.toml import Selection, load_train_config
from titan_muon.integration.toml_check import field_types, lay_over
from titan_muon.integration.toml_model import registry_function
from titan_muon.integration.toml_place import ConfigError, Place

# What is written -> parts of the message, besides the file's name.
WRONG = {
    "unknown table": (table("trainig", "steps = 1"), "[trainig]", "'training'", "parallelism"),
    "unknown nested table": (
        table("validator.dataloder", "dataset = 'c4'"),
        "[validator.dataloder]",
        "'dataloader'",
        "freq",
    ),
    "unknown top-level key": ("dump_foldr = 'x'", "dump_foldr is not a key", "'dump_folder'"),
    "model_spec": (table("model_spec", "name = 'x'"), "[model_spec]", "model"),
    "unknown key": (table("training", "stepz = 1"), "[training] stepz", "'steps'", "seq_len"),
    "unknown key far from all": (table("compile", "xyzzy = 1"), "[compile] xyzzy", "backend"),
    "table is a number": ("training = 5", "training = 5", "[training]"),
    "int is a string": (table("training", 'steps = "10"'), '[training] steps = "10"', "an integer"),
    "int is a float": (table("training", "steps = 1.5"), "steps = 1.5", "an integer", "a float"),
    "int is a boolean": (table("training", "steps = true"), "steps = true", "an integer"),
    "int is a date": (table("training", "steps = 2024-01-01"), "an integer", "a date"),
    "float is a string": (
        table("lr_scheduler", 'min_lr_factor = "0.1"'),
        "[lr_scheduler] min_lr_factor",
        "a number",
        "a string",
    ),
    "boolean is an integer": (
        table("compile", "enable = 1"),
        "[compile] enable = 1",
        "true or false",
    ),
    "string is a number": (table("dataloader", "dataset = 4"), "dataset = 4", "a string"),
    "optional is of another type": (
        table("lr_scheduler", 'decay_ratio = "big"'),
        'decay_ratio = "big"',
        "a number",
    ),
    "union of numbers is a string": (table("training", 'max_norm = "1"'), "max_norm", "a number"),
    "literal": (
        table("training", 'dtype = "bfloat"'),
        '[training] dtype = "bfloat"',
        '"bfloat16", "float32"',
        "'bfloat16'",
    ),
    "literal with one value": (
        table("training", 'mixed_precision_reduce = "bfloat16"'),
        'must be "float32"',
    ),
    "list is a string": (table("compile", 'components = "model"'), "components", "an array"),
    "list item": (table("compile", "components = ['model', 3]"), "components[1] = 3", "a string"),
    "nested list item": (
        table("parallelism", "module_fqns_per_model_part = [['a'], 'b']"),
        "module_fqns_per_model_part[1]",
        "an array",
    ),
    "python object": (
        table("profiler", "trace_post_processor = 'f'"),
        "[profiler] trace_post_processor",
    ),
    "activation checkpointing mode": (
        table("activation_checkpoint", 'mode = "selectiv"'),
        '[activation_checkpoint] mode = "selectiv"',
        '"selective", "full", "memory-budget", "none"',
        "'selective'",
    ),
    "activation checkpointing key": (
        table("activation_checkpoint", 'mode = "full"', "memory_budgt = 0.5"),
        "[activation_checkpoint] memory_budgt",
        "'memory_budget'",
    ),
    "activation checkpointing is a string": (
        'activation_checkpoint = "full"',
        "activation_checkpoint",
        "[activation_checkpoint]",
    ),
    "optimizer name": (
        table("optimizer", 'name = "Muom"'),
        "[optimizer] name",
        "'Muom'",
        "'muon'",
        "Muon, NorMuon, AdaMuon, Aurora, AdamW, Adam",
    ),
    "optimizer name of another type": (table("optimizer", "name = 3"), "name = 3", "a string"),
    "optimizer is a string": ('optimizer = "Muon"', "[optimizer]", "a table"),
    "optimizer option": (
        table("optimizer", 'name = "Muon"', "momentun = 0.9"),
        "[optimizer] momentun is not an option of Muon",
        "'momentum'",
        "adjust_lr_fn",
    ),
    "torch's kernels": (
        table("optimizer", "foreach = true"),
        '[optimizer] foreach: write implementation = "foreach"',
    ),
    "optimizer option in another package's spelling": (
        table("optimizer", "mu = 0.9"),
        "[optimizer] mu is not an option of Muon",
        "'momentum'",
    ),
    "optimizer option type": (table("optimizer", 'lr = "3e-4"'), 'lr = "3e-4"', "a number"),
    "optimizer option range": (
        table("optimizer", "momentum = 1.5"),
        "[optimizer]: momentum = 1.5",
        "[0, 1)",
    ),
    "optimizer option choice": (
        table("optimizer", 'adjust_lr_fn = "rms"'),
        "adjust_lr_fn = 'rms'",
        "match_rms_adamw",
    ),
    "schedule": (table("optimizer", 'ns_method = "polar"'), "'polar'", "polar_express"),
    "steps outside the schedule": (table("optimizer", "ns_steps = 9"), "ns_steps", "1..5", "9"),
    "betas": (
        table("optimizer.adamw", "betas = [0.9]"),
        "[optimizer.adamw] betas = [0.9] must be an array of 2",
        "not an array of 1.",
    ),
    "adamw option": (
        table("optimizer.adamw", "momentum = 0.9"),
        "[optimizer.adamw] momentum",
        "weight_decay",
    ),
    "adamw option range": (table("optimizer.adamw", "eps = -1.0"), "[optimizer.adamw]: eps = -1.0"),
    "table in optimizer": (table("optimizer.adam", "lr = 1.0"), "[optimizer.adam]", "'adamw'"),
    "third-party option": (
        table("optimizer.options", "rank = 3"),
        "[optimizer]: rank is not an option of Muon",
    ),
    "imports": (table("optimizer", "imports = ['no_such_pkg']"), "imports", "'no_such_pkg'"),
    "recipe": (table("optimizer", 'recipe = "moun"'), '"moun" is not a recipe', "'muon'", "adamw"),
    "recipe path": (
        table("optimizer", 'recipe = "./r.toml"'),
        '[optimizer] recipe = "./r.toml": no such file',
    ),
    "group without pattern": (
        table("[optimizer.param_groups]", "name = 'AdamW'"),
        "[optimizer.param_groups.0] has no pattern",
    ),
    "group name": (
        table("[optimizer.param_groups]", "pattern = 'wo'", "name = 'AdmaW'"),
        "[optimizer.param_groups.0] name",
        "'AdmaW'",
        "'adamw'",
    ),
    "group pattern": (
        table("[optimizer.param_groups]", "pattern = 'wo('", "name = 'AdamW'"),
        "[optimizer.param_groups.0]",
        "'wo('",
        "regular expression",
    ),
    "group option": (
        table("[optimizer.param_groups]", "pattern = 'wo'", "name = 'AdamW'", "bettas = [0, 0]"),
        "[optimizer.param_groups.0]: bettas is not an option of AdamW",
        "'betas'",
    ),
    "group option range": (
        table("[optimizer.param_groups]", "pattern = 'wo'", "name = 'Muon'", "ns_steps = 6"),
        "[optimizer.param_groups.0]",
        "1..5",
    ),
    "groups are a table": (
        table("optimizer.param_groups", "pattern = 'wo'"),
        "[[optimizer.param_groups]]",
    ),
    "DistMuon's factory arguments": (
        table("optimizer.optimizer_factory_kwargs_by_name.DistMuon", "x = 1"),
        "optimizer_factory_kwargs_by_name",
    ),
    "old and new name": (
        table("training", "dataset = 'c4'") + "\n" + table("dataloader", "dataset = 'c4'"),
        "[training] dataset",
        "[dataloader] dataset",
        "keep one",
    ),
    "two old names": (
        table("validation", "enable = true", "enabled = true"),
        "[validation] enable",
        "[validation] enabled",
    ),
    "type under an old name": (
        table("training", "dataset = 4"),
        "[dataloader] dataset (written as [training] dataset) = 4",
        "a string",
    ),
    "broken TOML": ("steps = = 1", "not valid TOML", "line 1"),
    "key twice": ("a = 1\na = 2", "not valid TOML", "line 2"),
}


@pytest.mark.parametrize(("text", "parts"), [(w[0], w[1:]) for w in WRONG.values()], ids=WRONG)
def test_one_message(tmp_path, text, parts):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    message = str(raised.value)
    for part in ("x.toml" if "r.toml" not in text else "r.toml", *parts):
        assert part in message
    assert "\n" not in message


WRONG_MODEL = {
    "no table": ("", "[model] is missing", "--module"),
    "no name": ("[model]\nflavor = '8B'", "[model] is missing", "llama3"),
    "no flavor": ("[model]\nname = 'llama3'", "[model] flavor is missing", "llama3_8b"),
    "name": ("[model]\nname = 'lama3'\nflavor = '8B'", '"lama3"', "'llama3'", "deepseek_v3"),
    "empty name": ("[model]\nname = ''\nflavor = '8B'", '"" is neither a torchtitan model'),
    "path": ("[model]\nname = '../x'\nflavor = '8B'", '"../x" is neither a torchtitan model'),
    "no functions": ("[model]\nname = 'os'\nconfig = 'x'", "Config functions: none."),
    "flavor": (
        "[model]\nname = 'llama3'\nflavor = '7B'",
        '[model] flavor = "7B" is not a flavor of "llama3"',
        "'llama3_70b'",
        "llama3_405b",
    ),
    "config": (
        "[model]\nname = 'llama3'\nconfig = 'llama3_debug'",
        '"llama3_debug" is not a config function',
        "'llama3_debugmodel'",
    ),
    "config that is imported there": (
        "[model]\nname = 'llama3'\nconfig = 'default_adamw'",
        '"default_adamw" is not a config function',
    ),
    "flavor and config": ("[model]\nname = 'llama3'\nflavor = '8B'\nconfig = 'x'", "keep one"),
    "unknown key": ("[model]\nname = 'llama3'\nflavour = '8B'", "flavour", "'flavor'"),
    "type": ("[model]\nname = 3", "[model] name = 3", "a string"),
    "table is a string": ("model = 'llama3'", "model", "[model]"),
}


@pytest.mark.parametrize(
    ("model", "parts"), [(w[0], w[1:]) for w in WRONG_MODEL.values()], ids=WRONG_MODEL
)
def test_one_message_about_the_model(tmp_path, model, parts):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "", model)
    for part in ("x.toml", *parts):
        assert part in str(raised.value)


def test_a_broken_module_is_named_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="broken_model.*not_installed_anywhere"):
        load(tmp_path, "", "[model]\nname = 'broken_model'\nconfig = 'x'")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "muon.toml").touch()
    with pytest.raises(ConfigError, match=r"moun\.toml: no such file, did you mean 'muon\.toml'"):
        load_train_config(Selection(file=str(tmp_path / "moun.toml")))
    with pytest.raises(ConfigError, match="there is no folder"):
        load_train_config(Selection(file=str(tmp_path / "none" / "x.toml")))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_train_config(Selection(file=str(tmp_path)))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_train_config(Selection(file=str(tmp_path / "latin.toml")))


def test_values_of_every_kind_arrive(tmp_path):
    text = """
dump_folder = "there"
[training]
steps = 7
max_norm = 2
dtype = "bfloat16"
[lr_scheduler]
decay_ratio = "None"
min_lr_factor = 1
[parallelism]
module_fqns_per_model_part = [["a", "b"], ["c"]]
context_parallel_load_balancer = "None"
[profiler]
profiler_repeat = 3
[loss]
num_chunks = 2
[validator]
enable = true
[validator.dataloader]
dataset = "c4"
[override]
imports = ["a.b", ["c.d", { lr = 1.0 }]]
"""
    config, notes = load(tmp_path, text)
    assert config.dump_folder == "there"
    assert config.training.steps == 7
    assert config.training.max_norm == 2
    assert type(config.training.max_norm) is int
    assert config.training.dtype == "bfloat16"
    # The registry function says 0.8 and "headtail".
    assert config.lr_scheduler.decay_ratio is None
    assert config.parallelism.context_parallel_load_balancer is None
    assert type(config.lr_scheduler.min_lr_factor) is float
    assert config.parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]
    assert config.profiler.profiler_repeat == 3
    assert config.loss.num_chunks == 2
    assert config.loss.loss_fn.global_vocab_size == 2048
    assert config.validator.enable
    assert config.validator.dataloader.dataset == "c4"
    assert config.validator.dataloader.infinite is False
    assert config.override.imports == ["a.b", ("c.d", {"lr": 1.0})]
    assert notes == []


@pytest.mark.parametrize(
    ("mode", "cls"),
    [
        ("full", FullAC.Config),
        ("memory-budget", MemoryBudgetAC.Config),
        ("memory_budget", MemoryBudgetAC.Config),
        ("None", type(None)),
        ("selective", SelectiveAC.Config),
    ],
)
def test_activation_checkpoint_mode(tmp_path, mode, cls):
    config, _ = load(tmp_path, table("activation_checkpoint", f"mode = '{mode}'"))
    assert type(config.activation_checkpoint) is cls


def settable(value) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(settable(item) for item in value)
    return isinstance(value, bool | int | float | str) or value is None


def as_toml(value):
    """Return what tomli would read for a field's own value."""
    if isinstance(value, list | tuple):
        return [as_toml(item) for item in value]
    return "None" if value is None else value


def set_every_field(config, prefix: str = "") -> int:
    count = 0
    for name in field_types(config):
        value = getattr(config, name)
        if name in ("model_spec", "optimizer", "trace_post_processor"):
            continue
        if dataclasses.is_dataclass(value):
            count += set_every_field(value, f"{prefix}{name}.")
        elif settable(value):
            lay_over(config, {name: as_toml(value)}, Place("x.toml", prefix))
            result = getattr(config, name)
            assert (result, type(result)) == (value, type(value)), prefix + name
            count += 1
    return count


@pytest.mark.parametrize(
    ("name", "flavor"), [("llama3", "70B"), ("deepseek_v3", "debugmodel"), ("qwen3", "0.6B")]
)
def test_every_field_can_be_set_to_the_value_it_has(name, flavor):
    config = registry_function({}, {"name": name, "flavor": flavor}, Place("x.toml"))()
    # 0.3.0 has 110 such fields for llama3; the count catches a walk that goes nowhere.
    assert set_every_field(config) > 80


def test_tables_of_a_list_of_configs():
    loader = InterleavedHuggingFaceTextDataLoader.Config()
    sources = [{"dataset": "c4", "weight": 2}, {"dataset": "c4_test", "infinite": True}]
    place = Place("x.toml", "dataloader")
    lay_over(loader, {"sources": sources}, place)
    assert [(s.dataset, s.weight) for s in loader.sources] == [("c4", 2.0), ("c4_test", 1)]
    with pytest.raises(ConfigError, match=r"\[dataloader\.sources\[1\]\] wieght.*'weight'"):
        lay_over(loader, {"sources": [{}, {"wieght": 2}]}, place)
    with pytest.raises(ConfigError, match=r"sources\[0\] = 3 must be a table"):
        lay_over(loader, {"sources": [3]}, place)


def test_a_config_that_this_machine_cannot_build(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text("def big():\n    raise ValueError('needs a big GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="big cannot be built .* needs a big GPU"):
        load(tmp_path, "", "[model]\nname = 'picky'\nconfig = 'big'")


def test_byte_order_mark(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("\ufeff" + MODEL, encoding="utf-8")
    assert load_train_config(Selection(file=str(path)))[0].model_spec.name == "llama3"


def test_activation_checkpoint_keys(tmp_path):
    text = table("activation_checkpoint", "mode = 'full'", "debug = true", "memory_budget = 0.3")
    config, notes = load(tmp_path, text)
    assert config.activation_checkpoint == FullAC.Config(debug=True)
    assert len(notes) == 1
    assert re.search(r'\[activation_checkpoint\] memory_budget has no effect.*"full"', notes[0])


@pytest.mark.parametrize(
    ("name", "flavor", "function"),
    [
        ("llama3", "8B", "llama3_8b"),
        ("llama3", "debugmodel", "llama3_debugmodel"),
        ("llama3", "debugmodel_ce_loss", "llama3_debugmodel_ce_loss"),
        ("qwen3", "0.6B", "qwen3_0_6b"),
        ("deepseek_v3", "16B", "deepseek_v3_16b"),
        ("torchtitan.models.llama3", "8b", "llama3_8b"),
    ],
)
def test_flavors(name, flavor, function):
    found = registry_function({}, {"name": name, "flavor": flavor}, Place("x.toml"))
    assert found.__name__ == function


def test_flavor_without_a_config_function():
    small = registry_function({}, {"name": "llama3", "flavor": "debugmodel"}, Place("x.toml"))()
    large = registry_function({}, {"name": "llama3", "flavor": "1B"}, Place("x.toml"))()
    assert (large.model_spec.model.dim, len(large.model_spec.model.layers)) == (2048, 16)
    assert large.loss.loss_fn.global_vocab_size == large.model_spec.model.vocab_size == 128256
    assert large.training == small.training


def test_flavor_by_config_function(tmp_path):
    model = "[model]\nname = 'llama3'\nconfig = 'llama3_debugmodel_ce_loss'\n"
    config, _ = load(tmp_path, "", model)
    assert type(config.loss).__qualname__ == "CrossEntropyLoss.Config"
