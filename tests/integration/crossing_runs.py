"""Run by test_crossing.py: Trainers that go on with another optimizer, on another mesh.

crossing_runs.py FOLDER: torchtitan's own AdamW on 2 ranks, then NorMuon on 4 ranks with tensor
parallelism, then this package's AdamW on 2 ranks, each from the checkpoint of the one before.
Writes results of all ranks to FOLDER/NAME.json.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from torchtitan.tools.logging import logger  # noqa: E402

from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.real_layouts import whole  # noqa: E402
from tests.helpers.torchtitan_runs import LAYOUTS, MODELS, run_config  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

LIMIT_SECONDS = 600.0
STEPS = {"stock": 3, "normuon": 5, "adamw": 6}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(name: str, layout: str, folder: Path) -> None:
    config = run_config("llama3 small", LAYOUTS[layout], "Muon")
    if name == "stock":
        config.optimizer = MODELS["llama3 small"]().optimizer
        config.optimizer.implementation = "for-loop"
    elif name == "normuon":
        config.optimizer = optimizer_config("NorMuon", lr=1e-3, momentum_from="exp_avg")
    else:
        config.optimizer = optimizer_config("AdamW", lr=1e-3)
    config.dump_folder = str(folder)
    config.training.steps = STEPS[name]
    config.checkpoint.enable = True
    config.checkpoint.interval = 100
    config.checkpoint.last_save_model_only = False
    config.checkpoint.keep_latest_k = 0
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    result: dict[str, Any] = {}
    optimizer = trainer.optimizers.optimizers[0]

    def compare(*_: Any) -> None:
        if not losses and name != "stock" and not result:
            result.update(compare_with_file(trainer, folder))

    optimizer.register_step_pre_hook(compare)
    trainer.train()
    logger.removeHandler(handler)
    logger.setLevel(level)
    torch.save(state(trainer), folder / f"state-{dist.get_rank()}.pt")
    result |= {"losses": losses, "lines": [li for li in handler.lines if "Optimizer state" in li]}
    trainer.close()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))


def state(trainer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for optimizer in trainer.optimizers.optimizers:
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                found |= {f"{name}/{k}": whole(v) for k, v in optimizer.state[p].items()}
                found[name] = whole(p)
    return found


def compare_with_file(trainer: Any, folder: Path) -> dict[str, Any]:
    """Compare what was loaded with what the run before left."""
    before = torch.load(folder / "state-0.pt")
    now = state(trainer)
    kinds: dict[str, list[str]] = {"same": [], "exp_avg": [], "zero": [], "other": []}
    for name, value in now.items():
        parameter = name.partition("/")[0]
        if name in before and torch.equal(before[name], value):
            kinds["same"].append(name)
        elif not value.any():
            kinds["zero"].append(name)
        elif torch.equal(before.get(f"{parameter}/exp_avg", value + 1), value):
            kinds["exp_avg"].append(name)
        else:
            kinds["other"].append(name)
    return kinds


def main() -> None:
    folder = Path(sys.argv[1])
    for name, ranks, layout in (
        ("stock", 2, "fsdp"),
        ("normuon", 4, "fsdp x tp"),
        ("adamw", 2, "fsdp"),
    ):
        run_ranks(ranks, run, name, layout, folder, limit=LIMIT_SECONDS)


if __name__ == "__main__":
    main()
