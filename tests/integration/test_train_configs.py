"""Every file in train_configs: it loads with each optimizer, and plans at its own world size."""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from titan_muon.cli import layouts  # noqa: E402
from titan_muon.cli.plan import make_report  # noqa: E402
from titan_muon.optim.algorithms import get_algorithm  # noqa: E402

FOLDER = Path(__file__).parents[2] / "train_configs"
FILES = sorted(path.stem for path in FOLDER.glob("*.toml"))

# World size, matrices on all ranks, those that lie whole on one rank, least balance. Counts are by
# hand: layers times matrices of a layer, q, k, v and gate, up of fused weights one by one.
PLANS = {
    "llama3_8b": (8, 32 * 7, 0, 0.99),
    "llama3_70b": (64, 80 * 7, 0, 0.97),
    "llama3_405b": (512, 126 * 7, 0, 0.86),
    # 26 expert layers of 3 x (64 + 1 shared) and a gate, a dense one of 3; attention has 4.
    "deepseek_v3_16b": (8, 27 * 4 + 3 + 26 * (3 * 65 + 1), 26 * 3 * 64, 0.99),
    "deepseek_v3_671b": (256, 61 * 5 + 3 * 3 + 58 * (3 * 257 + 1), 58 * 3 * 256, 0.87),
    "qwen3_14b": (16, 40 * 7, 0, 0.99),
    "qwen3_30b_a3b": (16, 48 * (4 + 1 + 3 * 128), 48 * 3 * 128, 0.99),
    "gpt_oss_20b": (8, 24 * (4 + 1 + 3 * 32), 24 * 3 * 32, 0.99),
    # 16 heads in wq and wkv_b, each a matrix; wkv_a and wo.
    "moonlight_16b_a3b": (32, 27 * (2 + 2 * 16) + 3 + 26 * (3 * 65 + 1), None, 0.98),
    # 64 heads in wq_b and wkv_b; wq_a, wkv_a and wo.
    "kimi_k2_5": (384, 61 * (3 + 2 * 64) + 3 + 60 * (3 * 385 + 1), None, 0.85),
}
SLOW = ("deepseek_v3_671b", "kimi_k2_5")
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLANS]
NEEDS_TORCHVISION = ("moonlight_16b_a3b", "kimi_k2_5")


def arguments(name: str, *more: str) -> list[str]:
    if name in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision", reason="the extra vision is not installed")
    return ["--job.config_file", str(FOLDER / f"{name}.toml"), *more]


@pytest.mark.parametrize("name", CASES)
def test_plan(name):
    world_size, matrices, local, balance = PLANS[name]
    with layouts.quiet():
        report = make_report(arguments(name), per_parameter=True)
    assert report.world_size == world_size
    assert sum(found.matrices for found in report.sets) == matrices
    assert min(found.balance for found in report.sets) >= balance
    assert not [text for text in report.warnings if text.startswith("pattern")]
    assert not [text for text in report.notes if "torchtitan refuses" in text]
    if local is not None:
        whole = [p for p in report.parameters if p.matrices and not p.bytes_sent]
        assert sum(p.matrices for p in whole) == local
    # Every hidden matrix goes to Muon: what is left are embeddings, heads, norms and biases.
    rest = [p for p in report.parameters if p.algorithm == "AdamW" and len(p.shape) > 1]
    reasons = {p.reason for p in rest if not p.name.startswith("vision_encoder.")}
    assert reasons <= {"embedding", "output head", "bias"}


@pytest.mark.parametrize("optimizer", ["NorMuon", pytest.param("AdamW", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_other_optimizers_train_the_same_file(name, optimizer):
    with layouts.quiet():
        config, _ = layouts.parse_config(arguments(name, "--optimizer.name", optimizer))
    algorithms = {config.optimizer.matrix_spec()[0]}
    algorithms |= {name for _, name, _ in config.optimizer.group_specs() if name}
    # The vision tower has AdamW by name.
    assert algorithms - {"adamw"} <= {get_algorithm(optimizer).name}
    assert config.optimizer.matrix_spec()[0] == get_algorithm(optimizer).name


@pytest.mark.parametrize("name", PLANS)
def test_lr_and_decay_are_those_of_torchtitan(name):
    """The comments beside them say so."""
    written = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    model = written["model"]
    flags = ["--module", model["name"]]
    flags += ["--config", model.get("config") or f"{model['name']}_{model['flavor']}".lower()]
    flags[-1] = flags[-1].replace("-", "_")
    arguments(name)
    with layouts.quiet():
        config, _ = layouts.parse_config(flags)
    for group in config.optimizer.param_groups:
        for key in ("lr", "weight_decay"):
            assert group.optimizer_kwargs[key] == written["optimizer"][key]


def test_no_file_is_left_out():
    runs = {name for name in FILES if "debug" in name or name.startswith("llama3_1b")}
    assert set(FILES) - runs == set(PLANS)


@pytest.mark.parametrize(
    ("name", "degree", "reason"),
    [
        ("llama3_8b", "pipeline_parallel_degree", "do not support pipeline parallelism"),
        ("deepseek_v3_debug_muon", "expert_parallel_degree", "AllToAllTokenDispatcher"),
    ],
)
def test_plan_says_where_cuda_graphs_keep_gpus_from_training(name, degree, reason):
    more = [f"--parallelism.{degree}", "2"]
    with layouts.quiet():
        _, notes = layouts.parse_config(arguments(name, *more))
        assert [note for note in notes if reason in note and "disable_cuda_graphs" in note]
        _, notes = layouts.parse_config(arguments(name, *more, "--training.disable_cuda_graphs"))
    assert not [note for note in notes if "graphs" in note]


def test_parallelism_that_dist_muon_refuses():
    more = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree"]
    with layouts.quiet():
        report = make_report(arguments("moonlight_16b_a3b", *more, "4"))
    assert report.world_size == 8
    assert sum(found.matrices for found in report.sets) == PLANS["moonlight_16b_a3b"][1]
