"""Runs that are killed go on from their last complete checkpoint to the same end, bit for bit.

The job is started again; torchrun's own --max-restarts does not work with gloo, whose restarted
ranks look for those that are gone (torch 2.14).
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from titan_muon.integration import cpu_runtime

ROOT = Path(__file__).parents[2]
END, INTERVAL = 12, 4
LIMIT_SECONDS = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not cpu_runtime.needs_cpu_runtime() or not hasattr(os, "killpg"),
        reason="trains on the GPU here",
    ),
]


class Run:
    """One job of two ranks under torchrun, in a folder that later jobs find again.

    Args:
        folder: Everything the job writes.
        environment: More variables.
        arguments: More flags for the run.
    """

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for file in folder.glob("pid-*"):
            file.unlink()
        self._log = (folder / "log").open("a")
        self._start = self._log.tell()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", "-m", "titan_muon.train"]
        command += ["--module", "tests.helpers.crashing_run", "--config", "run"]
        command += ["--dump_folder", str(folder), "--training.steps", str(END)]
        command += ["--checkpoint.interval", str(INTERVAL), *arguments]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CRASH_FOLDER": str(folder)}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables, **environment},
            stdout=self._log,
            stderr=self._log,
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is there; an end of the job before that is an error."""
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.005)

    def wait_for_file(self, pattern: str) -> None:
        self.wait_for(lambda: any(self.folder.glob(pattern)))

    def kill_ranks(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        for rank in ranks:
            pid = int((self.folder / f"pid-{rank}").read_text())
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                # torchrun ends the other ranks when one is gone.
                assert rank != ranks[0]

    def kill_all(self) -> None:
        """As a machine that loses power: agent and ranks."""
        self._process.kill()
        self.kill_ranks(0, 1)

    def terminate(self) -> None:
        """As a scheduler does: SIGTERM to what it started."""
        self._process.terminate()

    def end(self) -> int:
        """Wait for the end, make sure that no rank is left, and return the exit code."""
        code = self._process.wait(LIMIT_SECONDS)
        self._log.close()
        pids = [int(file.read_text()) for file in self.folder.glob("pid-*")]
        end = time.monotonic() + 30
        while any(_runs(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(_runs(pid) for pid in pids)
        return code

    def log(self) -> str:
        """Return what this job has printed."""
        with (self.folder / "log").open() as file:
            file.seek(self._start)
            return file.read()

    def step(self, number: int) -> bool:
        return f"step: {number:2}" in self.log() or f"step: {number} " in self.log()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def contents(folder: Path, step: int = END) -> dict[str, Any]:
    """Return everything in a checkpoint, whole, by name."""
    target = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoint" / f"step-{step}", target)
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}{key}.", inner)
        else:
            flat[prefix[:-1]] = value

    flatten("", torch.load(target, weights_only=False))
    return flat


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = Run(tmp_path_factory.mktemp("whole") / "run")
    assert run.end() == 0, run.log()
    return contents(run.folder)


def check_resumed(run: Run, expected: dict[str, Any], step: int) -> None:
    """The job has resumed from ``step`` and ended as the uninterrupted one."""
    assert run.end() == 0, run.log()
    loaded = f"Loading the checkpoint from {run.folder}/checkpoint/step-{step}."
    assert (loaded in run.log()) == (step > 0)
    found = contents(run.folder)
    assert found.keys() == expected.keys()
    differing = [
        key
        for key, value in expected.items()
        if not (
            torch.equal(value, found[key]) if isinstance(value, Tensor) else value == found[key]
        )
    ]
    # Times differ from run to run.
    assert [key for key in differing if "time" not in key] == []
    assert sum(isinstance(value, Tensor) for value in expected.values()) > 50


def folder_of(step: int) -> str:
    return f"checkpoint/step-{step}"


@pytest.mark.parametrize("when", ["before the file", "in the file", "before the metadata"])
def test_killed_while_saving(when: str, expected: dict[str, Any], tmp_path: Path) -> None:
    step = 2 * INTERVAL
    run = Run(tmp_path / "run", SLOW_SAVE=str(step))
    if when == "before the file":
        run.wait_for(lambda: (run.folder / folder_of(step)).is_dir() or run.step(step))
    else:
        run.wait_for_file(f"{folder_of(step)}/__*_0.distcp")
    if when == "before the metadata":
        files = [run.folder / folder_of(step) / f"__{rank}_0.distcp" for rank in (0, 1)]
        run.wait_for(lambda: all(f.is_file() and f.stat().st_size > 1000 for f in files))
    run.kill_all()
    assert run.end() != 0
    assert not (run.folder / folder_of(step) / ".metadata").exists()
    check_resumed(Run(run.folder), expected, INTERVAL)


def test_killed_between_save_and_step(expected: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.wait_for_file(f"{folder_of(INTERVAL)}/.metadata")
    run.kill_all()
    assert run.end() != 0
    last = max(step for step in (4, 8, 12) if (run.folder / folder_of(step) / ".metadata").exists())
    check_resumed(Run(run.folder), expected, last)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_killed_ends_the_job(rank: int, expected: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW_SAVE=str(2 * INTERVAL))
    # While it is being written, so that the other rank waits for this one.
    run.wait_for_file(f"{folder_of(2 * INTERVAL)}/__*_0.distcp")
    run.kill_ranks(rank)
    assert run.end() != 0
    check_resumed(Run(run.folder), expected, INTERVAL)


def test_sigterm_as_schedulers_send_it(expected: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW_SAVE=str(2 * INTERVAL))
    run.wait_for_file(f"{folder_of(2 * INTERVAL)}/__*_0.distcp")
    run.terminate()
    assert run.end() != 0
    check_resumed(Run(run.folder), expected, INTERVAL)


def test_killed_again_and_again(expected: dict[str, Any], tmp_path: Path) -> None:
    """Five kills at random moments, start-up included, then a run to the end."""
    moments, folder = random.Random(0), tmp_path / "run"
    for _ in range(5):
        run = Run(folder)
        run.wait_for(lambda run=run: len(list(run.folder.glob("pid-*"))) == 2)
        time.sleep(moments.uniform(0.0, 8.0))
        if run._process.poll() is None:
            run.kill_all()
        run.end()
    complete = [s for s in (4, 8, 12) if (folder / folder_of(s) / ".metadata").exists()]
    check_resumed(Run(folder), expected, max(complete, default=0))


def test_saving_over_an_older_checkpoint_cannot_mix_them(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    assert run.end() == 0, run.log()
    # From step 4 again: step 8 is there already, with metadata.
    again = Run(run.folder, "--checkpoint.load_step", "4", SLOW_SAVE="8")
    again.wait_for(
        lambda: any(
            f.stat().st_size < 100 for f in again.folder.glob(f"{folder_of(8)}/__*_0.distcp")
        )
    )
    again.kill_all()
    assert again.end() != 0
    # Half old and half new is no checkpoint.
    assert not (again.folder / folder_of(8) / ".metadata").exists()
    check_resumed(Run(run.folder, "--checkpoint.load_step", "4"), expected, 4)


@pytest.mark.parametrize("damage", ["missing", "truncated", "metadata"])
def test_damaged_checkpoint_is_a_clear_error(damage: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--training.steps", "8")
    assert run.end() == 0, run.log()
    here = run.folder / folder_of(8)
    file = here / "__1_0.distcp"
    size = file.stat().st_size
    if damage == "missing":
        file.unlink()
        message = "the file __1_0.distcp is missing."
    elif damage == "truncated":
        os.truncate(file, size // 2)
        message = f"the file __1_0.distcp has {size // 2} bytes and should have {size}."
    else:
        os.truncate(here / ".metadata", 100)
        message = "its .metadata cannot be read: pickle data was truncated."
    failed = Run(run.folder)
    assert failed.end() != 0
    start = f"RuntimeError: {here} cannot be loaded: {message}"
    # Every rank says it, and torchrun once more.
    lines = [line for line in failed.log().splitlines() if start in line]
    assert lines
    for line in lines:
        assert "Other checkpoints there: 4; choose one with --checkpoint.load_step." in line
