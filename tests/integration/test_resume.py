"""A run that stops and resumes from its DCP checkpoint equals one that ran through, bit for bit.

resume_runs.py runs real torchtitan Trainers; each of the three runs has processes of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from titan_muon.integration import cpu_runtime
from titan_muon.integration.lr_schedule import LRScheduleConfig
from titan_muon.integration.manager import TrainConfigManager

ROOT = Path(__file__).parents[2]
FAST = ["llama3 small | fsdp | Muon", "llama3 small | fsdp | NorMuon"]
SLOW = [
    "llama3 small | fsdp x tp | Muon",
    "llama3 small | fsdp x tp | NorMuon",
    "llama3 small | pp x fsdp | NorMuon",
    "deepseek_v3 small | ep x fsdp | Muon",
    "deepseek_v3 small | ep x fsdp | NorMuon",
]
CASES = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]

# Options that say what the state means; all others follow the config of the resumed run.
MATRIX_KEYS = {
    "algorithm",
    "adjust_lr_fn",
    "cautious_weight_decay",
    "flatten",
    "initial_lr",
    "lr",
    "maximize",
    "momentum",
    "nesterov",
    "ns_method",
    "ns_steps",
    "split",
    "weight_decay",
}
ADAMW_KEYS = {"algorithm", "betas", "eps", "initial_lr", "lr", "maximize", "weight_decay"}


def run(ranks: int, cases: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    log = folder / "log"
    program = str(Path(__file__).with_name("resume_runs.py"))
    command = [sys.executable, program, str(folder), str(ranks), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()[-5000:]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {result["case"]: result for result in results}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(2, FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(4, SLOW, tmp_path_factory.mktemp("slow"))


@pytest.fixture
def result(request: pytest.FixtureRequest, case: str) -> dict[str, Any]:
    return request.getfixturevalue("slow" if case in SLOW else "fast")[case]


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_uninterrupted_one(result: dict[str, Any]) -> None:
    # Three of six steps: it did resume.
    assert len(result["losses"]) == 3
    # Weights, buffers, state, options, lr, losses, data and step; two stages share the weights.
    assert result["compared"] > 50
    assert result["differing"] == []


def test_lost_state_is_seen(fast: dict[str, dict[str, Any]]) -> None:
    """The comparison of the test above, on a run that resumed without optimizer state."""
    differing = fast[f"{FAST[0]} | without state"]["differing"]
    assert "layers.0.feed_forward.w1.weight" in differing
    assert "layers.0.feed_forward.w1.weight/momentum_buffer" in differing
    assert "norm.weight/step" in differing
    assert "losses" in differing


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_holds_these_keys(result: dict[str, Any]) -> None:
    keys = {k.removeprefix("optimizer.") for k in result["keys"] if k.startswith("optimizer.")}
    assert keys == set(result["state"])
    names = {m[1] for k in keys if (m := re.fullmatch(r"param_groups\.(.*)\.algorithm", k))}
    matrices = {m[1] for k in keys if (m := re.fullmatch(r"state\.(.*)\.momentum_buffer", k))}
    assert matrices
    assert names > matrices
    normuon = "NorMuon" in result["case"]
    matrix_state = {"momentum_buffer", *(["second_moment_buffer"] if normuon else [])}
    expected: set[str] = set()
    for name in names:
        is_matrix = name in matrices
        state = matrix_state if is_matrix else {"exp_avg", "exp_avg_sq", "step"}
        options = MATRIX_KEYS | ({"beta2"} if normuon else set()) if is_matrix else ADAMW_KEYS
        expected |= {f"state.{name}.{key}" for key in state}
        expected |= {f"param_groups.{name}.{key}" for key in options}
    assert keys == expected
    others = {key for key in result["keys"] if not key.startswith("optimizer.")}
    assert {"lr_scheduler.last_epoch", "train_state.step", "dataloader.batches_read"} <= others


def test_config_wins_over_the_checkpoint(fast: dict[str, dict[str, Any]]) -> None:
    """lr / 4 and weight_decay = 0.2 from the first resumed step on, at the schedule's place."""
    (first,) = fast[f"{FAST[0]} | other options"]["used"]
    assert first["base"] == [5e-3] * len(first["base"])
    assert first["weight_decay"] == [0.2] * len(first["base"])
    assert first["lr"] == pytest.approx([5e-3 * first["factor"]] * len(first["base"]), rel=1e-12)
    assert 0 < first["factor"] < 1


@pytest.mark.parametrize("change", ["options", "schedule"])
def test_optimizer_and_scheduler_agree_on_the_first_step(
    fast: dict[str, dict[str, Any]], change: str
) -> None:
    (first,) = fast[f"{FAST[0]} | other {change}"]["used"]
    assert first["lr"] == pytest.approx(first["scheduled"], rel=1e-12)


def test_train_entry_builds_schedules_that_the_optimizer_follows() -> None:
    arguments = ["--module", "llama3", "--config", "llama3_debugmodel", "--optimizer.name", "Muon"]
    arguments += ["--lr_scheduler.warmup_steps", "7"]
    schedule = TrainConfigManager(cuda_graphs=False).parse_args(arguments).lr_scheduler
    assert type(schedule) is LRScheduleConfig
    assert (schedule.warmup_steps, schedule.decay_ratio) == (7, 0.8)
