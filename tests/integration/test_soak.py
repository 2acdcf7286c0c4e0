"""2,000 steps on two ranks: flat memory, a falling loss, and the same end in four pieces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from titan_muon.integration import cpu_runtime

ROOT = Path(__file__).parents[2]
STEPS = 2000


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    log = tmp_path / "log"
    program = str(Path(__file__).with_name("soak_runs.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, str(tmp_path), str(STEPS)]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()[-5000:]
    whole, pieces, last = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("whole", "pieces", "piece 3")
    )
    for rank in whole:
        losses, counts = rank["losses"], rank["counts"]
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {counts}")
        assert len(losses) == STEPS
        # Tokens are random: what can be learned is that all of them are equally frequent.
        assert losses[-1] < losses[0]
        # The allocator goes on filling its arenas for a thousand steps; 2.5 MiB seen after them,
        # all of it before step 1,500. A tensor of 16 KiB a step would be 16 MiB.
        warm, end = counts[1], counts[-1]
        assert end["kib"] - warm["kib"] < 6 * 1024
        assert end["objects"] - warm["objects"] < 300
    for rank in pieces:
        assert rank["compared"] > 50
        assert rank["differing"] == []
    assert last[0]["steps"] == STEPS // 4
