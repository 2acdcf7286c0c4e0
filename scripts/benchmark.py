"""Run every benchmark and write the tables to a file.

    python scripts/benchmark.py [--quick] [--output RESULTS.md]

Sections: orthogonalization, whole steps on one device, on one rank of many without the others, and
on sharded weights by torchrun (as many processes as GPUs, at least 2; gloo where there are fewer
than 2 GPUs). Each runs in a process of its own; one that fails is written down as it failed, and
the exit status is 1.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats")
    parser.add_argument("--output", type=Path, default=Path("RESULTS.md"))
    options = parser.parse_args(arguments)
    text = ["# Benchmark results", "", f"Written by `{' '.join(_shown_command())}`."]
    failed = False
    for title, command, environment in sections(options.quick):
        print(f"== {title}", flush=True)
        result = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        print(result.stdout, flush=True)
        shown = " ".join(["python" if c == sys.executable else c for c in command])
        text += ["", f"## {title}", "", f"`{shown.replace(f'{FOLDER}/', 'scripts/')}`", ""]
        text += ["```", result.stdout.strip(), "```"]
        if result.returncode:
            failed = True
            text += ["", "Failed:", "```", result.stderr.strip()[-2000:], "```"]
    options.output.write_text("\n".join(text) + "\n")
    print(f"wrote {options.output}")
    return int(failed)


def sections(quick: bool) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return title, command and extra environment of every section."""
    flag = ["--quick"] if quick else []
    gpus = torch.cuda.device_count()
    processes = max(2, gpus)
    # Two processes cannot share one GPU through NCCL.
    hidden = {} if gpus >= 2 else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    steps = ["--steps", "3"] if quick or gpus < 2 else []
    size = ["--ranks", "8", "--layers", "4", "--steps", "3"] if quick or not gpus else []
    return [
        ("Orthogonalization", [sys.executable, str(FOLDER / "bench_orthogonalize.py"), *flag], {}),
        ("Whole step, one device", [sys.executable, str(FOLDER / "bench_step.py"), *flag], {}),
        ("Whole step, one rank", [sys.executable, str(FOLDER / "bench_rank.py"), *size], {}),
        (
            "Whole step, sharded weights",
            [*torchrun, str(FOLDER / "bench_distributed.py"), *steps],
            hidden,
        ),
    ]


def _shown_command() -> list[str]:
    return ["python", "scripts/benchmark.py", *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
