"""A checkpoint that is written while training goes on holds the step at which it was begun."""

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
# Mode and state dtype. On a CPU there is no memory to pin, so that mode becomes "async".
FAST = [("async", "int8")]
SLOW = [
    ("disabled", "auto"),
    ("async", "auto"),
    ("async", "bfloat16"),
    ("async", "int4"),
    ("async", "float8"),
    ("async_with_pinned_mem", "auto"),
]
CLASSES = {"int8": "OptimState8bit", "int4": "OptimState4bit", "float8": "OptimStateFp8"}


def run(cases: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    pytest.importorskip("torchao", reason="quantised state needs torchao")
    log = folder / "log"
    program = str(Path(__file__).with_name("async_runs.py"))
    command = [sys.executable, program, str(folder), *(word for case in cases for word in case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()[-5000:]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {(ranks[0]["mode"], ranks[0]["state_dtype"]): ranks for ranks in results}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return run(FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return run(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)])
def test_save_in_flight_does_not_see_the_next_step(
    request: pytest.FixtureRequest, case: tuple[str, str]
) -> None:
    ranks = request.getfixturevalue("slow" if case in SLOW else "fast")[case]
    mode, state_dtype = case
    for rank in ranks:
        assert rank["differing"] == []
        # Both steps changed everything there is.
        assert rank["moved"] == rank["compared"] > 50
        assert rank["steps"] == 2
        assert rank["used"] == ("disabled" if mode == "disabled" else "async")
        assert (CLASSES.get(state_dtype, "Tensor")) in rank["types"]
