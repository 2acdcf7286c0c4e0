"""The command line of titan_muon.train: layers, flags that choose, help, mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from titan_muon import train
from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.data import register_datasets
from titan_muon.integration.manager import TrainConfigManager, split_flags
from titan_muon.integration.toml_place import ConfigError

ROOT = Path(__file__).parents[2]
DEBUG = ["--module", "llama3", "--config", "llama3_debugmodel"]


def parse(*args: str):
    register_datasets()
    # Off, as on a CPU: pipeline parallelism is refused with them.
    return TrainConfigManager(cuda_graphs=False).parse_args(list(args))


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a train config and names it on the command line."""

    def write(text: str) -> str:
        path = tmp_path / "x.toml"
        path.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n' + text)
        return f"--job.config_file={path}"

    return write


def test_a_missing_tokenizer_is_named_before_the_run(tmp_path):
    config = parse(*DEBUG, "--optimizer.name=Muon", f"--hf_assets_path={tmp_path / 'gone'}")
    with pytest.raises(ConfigError, match=r'hf_assets_path = ".*gone" is no folder.*python_stdlib'):
        train._prepare_data(config)
    config.hf_assets_path = str(tmp_path)
    train._prepare_data(config)


def test_four_layers(file, tmp_path):
    (tmp_path / "r.toml").write_text(
        '[optimizer]\nname = "NorMuon"\nlr = 0.2\nmomentum = 0.2\nbeta2 = 0.2\n'
    )
    text = """
[optimizer]
recipe = "./r.toml"
lr = 0.3
momentum = 0.3
[training]
steps = 30
seq_len = 300
"""
    config = parse(file(text), "--optimizer.lr=0.4", "--training.steps", "40")
    # Command line > train config > recipe > registry function.
    assert (config.optimizer.lr, config.training.steps) == (0.4, 40)
    assert (config.optimizer.momentum, config.training.seq_len) == (0.3, 300)
    assert (config.optimizer.name, config.optimizer.beta2) == ("NorMuon", 0.2)
    assert (config.training.local_batch_size, config.lr_scheduler.decay_ratio) == (8, 0.8)


def test_name_on_the_command_line_brings_its_recipe(file):
    text = file('[optimizer]\nname = "Muon"\nmomentum = 0.9\n[optimizer.adamw]\nlr = 1e-5\n')
    optimizer = parse(text).optimizer
    assert (optimizer.name, optimizer.adjust_lr_fn) == ("Muon", "match_rms_adamw")
    optimizer = parse(text, "--optimizer.name", "adamw").optimizer
    assert (optimizer.name, optimizer.adjust_lr_fn) == ("AdamW", None)
    assert optimizer.adamw.lr == 1e-5
    assert optimizer.matrix_spec()[0] == "adamw"
    assert optimizer.ignored_options() == ["momentum"]
    optimizer = parse(text, "--optimizer.recipe=none", "--optimizer.lr", "1").optimizer
    assert (optimizer.name, optimizer.lr, optimizer.adjust_lr_fn) == ("Muon", 1.0, None)


def test_options_of_every_kind_on_the_command_line(file):
    triples = "[[3.0,-4.0,2.0],[2.0,-1.5,0.5]]"
    args = ["--optimizer.ns-method", triples, "--optimizer.nesterov", "False"]
    args += ["--optimizer.adamw.betas", "0.8", "0.9", "--optimizer.ns_steps", "2"]
    optimizer = parse(file("[optimizer]\nsplit = [1, 2]"), *args).optimizer
    assert optimizer.ns_method == [[3.0, -4.0, 2.0], [2.0, -1.5, 0.5]]
    assert optimizer.nesterov is False
    assert optimizer.adamw.betas == (0.8, 0.9)
    assert optimizer.ns_steps == 2
    # Hidden on the command line, and so untouched by it.
    assert optimizer.split == [1, 2]


def test_torchtitans_own_way_in():
    config = parse(*DEBUG, "--training.steps=3")
    assert config.training.steps == 3
    assert not isinstance(config.optimizer, OptimizerConfig)
    config = parse(*DEBUG, "--optimizer.name", "NorMuon", "--optimizer.lr", "0.1")
    assert (config.optimizer.name, config.optimizer.lr) == ("NorMuon", 0.1)
    door = 'titan_muon.integration.override.muon={"name": "NorMuon"}'
    config = parse(*DEBUG, "--override.imports", door)
    assert config.override.imports == [
        ("titan_muon.integration.override.muon", {"name": "NorMuon"})
    ]


def test_model_flags_win_over_the_file(file):
    text = file("[training]\nsteps = 5")
    config = parse(text, "--model.name", "qwen3", "--model.flavor", "0.6B")
    assert (config.model_spec.name, config.model_spec.flavor) == ("qwen3", "0.6B")
    config = parse(text, "--config=llama3_debugmodel_ce_loss")
    assert type(config.loss).__qualname__ == "CrossEntropyLoss.Config"
    assert config.training.steps == 5


def test_activation_checkpoint_mode(file):
    text = file('[activation_checkpoint]\nmode = "full"\n')
    assert type(parse(text).activation_checkpoint).__qualname__ == "FullAC.Config"
    assert parse(text, "--activation-checkpoint.mode", "none").activation_checkpoint is None
    # torchtitan's own spelling.
    assert parse(text, "activation-checkpoint:none").activation_checkpoint is None


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--optimizer.nesterov"], True),
        (["--optimizer.no-nesterov"], False),
        (["--optimizer.nesterov", "false"], False),
        (["--optimizer.nesterov=True"], True),
        (["--optimizer.nesterov", "none"], None),
        (["--optimizer.nesterov", "activation-checkpoint:none"], True),
    ],
)
def test_switches_of_the_optimizer_are_spelled_as_torchtitans(args, value):
    chosen = [*DEBUG, "--optimizer.name", "Muon", "--optimizer.stochastic-rounding"]
    config = parse(*chosen, *args)
    assert config.optimizer.nesterov is value
    assert config.optimizer.stochastic_rounding is True


@pytest.mark.parametrize("wrong", [["nesterov", "maybe"], ["no-nesterov=true"], ["nesterov="]])
def test_switch_with_another_value(wrong):
    with pytest.raises(ConfigError, match=r"use --optimizer\.nesterov, --optimizer\.no-nesterov"):
        parse(*DEBUG, f"--optimizer.{wrong[0]}", *wrong[1:])


def test_older_flags_are_renamed():
    notes: list[str] = []
    args = ["--job.dump_folder", "here", "--training.batch-size=2", "--profiling.profile_freq=3"]
    _, rest = split_flags([*args, "--training.compile"], notes)
    assert rest == [
        "--dump_folder",
        "here",
        "--training.local_batch_size=2",
        "--profiler.profile_freq=3",
        "--compile.enable",
    ]
    assert notes[0] == "command line: --job.dump_folder is read as --dump_folder."
    assert len(notes) == 4


def test_cross_checks_wait_for_the_command_line(file):
    """A file may be wrong on its own and right with a flag; the flag must get its chance."""
    text = file("[compile]\nenable_async_tensor_parallel = true\n")
    assert parse(text, "--compile.enable").compile.enable_async_tensor_parallel
    with pytest.raises(SystemExit) as stopped:
        parse(text)
    assert stopped.value.code == 2


WRONG = {
    "nothing": ([], "[model] is missing"),
    "flag without value": (["--job.config_file"], "--job.config_file needs a value"),
    "flag before another": (["--module", "--config", "x"], "--module needs a value"),
    "two models": ([*DEBUG, "--model.name", "qwen3"], "--model.name chooses what"),
    "config and flavor": ([*DEBUG, "--model.flavor", "8B"], "--model.flavor chooses what"),
    "two files": (["--job.config_file=a", "--job.config_file=b"], "--job.config_file chooses"),
    "module": (["--module", "lama3", "--config", "x"], '--model.name = "lama3"', "'llama3'"),
    "function": ([*DEBUG[:2], "--config", "llama3_9b"], '"llama3_9b"', "'llama3_8b'"),
    "gone": ([*DEBUG, "--job.description", "x"], "--job.description is gone", "nothing reads"),
    "gone table": ([*DEBUG, "--float8.emulate"], "--float8.emulate is gone", "config ="),
    "name": ([*DEBUG, "--optimizer.name=Moun"], "command line: [optimizer] name", "'muon'"),
    "recipe": ([*DEBUG, "--optimizer.recipe", "moun"], '"moun" is not a recipe', "'muon'"),
    "mode": ([*DEBUG, "--activation_checkpoint.mode=ful"], "command line", '"ful"', "'full'"),
    "value": ([*DEBUG, "--optimizer.name=Muon", "--optimizer.momentum=2"], "momentum = 2.0"),
    "door": (
        [*DEBUG, "--override.imports", 'titan_muon.integration.override.muon={"momentun": 1}'],
        "--override.imports",
        "'momentum'",
    ),
    "dataset": ([*DEBUG, "--dataloader.dataset=c5_test"], '"c5_test"', "'c4_test'"),
    "validation": (
        [*DEBUG, "--validator.enable", "--validator.dataloader.dataset=c5"],
        "[validator.dataloader]",
        "python_stdlib",
    ),
}


@pytest.mark.parametrize(("args", "parts"), [(w[0], w[1:]) for w in WRONG.values()], ids=WRONG)
def test_one_message(args, parts):
    with pytest.raises(ConfigError) as raised:
        parse(*args)
    for part in parts:
        assert part in str(raised.value)


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "titan_muon.train", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        timeout=300,
        check=False,
    )


def test_help_shows_the_options_of_the_model():
    result = run("--job.config_file", "train_configs/llama3_debug_normuon.toml", "--help")
    assert result.returncode == 0
    # tyro draws boxes and breaks lines.
    text = re.sub(r"[\s│]+", " ", result.stdout)
    for flag in (
        "--job.config_file FILE",
        "--training.steps INT",
        "--dataloader.dataset STR",
        "--optimizer.name STR",
        "(default: NorMuon)",
        "--optimizer.beta2",
        "--optimizer.adamw.betas",
        "activation-checkpoint:full",
    ):
        assert flag in text
    # Tables have no flags.
    for hidden in ("--optimizer.options ", "--optimizer.split ", "param-groups"):
        assert hidden not in text


def test_a_mistake_ends_the_program_with_one_message(file):
    result = run(file("[trainig]\nsteps = 1"), LOCAL_RANK="0")
    assert result.returncode == 2
    message = [line for line in result.stderr.splitlines() if "trainig" in line]
    assert len(message) == 1
    assert "did you mean 'training'" in message[0]
    assert "Traceback" not in result.stdout + result.stderr


def test_training_without_torchrun_says_how_to_start(file, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = run(file(""))
    assert result.returncode == 2
    assert "RANK, LOCAL_RANK, WORLD_SIZE not set: start training under torchrun" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
