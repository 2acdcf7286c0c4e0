"""Run by test_soak.py on 2 gloo ranks: a long run, and the same run in four resumed pieces.

soak_runs.py FOLDER STEPS writes one JSON object a rank of figures to FOLDER/results.json.
"""

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.real_layouts import local  # noqa: E402
from tests.helpers.torchtitan_runs import run_config  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

LIMIT_SECONDS = 3000.0
PIECES = 4
# Of the run at which memory and objects are counted: warm, and at the end.
MOMENTS = (0.25, 0.5, 0.75, 1.0)


def build(folder: Path, steps: int, scheduled: int) -> Any:
    config = run_config("llama3 small", {}, "NorMuon")
    config.optimizer = optimizer_config("NorMuon", lr=4e-3, nonfinite="skip")
    config.dump_folder = str(folder)
    config.training.steps = steps
    config.lr_scheduler.total_steps = scheduled
    config.checkpoint.enable = True
    config.checkpoint.interval = 10 * scheduled
    config.checkpoint.last_save_model_only = False
    config.checkpoint.keep_latest_k = 0
    return config.build()


def memory() -> int:
    """Return the resident memory in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def train(trainer: Any, steps: int) -> tuple[list[float], list[dict[str, int]]]:
    losses: list[float] = []
    counts: list[dict[str, int]] = []
    moments = {int(steps * moment) for moment in MOMENTS}

    def log(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        if step in moments:
            gc.collect()
            counts.append({"kib": memory(), "objects": len(gc.get_objects())})

    trainer.metrics_processor.log = log
    trainer.train()
    return losses, counts


def state(trainer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for part in trainer.model_parts:
        for name, p in part.named_parameters():
            found[name] = local(p).clone()
    for group in trainer.optimizers.optimizers[0].param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            for key, value in trainer.optimizers.optimizers[0].state[p].items():
                found[f"{name}/{key}"] = local(value).clone()
    return found


def whole(folder: Path, steps: int) -> None:
    trainer = build(folder / "whole", steps, steps)
    losses, counts = train(trainer, steps)
    torch.save(state(trainer), folder / f"whole-{dist.get_rank()}.pt")
    write(folder, "whole", {"losses": losses, "counts": counts})
    trainer.close()


def piece(folder: Path, steps: int, number: int) -> None:
    trainer = build(folder / "pieces", steps * (number + 1) // PIECES, steps)
    losses, _ = train(trainer, steps)
    if number == PIECES - 1:
        expected = torch.load(folder / f"whole-{dist.get_rank()}.pt")
        found = state(trainer)
        differing = [name for name in expected if not torch.equal(expected[name], found[name])]
        write(folder, "pieces", {"compared": len(found), "differing": differing})
    write(folder, f"piece {number}", {"steps": len(losses)})
    trainer.close()


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))


def main() -> None:
    logging.disable(logging.WARNING)
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    run_ranks(2, whole, folder, steps, limit=LIMIT_SECONDS)
    for number in range(PIECES):
        run_ranks(2, piece, folder, steps, number, limit=LIMIT_SECONDS)


if __name__ == "__main__":
    main()
