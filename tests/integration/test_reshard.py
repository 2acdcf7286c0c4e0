"""Optimizer state saved on any mesh loads on any other, bit for bit; all ranks meet a NaN alike.

reshard_runs.py runs torchtitan's DeepSeek-V3 with dense, expert and AdamW parameters on eight
meshes of up to 4 gloo ranks.
"""

import itertools
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
MESHES = [
    "1 process",
    "fsdp 2",
    "pp 2",
    "fsdp 4",
    "hsdp 2x2",
    "fsdp 2 x tp 2",
    "ep 2 x fsdp 2",
    "pp 2 x fsdp 2",
]
RING = [(MESHES[i - 1], mesh) for i, mesh in enumerate(MESHES)]
RING += [(mesh, mesh) for mesh in MESHES]
# What one process computes, in another order of sums; 5.4e-8 seen.
NEXT_STEP = 1e-6
PARAMETERS, STATE = 27, 63
GUILTY = "layers.1.attention.wo.weight"


def run(algorithm: str, pairs: str, folder: Path) -> list[list[dict[str, Any]]]:
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    log = folder / "log"
    program = str(Path(__file__).with_name("reshard_runs.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, str(folder), algorithm, pairs]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()[-5000:]
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run("NorMuon", "ring", tmp_path_factory.mktemp("ring"))


def check_pair(ranks: list[dict[str, Any]], state: int) -> None:
    """Compare what was loaded with what was saved, and the next step with one process'."""
    # Every stage of a pipeline has its part; together they have everything.
    assert len({name for rank in ranks for name in rank["names"]}) == PARAMETERS + state
    for rank in ranks:
        assert rank["differing"] == []
        assert rank["crossings"] == []
        far = {name: d for name, d in rank["deviation"].items() if not d <= NEXT_STEP}
        assert not far


def pairs_of(results: list[list[dict[str, Any]]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {(r[0]["from"], r[0]["to"]): r for r in results if "from" in r[0]}


@pytest.mark.parametrize(("saved", "loaded"), RING)
def test_state_crosses_meshes(ring: list[list[dict[str, Any]]], saved: str, loaded: str) -> None:
    check_pair(pairs_of(ring)[saved, loaded], STATE)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "state"), [("NorMuon", STATE), ("Muon", 45), ("AdamW", 81)])
def test_state_crosses_every_pair_of_meshes(algorithm: str, state: int, tmp_path: Path) -> None:
    pairs = pairs_of(run(algorithm, "all", tmp_path))
    assert set(pairs) == set(itertools.product(MESHES, MESHES))
    for ranks in pairs.values():
        check_pair(ranks, state)


@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_and_stages_skip_or_raise_together(
    ring: list[list[dict[str, Any]]], mesh: str
) -> None:
    (ranks,) = [r for r in ring if r[0].get("nan") == mesh]
    for rank in ranks:
        assert rank["skip"] == {"differing": [], "skipped": 1, "message": ""}
        assert rank["error"]["differing"] == []
        assert (
            f"1 of {PARAMETERS} parameters are not finite: {GUILTY} (nan)."
            in (rank["error"]["message"])
        )


@pytest.mark.parametrize("mesh", ["fsdp 2", "pp 2"])
def test_trainer_survives_and_names_what_clipping_leaves(
    ring: list[list[dict[str, Any]]], mesh: str
) -> None:
    (ranks,) = [r for r in ring if r[0].get("trained into") == mesh]
    for rank in ranks:
        for kind in ("inf", "nan"):
            assert rank[f"{kind} skip"] == {"differing": [], "skipped": 1, "message": ""}
            assert rank[f"{kind} error"]["differing"] == []
        # Clipped, an inf is a NaN where it was and zero elsewhere; a NaN is everywhere.
        inf, nan = rank["inf error"]["message"], rank["nan error"]["message"]
        assert f"1 of {PARAMETERS} parameters are not finite: {GUILTY} (nan)." in inf
        assert "turns an inf into NaN" in inf
        assert f"{PARAMETERS} of {PARAMETERS} parameters are not finite" in nan
        assert "spreads one NaN to every gradient" in nan
