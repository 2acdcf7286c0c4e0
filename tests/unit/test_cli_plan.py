"""titan-muon plan and options: figures against other ways to them, mistakes, and speed."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from titan_muon.cli import gpu_plans, layouts, main
from titan_muon.cli.plan import make_report
from titan_muon.cli.rates import Rates, set_seconds
from titan_muon.distributed.packets import route
from titan_muon.integration.toml_place import ConfigError
from titan_muon.kernels import dispatch
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.options import MATRIX_OPTIONS
from titan_muon.optim.param_groups import to_groups
from titan_muon.optim.quantized import stored

ROOT = Path(__file__).parents[2]
LLAMA = ["--module", "llama3", "--config", "llama3_debugmodel", "--optimizer.name", "Muon"]
DEEPSEEK = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
DEEPSEEK += ["--optimizer.name", "NorMuon"]
TP = ["--parallelism.tensor_parallel_degree", "2"]


def report(*args: str, **options):
    with layouts.quiet():
        return make_report(list(args), **options)


def printed(capsys, *args: str) -> str:
    main.main(args)
    return capsys.readouterr().out


def stage_plans(args: list[str], world_size: int):
    """Yield stage, assignments and plan sets as the report makes them."""
    from titan_muon.integration.optimizers_container import assign_all

    with layouts.quiet():
        config, _ = layouts.parse_config(args)
        for stage in layouts.stages_of(config, world_size):
            assignments = assign_all(config.optimizer, stage.parts)
            yield stage, assignments, gpu_plans.rank_sets(Muon(to_groups(assignments)))


@pytest.mark.parametrize(
    ("args", "world_size"),
    [
        ([*LLAMA, *TP], 4),
        ([*LLAMA, "--parallelism.data_parallel_replicate_degree", "2"], 4),
        ([*DEEPSEEK, "--parallelism.expert_parallel_degree", "2"], 4),
    ],
    ids=["llama3 fsdp x tp", "llama3 hsdp", "deepseek_v3 ep"],
)
def test_figures_are_those_of_the_packets(args, world_size):
    found = report(*args, world_size=world_size, per_parameter=True)
    assert found.world_size == world_size
    ((_, assignments, (rank_set,)),) = stage_plans(args, world_size)
    plan = rank_set.plan
    sent, matrices, flops = ([0.0] * world_size for _ in range(3))
    for rank in plan.ranks:
        for stage in range(plan.stages):
            for side in route(plan, rank, stage):
                sent[rank] += sum(side.send_bytes) - side.send_bytes[rank]
    for unit in plan.units:
        costs = plan.params[unit.param].costs
        matrices[unit.owner] += 1
        flops[unit.owner] += costs[unit.index % len(costs)]
    (totals,) = found.sets
    assert (totals.matrices, totals.stages) == (len(plan.units), plan.stages)
    assert totals.most_bytes_sent == max(sent)
    assert totals.bytes_sent == pytest.approx(sum(sent) / world_size)
    assert totals.balance == pytest.approx(sum(flops) / world_size / max(flops))
    assert totals.balance <= totals.best_balance + 1e-9
    # Groups and parameters divide the whole without a rest.
    muon = [g for g in found.groups if g.matrices]
    parts = [p for p in found.parameters if p.matrices]
    for some in (muon, parts):
        assert sum(p.matrices for p in some) == len(plan.units)
        assert sum(p.bytes_sent for p in some) == pytest.approx(totals.bytes_sent)
        assert sum(p.flops for p in some) == pytest.approx(sum(flops))
    assert {p.name for p in found.parameters} == {a.name for a in assignments}
    assert sum(g.parameters for g in found.groups) == sum(a.param.numel() for a in assignments)
    times = found.milliseconds
    assert times.orthogonalize == pytest.approx(1e3 * max(flops) / 550e12)
    assert times.exchange == pytest.approx(1e3 * max(sent) / 300e9)
    # Of an exchange under arithmetic, what the first stage sends and the last returns is seen.
    exposed = times.exchange / (totals.collectives // 2)
    hidden = max(times.orthogonalize, times.exchange - exposed)
    assert times.total == pytest.approx(exposed + hidden + times.elementwise)


@pytest.mark.parametrize("state_dtype", ["float32", "int4"])
def test_state_is_what_a_rank_allocates(state_dtype):
    args = [*DEEPSEEK, "--parallelism.expert_parallel_degree", "2"]
    args += ["--optimizer.state_dtype", state_dtype, "--optimizer.adamw.state_dtype", state_dtype]
    found = report(*args, world_size=4)
    allocated = 0
    # Rank 0 has the fullest shards: pieces are cut from the front.
    for _, assignments, _ in stage_plans(args, 4):
        optimizer = Muon(to_groups(assignments))
        for state in optimizer.state.values():
            for tensor in state.values():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                allocated += sum(part.numel() * part.itemsize for part in stored(local))
    assert found.state_bytes == allocated


def test_plan_is_the_one_that_the_optimizer_makes(monkeypatch):
    """On CPU tensors, with CPU costs, by the optimizer's own code."""
    from titan_muon.integration.optimizers_container import assign_all

    monkeypatch.setattr(gpu_plans, "_as_on_nvidia", layouts.quiet)
    with layouts.quiet():
        config, _ = layouts.parse_config([*LLAMA, *TP])
        for stage in layouts.stages_of(config, 4):
            stage.parts[0].to_empty(device="cpu")
            optimizer = Muon(to_groups(assign_all(config.optimizer, stage.parts)))
            (work,) = optimizer._matrix_works()
            (rank_set,) = gpu_plans.rank_sets(optimizer)
            assert rank_set.plan.fingerprint() == work.plan.fingerprint()


def test_costs_are_those_of_a_gpu():
    (_, _, (rank_set,)) = next(stage_plans([*LLAMA], 2))
    params = {p.name: p for p in rank_set.plan.params}
    # (768, 256) and (256, 768): float16, the Gram evaluation, products of one triangle.
    m, a = 256, 3
    costs = params["layers.0.feed_forward.w1.weight"].costs
    # 5 steps with one restart: (half + 1) 2 a m^3 twice, and 14 half squares of 2 m^3.
    assert costs == ((6 * a + 14) * m**3,)
    with gpu_plans._as_on_nvidia():
        assert dispatch.decline_reason(256, torch.float16, torch.device("cuda")) is None
        assert "256" in str(dispatch.decline_reason(255, torch.float16, torch.device("cuda")))
    if not torch.cuda.is_available():
        assert dispatch.decline_reason(256, torch.float16, torch.device("cuda")) is not None


def test_pipeline_stages_are_planned_one_by_one():
    args = [*LLAMA, *TP, "--parallelism.pipeline_parallel_degree", "2"]
    args += ["--parallelism.data_parallel_shard_degree", "2"]
    found = report(*args, per_parameter=True)
    assert found.world_size == 8
    assert [(s.pipeline_stage, s.first_rank, s.ranks) for s in found.sets] == [(0, 0, 4), (1, 4, 4)]
    whole = report(*LLAMA, *TP, world_size=4, per_parameter=True)
    assert {p.name for p in found.parameters} == {p.name for p in whole.parameters}
    assert sum(s.matrices for s in found.sets) == whole.sets[0].matrices
    # The pattern of wo alone: a stage holds half of the layers, each on its own four ranks.
    assert sum(g.flops for g in found.groups) == pytest.approx(sum(g.flops for g in whole.groups))
    last = max(int(p.name.split(".")[1]) for p in found.parameters if p.name.startswith("layers"))
    by_name = {p.name: p for p in found.parameters}
    assert by_name[f"layers.{last}.attention.wo.weight"].owners == 1


def test_world_size():
    def size(given, **degrees):
        names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
        names += ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        values = {f"{n}_degree": degrees.get(n, -1 if n == names[1] else 1) for n in names}
        return layouts.world_size_of(type("Parallelism", (), values), given)

    world_size, note = size(None, tensor_parallel=4, pipeline_parallel=2)
    assert world_size == 8
    assert "planned for 1" in note
    assert "--world-size" in note
    assert size(64, tensor_parallel=4) == (64, None)
    assert size(None, tensor_parallel=4, data_parallel_shard=3) == (12, None)
    assert size(12, tensor_parallel=4, data_parallel_shard=3) == (12, None)
    for given, degrees, words in (
        (6, {"tensor_parallel": 4}, "a multiple of 4"),
        (0, {}, "a multiple of 1"),
        (-4, {}, "a multiple of 1"),
        (8, {"data_parallel_shard": 4}, "use 4"),
        (None, {"expert_parallel": 8}, "Give --world-size"),
        (12, {"expert_parallel": 8}, "expert_parallel_degree = 8 does not divide"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            size(given, **degrees)


def test_modelled_time():
    rates = Rates(tflops=1.0, link_gbs=1.0)
    loads = torch.tensor([1e12, 2e12], dtype=torch.float64)
    sent = torch.tensor([4_000_000_000, 1_000_000_000])
    edges = torch.tensor([1_000_000_000, 500_000_000])
    # The slowest rank of each: 2 s of arithmetic, 4 s of exchange, of which 1 s cannot hide.
    assert set_seconds(loads, sent, edges, rates) == (2.0, 4.0, 1.0 + 3.0)
    assert set_seconds(loads, sent, sent, rates) == (2.0, 4.0, 4.0 + 2.0)
    assert set_seconds(2 * loads, sent, edges, rates) == (4.0, 4.0, 1.0 + 4.0)


def test_warnings(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[optimizer]\nname = "Muon"\nbeta2 = 0.9\n'
        "[[optimizer.param_groups]]\npattern = 'feed_forward'\nname = \"AdamW\"\n"
        "[[optimizer.param_groups]]\npattern = 'no such thing'\nname = \"AdamW\"\n"
    )
    found = report("--job.config_file", str(file), world_size=64)
    text = "\n".join(found.warnings)
    assert (
        "18 tensors of matrices (3,538,944 parameters) go to AdamW: pattern 'feed_forward'" in text
    )
    assert "pattern 'no such thing' decides on no trainable parameter" in text
    # 6 layers of q, k, v, o: 24 matrices on 64 ranks.
    assert "40 of 64 ranks compute no matrix, of 24 in all" in text
    assert re.search(r"balance 0\.\d\d: the busiest rank", text)
    assert not any("max_stage_bytes" in warning for warning in found.warnings)
    tight = report("--job.config_file", str(file), "--optimizer.max_stage_bytes", "100000")
    # (256, 256) as the iteration has it: the stack, an iterate and two squares, all float16.
    assert any("max_stage_bytes" in warning for warning in tight.warnings)
    assert any("beta2" in note for note in found.notes)
    assert any("tok_embeddings.weight" in note for note in found.notes)
    adamw = report("--job.config_file", str(file), "--optimizer.name", "AdamW")
    expected = "12 tensors of matrices (1,572,864 parameters) go to AdamW: name = 'AdamW'"
    assert expected in adamw.warnings
    assert adamw.sets == []
    assert any("planned for 1" in note for note in adamw.notes)


def test_text_and_json(capsys):
    file = "train_configs/llama3_debug_muon.toml"
    args = ("plan", str(ROOT / file), "--world-size", "8", *TP, "--tflops", "1")
    text = printed(capsys, *args)
    assert text.startswith("llama3 debugmodel with Muon on 8 ranks (tensor_parallel 2)\n")
    assert "assuming 1 TFLOP/s (--tflops)" in text
    assert "_StridedShard(0, split_factor=2) on dp_shard 4, Shard(0) on tp 2" in text
    assert "layers.0.attention.wo.weight" not in text
    assert "layers.0.attention.wo.weight" in printed(capsys, *args, "--per-parameter")
    data = json.loads(printed(capsys, *args, "--per-parameter", "--json"))
    assert data["world_size"] == 8
    assert data["rates"] == {"tflops": 1.0, "memory_gbs": 3300.0, "link_gbs": 300.0}
    assert {g["algorithm"] for g in data["groups"]} == {"Muon", "AdamW"}
    (found,) = (p for p in data["parameters"] if p["name"] == "layers.0.attention.wo.weight")
    assert found["sizes"] == [[1, 256, 256]]


WRONG = {
    "command": (["plam"], "'plam' is not a command, did you mean 'plan'?"),
    "no file": (["plan", "--json"], "name a train config"),
    "missing file": (["plan", "nowhere.toml"], "nowhere.toml"),
    "own optimizer": (["plan", *LLAMA[:4]], "--optimizer.name Muon"),
    "world size": (["plan", *LLAMA, *TP, "--world-size", "3"], "use a multiple of 2"),
    "layout": (
        ["plan", *LLAMA, "--parallelism.pipeline_parallel_degree", "16"],
        "torchtitan cannot lay this model out on 16 ranks",
    ),
    "rows that do not fit": (
        ["plan", "{folder}/split.toml"],
        "wqkv.weight: split [1, 2] sums to 3, but the matrix has 768 rows",
    ),
    "degree": (["plan", *LLAMA, *TP[:1], "0"], "[parallelism] tensor_parallel_degree = 0"),
    "shard degree": (
        ["plan", *LLAMA, "--parallelism.data_parallel_shard_degree", "0"],
        "[parallelism] data_parallel_shard_degree = 0 is not allowed; use an integer >= 1, or -1",
    ),
    "log_freq": (["plan", *LLAMA, "--metrics.log_freq", "0"], "[metrics] log_freq = 0 is not"),
    "max_norm": (["plan", *LLAMA, "--training.max_norm", "-1"], "max_norm = -1.0 is not allowed"),
    "min_lr_factor": (
        ["plan", *LLAMA, "--lr_scheduler.min_lr_factor", "-1"],
        "[lr_scheduler] min_lr_factor = -1.0 is not allowed; use a number from 0 to 1",
    ),
    "validator": (
        ["plan", *LLAMA, "--validator.enable", "--validator.freq", "0"],
        "[validator] freq = 0 is not allowed; use an integer >= 1",
    ),
    "torchtitan's assertion": (
        ["plan", *LLAMA, "--validator.steps", "0"],
        "torchtitan refuses this config: validation steps must be positive or -1",
    ),
    "misspelled flag": (["plan", *LLAMA, "--worldsize", "8"], "did you mean --world-size?"),
    "underscore": (["plan", *LLAMA, "--per_parameter"], "did you mean --per-parameter?"),
    "rate": (["plan", *LLAMA, "--tflops", "0"], "must be a number > 0"),
    "no number": (["plan", *LLAMA, "--tflops", "abc"], "abc must be a number > 0"),
    "no integer": (["verify", "--steps", "1.5"], "1.5 must be an integer >= 1"),
    "meta device": (["verify", "--device", "meta"], "--device meta cannot be used here"),
    "name": (["options", "Moun"], "did you mean 'Muon'? Algorithms: "),
    "option": (["options", "momentun"], "did you mean 'momentum'?"),
}


@pytest.mark.parametrize(("args", "part"), WRONG.values(), ids=WRONG)
def test_one_message_and_code_2(args, part, capsys, tmp_path):
    (tmp_path / "split.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[optimizer]\nsplit = [1, 2]\n'
    )
    with pytest.raises(SystemExit) as stopped:
        main.main([word.replace("{folder}", str(tmp_path)) for word in args])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert part in output.err
    assert output.out == ""


def test_options(capsys):
    every = printed(capsys, "options")
    for name in ("Muon", "NorMuon", "AdamW", "Adam", *MATRIX_OPTIONS, "betas", "beta2"):
        assert re.search(rf"^{name}\b", every, re.MULTILINE), name
    assert re.search(r"^lr +all +0.001 ", every, re.MULTILINE)
    one = printed(capsys, "options", "normuon")
    assert set(re.findall(r"^([a-z]\w+) ", one, re.MULTILINE)) - {"algorithm", "option"} == set(
        get_algorithm("normuon").options
    )
    assert re.search(r'^wire_dtype \* +"float16" +one of', one, re.MULTILINE)
    alone = printed(capsys, "options", "eps")
    assert re.search(r"^eps +Adam, AdamW +1e-08 ", alone, re.MULTILINE)
    data = json.loads(printed(capsys, "options", "--json", "Muon"))
    assert data["algorithms"]["muon"]["options"]["momentum"]["default"] == 0.95


def test_console_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["titan-muon"].split(":")
    assert getattr(importlib.import_module(module), function) is main.main
    assert any(need.startswith("rich") for need in project["dependencies"])


def test_modules_of_the_current_folder_are_found_as_in_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_muon.py").write_text("raise ValueError('it was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # a script's has no current folder
    file = tmp_path / "x.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[optimizer]\nimports = ["my_muon"]\n'
    )
    monkeypatch.setattr(sys, "argv", ["titan-muon", "plan", str(file)])
    with pytest.raises(SystemExit):
        main.main()
    assert "it was imported" in capsys.readouterr().err


def test_options_and_help_need_no_torchtitan():
    program = (
        "import sys\n"
        "for name in ('torchtitan', 'tyro', 'torch.distributed.tensor', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "from titan_muon.cli.main import main\n"
        "main(['options', 'Muon'])\n"
        "try:\n    main(['plan', 'x.toml'])\n"
        "except SystemExit as stop:\n    assert stop.code == 2\n"
        "main(['--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "momentum" in done.stdout
    assert "plan " in done.stdout
    assert "titan-muon plan needs torchtitan: pip install 'titan-muon[torchtitan]'" in done.stderr


@pytest.mark.parametrize(
    ("args", "world_size", "matrices", "local", "balance"),
    [
        (["llama3", "llama3_70b", "--parallelism.tensor_parallel_degree", "8"], 64, 560, 0, 0.97),
        (
            ["deepseek_v3", "deepseek_v3_671b", "--parallelism.expert_parallel_degree", "64"],
            256,
            45090,
            58 * 3,
            0.87,
        ),
    ],
    ids=["llama3 70B", "deepseek_v3 671B"],
)
def test_real_models_at_their_world_size(args, world_size, matrices, local, balance):
    model, config, *degrees = args
    args = ["--module", model, "--config", config, "--optimizer.name", "Muon", *degrees]
    found = report(*args, world_size=world_size, per_parameter=True)
    (plan,) = found.sets
    assert plan.matrices == matrices
    assert plan.balance >= balance
    # Experts that lie whole on their ranks send nothing.
    assert sum(p.bytes_sent == 0 for p in found.parameters if p.matrices) == local
    # 2 u (1 - 1/p), u: a rank's shards of what travels in float16; headers are below 1 %.
    travels = [p for p in found.parameters if p.bytes_sent]
    elements = sum(torch.Size(p.shape).numel() for p in travels)
    expected = 2 * 2 * elements / world_size * (1 - 1 / world_size)
    assert plan.bytes_sent == pytest.approx(expected, rel=1e-2)


def test_a_tied_weight_counts_once():
    found = report("--job.config_file", "train_configs/llama3_1b_muon.toml", world_size=2)
    elementwise = next(g for g in found.groups if g.algorithm == "AdamW")
    # Embeddings, which are the output head as well, and two norms a layer and the last one.
    assert elementwise.parameters == 128256 * 2048 + 2048 * (2 * 16 + 1)
