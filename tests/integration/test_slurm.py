"""scripts/slurm.sh without Slurm: what it would run, two agents that really meet, requeueing."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = "train_configs/llama3_debug_muon.toml"
# Stand-ins for Slurm's programs. srun starts its command once for each node, all on this host.
PROGRAMS = {
    "scontrol": """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; echo node2; else echo "$@" >> "$SLURM_TEST/asked"; fi
""",
    "srun": """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
[ -z "${SRUN_FAILS:-}" ] || exit 7
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" > "$SLURM_TEST/node$node" 2>&1 & done
wait -n && wait -n
""",
}


@pytest.fixture
def slurm(tmp_path):
    """Return a function that runs the script as Slurm would, from a copy elsewhere."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "slurm_script"
    script.write_text((ROOT / "scripts/slurm.sh").read_text())
    venv = Path(sys.executable).parents[1]
    base = {
        **os.environ,
        "PATH": f"{tmp_path}:{venv / 'bin'}:{os.environ['PATH']}",
        "TITAN_MUON_VENV": str(venv),
        "SLURM_TEST": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost,node2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(*args: str, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", str(script), *args],
            env={key: value for key, value in {**base, **more}.items() if value},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


def test_dry_run(slurm):
    done = slurm(CONFIG, "--training.steps", "5", DRY_RUN="1", NGPU="4", MASTER_PORT="29999")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:2] == ["srun", "--nodes=2"]
    assert {"--nnodes=2", "--nproc_per_node=4"} <= set(words)
    assert words[words.index("--rdzv_endpoint") + 1] == "localhost:29999"
    assert words[words.index("--rdzv_id") + 1] == "7"
    assert words[-4:] == ["--job.config_file", CONFIG, "--training.steps", "5"]


@pytest.mark.parametrize(
    ("args", "more", "part"),
    [
        ((), {}, "name a train config"),
        (("train_configs/gone.toml",), {}, "train_configs/gone.toml does not exist"),
        ((CONFIG,), {"SLURM_JOB_ID": ""}, "this is no Slurm job"),
        ((CONFIG,), {"SLURM_SUBMIT_DIR": "/"}, "/ is no checkout of titan-muon"),
    ],
)
def test_mistakes(slurm, args, more, part):
    done = slurm(*args, **more)
    assert done.returncode == 1
    assert part in done.stderr


@pytest.fixture
def no_setup(tmp_path, monkeypatch):
    """Keep the script from installing into the environment of the tests."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (tmp_path / "checkout" / "scripts").mkdir(parents=True)
    checkout = tmp_path / "checkout"
    text = (ROOT / "scripts/setup.sh").read_text() + "\nsetup() { :; }\n"
    (checkout / "scripts/setup.sh").write_text(text)
    (checkout / "train_configs").symlink_to(ROOT / "train_configs")
    return checkout


@pytest.mark.parametrize(("restarts", "requeued"), [("0", True), ("2", True), ("3", False)])
def test_a_failed_job_goes_back_into_the_queue(slurm, no_setup, tmp_path, restarts, requeued):
    done = slurm(
        CONFIG,
        SRUN_FAILS="1",
        SLURM_RESTART_COUNT=restarts,
        SLURM_SUBMIT_DIR=str(no_setup),
        TITAN_MUON_DATA=str(tmp_path / "data"),
    )
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "asked").is_file() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.slow
def test_two_nodes_train_together(slurm, no_setup, tmp_path):
    pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    data = os.environ.get("TITAN_MUON_DATA", str(ROOT / "outputs/data"))
    done = slurm(
        *(CONFIG, "--training.steps", "2", "--validator.no-enable", "--checkpoint.no-enable"),
        *("--dump_folder", str(tmp_path / "out"), "--hf_assets_path", f"{data}/tokenizer"),
        *("--metrics.log_freq", "1"),
        NGPU="1",
        MASTER_PORT=str(port),
        SLURM_SUBMIT_DIR=str(no_setup),
        TITAN_MUON_DATA=data,
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / f"node{n}").read_text() for n in (1, 2)]
    assert all("global batch size 8" in log and "Training completed" in log for log in logs)
