"""The README against the code: snippets run, commands parse, tables are those of the code."""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from titan_muon import Muon, __version__, orthogonalize
from titan_muon.distributed.layout import Cut, Layout
from titan_muon.distributed.matrices import matrix_rule
from titan_muon.distributed.packets import route
from titan_muon.distributed.plan import Channel, PlanParam, make_plan
from titan_muon.orthogonalization import SCHEDULES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
CODE = re.findall(r"`([^`\n]+)`", PROSE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands() -> Iterator[str]:
    """Yield every command line of the README, those inside sentences too."""
    for block in blocks("bash"):
        yield from (line for line in block.splitlines() if line and not line.startswith("#"))
    starts = ("scripts/", "python ", "torchrun ", "titan-muon ", "pip ", "bash ", "source ")
    commands = (code for code in CODE if code.startswith(starts) and not code.endswith(".py"))
    yield from (code for code in commands if code != "titan-muon plan")


COMMANDS = list(commands())


def test_python_blocks_run_on_two_ranks(tmp_path):
    program = tmp_path / "readme.py"
    # Ranks write files: their lines on one output may mix.
    mark = f"\nopen({str(tmp_path)!r} + f'/rank {{dist.get_rank()}}', 'w').close()\n"
    program.write_text("\n".join(blocks("python")) + mark)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        + [str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("rank *")} == {"rank 0", "rank 1"}


@pytest.fixture
def smooth_muon(tmp_path, monkeypatch):
    """Put the README's algorithm on the path as the module that it says it is."""
    (source,) = (text for text in blocks("python") if text.startswith("# smooth_muon.py"))
    (tmp_path / "smooth_muon.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "smooth_muon", raising=False)
    yield importlib.import_module("smooth_muon")
    sys.modules.pop("smooth_muon", None)


def test_worked_example_computes_what_it_says(smooth_muon):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 9, generator=generator, dtype=torch.float64))
    optimizer = Muon(
        [{"params": [weight], "algorithm": "smooth_muon", "keep": 0.75}],
        lr=0.1,
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
    )
    average = torch.zeros_like(weight)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        average = 0.75 * average + 0.25 * orthogonalize(weight.grad)
        lengths = average.norm(dim=1, keepdim=True)
        optimizer.step()
        expected = before - 0.1 * average / lengths * lengths.mean()
        # float64 on both sides.
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-10)
    assert optimizer.state[weight]["length_buffer"].shape == (6, 1)


def test_torch_muon_carries_over():
    """The README's two optimizers take the same step from there."""
    (source,) = (text for text in blocks("python") if "torch.optim.Muon" in text)
    names = {"torch": torch, "nn": torch.nn, "Muon": Muon}
    torch.manual_seed(0)
    exec(source, names)
    weight, start = names["weights"][0], names["weights"][0].detach().clone()
    weight.grad = torch.randn(64, 128)
    moved = []
    for optimizer in (names["before"], names["after"]):
        with torch.no_grad():
            weight.copy_(start)
        optimizer.step()
        moved.append(weight.detach() - start)
    # torch iterates in bfloat16, which puts about 1 % on the update.
    assert (moved[0] - moved[1]).norm() < 0.04 * moved[0].norm()


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.splitlines()[1])
def test_toml_blocks_load(text, tmp_path, smooth_muon):
    pytest.importorskip("torchtitan")
    from titan_muon.integration.toml import Selection, load_train_config

    file = tmp_path / "run.toml"
    file.write_text(text)
    config, notes = load_train_config(Selection(file=str(file)))
    assert notes == []
    written = tomllib.loads(text)["optimizer"]
    assert (config.optimizer.name, config.optimizer.lr) == (written["name"], written["lr"])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    while "=" in words[0]:
        variable = words.pop(0).partition("=")[0]
        assert f"${{{variable}:-" in Path(words[0]).read_text()
    program, *arguments = words
    if program == "torchrun":
        check_torchrun(arguments)
    elif program == "python":
        check_python(arguments)
    elif program == "pip":
        named = re.search(r"\.\[([\w,]+)\]", arguments[-1])
        known = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        assert set(named[1].split(",") if named else []) <= set(known["optional-dependencies"])
    elif program == "titan-muon":
        check_cli(arguments, tmp_path)
    elif program == "sbatch":
        script, file, *flags = [word for word in arguments if not word.startswith("--nodes")]
        check_script(script, [])
        check_training(["--job.config_file", file, *flags])
    elif program == "bash":
        assert Path(arguments[0]).is_file()
    elif program == "source":
        assert f"VENV=${{TITAN_MUON_VENV:-$ROOT/{arguments[0].split('/')[0]}}}" in (
            Path("scripts/setup.sh").read_text()
        )
    else:
        check_script(program, arguments)


def check_script(program: str, arguments: list[str]) -> None:
    script = Path(program)
    assert script.is_file()
    if script.suffix == ".py":
        check_python([program, *arguments])
        return
    assert os.access(script, os.X_OK)
    if script.name == "train.sh":
        given = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
        file = (given or ["train_configs/llama3_debug_muon.toml"])[0]
        check_training(["--job.config_file", file, *arguments])
        return
    for argument in arguments:
        assert argument in script.read_text() or Path(argument).exists()


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
        assert len(arguments) == 2
        return
    script, *flags = arguments
    if script == "scripts/compare.py":
        check_comparison(flags)
        return
    source = Path(script).read_text() + Path("scripts/bench_step.py").read_text()
    for flag in flags:
        # A file to write or to read is the user's, and so is a number.
        if not (flag.endswith((".json", ".png")) or flag.isdigit()):
            assert f'"{flag}"' in source, flag


def check_comparison(arguments: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        compare = importlib.import_module("compare")
    finally:
        sys.path.pop(0)
    run = compare.plan_runs(*compare.parse(arguments))[0]
    check_torchrun(list(run.command[3:]))


def check_cli(arguments: list[str], folder: Path) -> None:
    pytest.importorskip("torchtitan")
    from titan_muon.cli.main import main

    if arguments[0] == "verify":
        # It takes a minute; tests of its own run it.
        assert arguments == ["verify"]
        return
    if arguments[0] == "migrate":
        (folder / "OLD.toml").write_text("[model]\nname = 'llama3'\nflavor = '8B'\n")
        arguments = [str(folder / a) if a.endswith(".toml") else a for a in arguments]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(arguments)
    if arguments[0] == "plan" and "llama3_70b" in arguments:
        (shown,) = (text for text in blocks("text") if text.startswith("llama3 70B"))
        assert said.getvalue() == shown


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    if parsed.training_script.endswith(".py"):
        check_python([parsed.training_script, *parsed.training_script_args])
        return
    assert parsed.module
    assert parsed.training_script in ("titan_muon.train", "torchtitan.train")
    check_training(parsed.training_script_args)


def check_training(arguments: list[str]) -> None:
    """Parse a command line as ``titan_muon.train`` does, short of touching the device."""
    pytest.importorskip("torchtitan")
    from titan_muon.integration.data import register_datasets
    from titan_muon.integration.manager import TrainConfigManager

    register_datasets()
    config = TrainConfigManager(cuda_graphs=False).parse_args(arguments)
    assert config.training.steps > 0


def test_commands_are_found():
    """The parametrization above must not be empty, nor miss the two that matter most."""
    assert {"scripts/train.sh", "scripts/test.sh", "bash .ci/run"} <= set(COMMANDS)
    assert len([c for c in COMMANDS if c.startswith("torchrun")]) >= 4
    with pytest.raises(AssertionError):
        check_script("scripts/gone.sh", [])
    with pytest.raises(AssertionError):
        check_python(["scripts/bench_step.py", "--wrong"])


def test_option_tables_are_those_of_the_code():
    pytest.importorskip("torchtitan")
    from titan_muon.integration.config import OptimizerConfig

    table = option_table()
    # On a difference: python scripts/option_table.py --write
    assert table.filled(README) == README
    with pytest.raises(SystemExit, match="options 0 times, not once"):
        table.filled(README.replace("<!-- end of options -->", ""))
    assert {a.title for a in table.algorithms()} >= {"Muon", "NorMuon", "AdamW", "Adam"}
    options = {key for algorithm in table.algorithms() for key in algorithm.options}
    assert {f"`{key}`" for key in options} <= set(table.option_table().split())
    fields = {f.name for f in dataclasses.fields(OptimizerConfig)} | {"recipe"}
    unlisted = {"optimizer_factory_kwargs_by_name"}
    assert set(table.CONFIG_FIELDS) == fields - options - unlisted


def option_table():
    spec = importlib.util.spec_from_file_location("option_table", ROOT / "scripts/option_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schedules_are_those_of_the_code():
    for name, family in SCHEDULES.items():
        assert f"`{name}` (1..{family.max_steps}" in README


def test_start_table_is_what_a_run_prints():
    pytest.importorskip("torchtitan")
    from titan_muon.integration.fused_weights import fused_splits
    from titan_muon.integration.optimizers_container import MuonOptimizersContainer
    from titan_muon.integration.start_table import start_table
    from titan_muon.integration.toml import Selection, load_train_config
    from titan_muon.optim.param_groups import assign

    config, _ = load_train_config(
        Selection(file=str(ROOT / "train_configs/llama3_debug_muon.toml"))
    )
    with torch.device("meta"):
        model = config.model_spec.model.build()
    container = MuonOptimizersContainer(config.optimizer, model_parts=[model])
    specs = config.optimizer.matrix_spec(), config.optimizer.rest_spec()
    assignments = assign(model, *specs, splits=fused_splits(model))
    assert start_table(container.optimizers[0], assignments, []) in README


def test_start_table_has_a_line_for_each_group_however_long_its_name():
    from titan_muon import Muon
    from titan_muon.integration.start_table import start_table
    from titan_muon.optim.param_groups import assign, to_groups

    # Square brackets are markup to what draws the table.
    name = "[bold]" + "x" * 200
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False)})
    assignments = assign(model, ("muon", {}), ("adamw", {}))
    text = start_table(Muon(to_groups(assignments)), assignments, [])
    assert text.splitlines()[1].endswith(f"  {name}.weight")


# Mesh, what each axis does to a tensor (None replicates), p and R of the README's formula.
COSTS = {
    "one": ((1,), (0,), 1, 1),
    "fsdp": ((4,), (0,), 4, 1),
    "fsdp, columns": ((4,), (1,), 4, 1),
    "hsdp": ((2, 4), (None, 0), 4, 2),
    "fsdp x tp, row": ((2, 4), (0, 1), 8, 1),
    "fsdp x tp, replicated": ((2, 4), (0, None), 2, 4),
    "ddp": ((4,), (None,), 1, 4),
}


@pytest.mark.parametrize("case", COSTS)
def test_layouts_cost_what_the_table_says(case):
    mesh, dims, p, replicas = COSTS[case]
    ranks = p * replicas
    # Many equal matrices, so that every rank owns as many; large, so that headers vanish.
    layout = Layout((512, 512), mesh, tuple(range(ranks)), tuple(Cut(dim) for dim in dims))
    param = PlanParam(
        "w", layout, matrix_rule(layout.shape), 0, (Channel("direction", "float16"),), (1.0,), (1,)
    )
    plan = make_plan([param] * (2 * ranks), max_stage_bytes=1 << 30)
    assert set(plan.loads) == {2.0}
    sent = []
    for rank in plan.ranks:
        sides = [side for stage in range(plan.stages) for side in route(plan, rank, stage)]
        sent.append(sum(sum(s.send_bytes) - s.send_bytes[plan.ranks.index(rank)] for s in sides))
    u = 2 * ranks * 512 * 512 * 2 / p
    expected = u * (1 + 1 / replicas - 2 / (replicas * p))
    # 32 bytes a parcel of 8 KiB and more.
    assert sum(sent) / ranks == pytest.approx(expected, rel=5e-3)


def test_files_exist():
    links = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith(("http", "#"))]
    # Outputs are made by runs; the other names are tags of metrics.
    others = ("outputs", "optimizer/")
    paths = [c for c in CODE if re.fullmatch(r"[\w./]+/[\w.]+", c) and not c.startswith(others)]
    assert len(links) >= 5
    assert len(paths) >= 10
    for path in [*links, *paths]:
        assert any((base / path).exists() for base in (ROOT, ROOT / "titan_muon")), path


def test_contents_name_every_section():
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    listed = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", README.partition("\n## ")[0])
    assert [title for title, _ in listed] == headings
    for title, anchor in listed:
        assert anchor == re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def test_changelog_speaks_of_checkpoints():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert versions
    for version in versions:
        assert "\n### Checkpoint compatibility\n" in version, version.splitlines()[0]
    assert "[Unreleased]" in text or f"[{__version__}]" in text
