"""QK-clip of real torchtitan models: on every mesh what one process does, and resume bit for bit.

muonclip_runs.py trains on 4 gloo ranks.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from titan_muon.integration import cpu_runtime

ROOT = Path(__file__).parents[2]
FAST = [
    "llama3 small | fsdp x tp",
    "llama3 small | pp x fsdp",
    "llama3 small | cp x fsdp",
    "deepseek_v3 small | fsdp x tp",
]
SLOW = [
    "llama3 small | fsdp",
    "llama3 small | hsdp",
    "llama3 small | ddp",
    "llama3 small | fsdp x tp | partial_dtensor",
    "llama3 small | fsdp x tp | full_dtensor",
    "llama3 debug | fsdp x tp",
    "deepseek_v3 small | ep x tp",
    "deepseek_v3 small | pp x fsdp",
]
MESHES = [*FAST, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)]
HEADS = {"llama3 small": 8, "deepseek_v3 small": 8, "llama3 debug": 96}
# As in test_meshes.py: gradients are summed in another order, and orthogonalizing enlarges it.
LOSS = 1e-5
TRAINED = 1e-3
# The first step's weights are the same, so that its logits differ by the order of sums alone.
LOGIT = 1e-5
# Of the figure.
THRESHOLD = 30.0


def run(meshes: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    script = Path(__file__).with_name("muonclip_runs.py")
    log = folder / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, str(script), str(folder), *meshes],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=file,
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {result.get("mesh", "resumed"): result for result in results}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process(request: pytest.FixtureRequest, mesh: str) -> None:
    result = request.getfixturevalue("slow" if mesh in SLOW else "fast")[mesh]
    first, expected = result["steps"][0], result["expected"][0]
    assert first["optimizer/max_logit"] == pytest.approx(expected["optimizer/max_logit"], rel=LOGIT)
    # Some heads are clipped and some are not, or this would show nothing.
    assert first["optimizer/clipped_heads"] == expected["optimizer/clipped_heads"]
    assert 0 < first["optimizer/clipped_heads"] < HEADS[mesh.split(" | ")[0]]
    for step, other in zip(result["steps"], result["expected"], strict=True):
        assert step["loss"] == pytest.approx(other["loss"], abs=LOSS)
        assert step["optimizer/max_logit"] == pytest.approx(
            other["optimizer/max_logit"], rel=TRAINED
        )
    assert set(result["moved"]) == set(result["parameters"])
    far = {name: d for name, d in result["moved"].items() if not d <= TRAINED}
    assert not far, f"parameters moved otherwise: {far}"
    assert result["replicas"] == 0
    # And it did clip: without it these weights are others.
    assert max(result["effect"].values()) > 50 * TRAINED


def test_resume_is_bit_for_bit_and_saves_nothing(fast: dict[str, dict[str, Any]]) -> None:
    result = fast["resumed"]
    assert result["differing"] == []
    assert result["compared"] > 50
    assert not [key for key in [*result["keys"], *result["state"]] if "logit" in key]
    assert not [key for key in result["keys"] if "clip" in key]


def test_logits_explode_without_it_and_stay_bounded_with_it(
    fast: dict[str, dict[str, Any]],
) -> None:
    """40 steps at lr 0.1, threshold 10: 116 at the end without, never above 18.4 with it."""
    result = fast["high lr"]
    assert result["without"][-1] > 8 * 10.0
    assert result["without"][-1] > 1.5 * result["without"][-10]
    assert max(result["with"]) < 2.5 * 10.0
    # Up to the first clip the runs are one.
    start = [value for value in result["without"] if value <= 10.0]
    assert result["with"][: len(start)] == start


@pytest.mark.slow
def test_debug_model_over_200_steps(tmp_path: Path) -> None:
    """The README's figure: without it the largest logit ends above 1000, with it below 80."""
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    script = ROOT / "scripts" / "figures" / "qk_clip.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(script), "--folder", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    with (tmp_path / "qk_clip.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert len(rows) == 200
    assert rows[-1]["logit"] > 20 * THRESHOLD
    # At so high an lr a step adds more than the threshold.
    assert max(row["logit clipped"] for row in rows[60:]) < 4 * THRESHOLD
    assert rows[-1]["loss clipped"] < rows[-1]["loss"] + 1.0
