"""Validation loss of the debug model after 60 steps, for each algorithm and state dtype.

    python scripts/loss_table.py [--algorithms Muon AdamW] [--state-dtypes float32 int8]

Needs titan-muon[torchtitan,lp]. Every run is one process of titan_muon.train on a train config of
this repository, without checkpoints; a run takes a minute or two on a free CPU core. Results are
kept in --output, so that a second call runs only what is missing.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("Muon", "NorMuon", "AdaMuon", "Aurora", "AdamW")
STATE_DTYPES = ("float32", "bfloat16", "int8", "float8", "int4")


def train(algorithm: str, state_dtype: str, steps: int, folder: Path) -> float | None:
    """Return the validation loss of one run, None if it failed; its log stays in ``folder``."""
    log = folder / f"{algorithm}-{state_dtype}.log"
    if not log.exists() or loss_in(log, steps) is None:
        name = "llama3_debug_adamw" if algorithm == "AdamW" else "llama3_debug_muon"
        flags = {
            "job.config_file": f"train_configs/{name}.toml",
            "optimizer.name": algorithm,
            "optimizer.state_dtype": state_dtype,
            "optimizer.adamw.state_dtype": state_dtype,
            "training.steps": str(steps),
            "validator.freq": str(steps),
            "dump_folder": str(folder / f"{algorithm}-{state_dtype}"),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        command += ["-m", "titan_muon.train", "--checkpoint.no-enable"]
        command += [part for key, value in flags.items() for part in (f"--{key}", value)]
        with log.open("w") as file:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    return loss_in(log, steps)


def loss_in(log: Path, steps: int) -> float | None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    found = re.findall(rf"validate step:\s*{steps}\s+loss:\s*([0-9.]+|nan)", text)
    return float(found[-1]) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--state-dtypes", nargs="+", default=STATE_DTYPES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "loss_table")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"| `state_dtype` | {' | '.join(options.algorithms)} |")
    print("| --- |" + " --- |" * len(options.algorithms), flush=True)
    for state_dtype in options.state_dtypes:
        losses = [train(a, state_dtype, options.steps, options.output) for a in options.algorithms]
        cells = ["failed" if loss is None else f"{loss:.4f}" for loss in losses]
        print(f"| `{state_dtype}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
