"""Run by test_resume.py: Trainers that run through, stop, and resume in processes of their own.

resume_runs.py FOLDER RANKS CASE [CASE ...], a case being ``model | layout | algorithm``; all run on
the same number of gloo ranks. Writes one JSON line a case to FOLDER/results.jsonl.
"""

import gc
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402

from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.real_layouts import local  # noqa: E402
from tests.helpers.torchtitan_runs import LAYOUTS, run_config  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

LIMIT_SECONDS = 900.0
STOP, END, SCHEDULED = 3, 6, 8
LR = 2e-2


def make_config(case: str, folder: Path, steps: int) -> Any:
    model, layout, algorithm = case.split(" | ")
    config = run_config(model, LAYOUTS[layout], algorithm)
    config.optimizer = optimizer_config(algorithm, lr=LR)
    config.dump_folder = str(folder / case.replace(" | ", "-").replace(" ", "_"))
    config.training.steps = steps
    # Its default, training.steps, would give a run that stops early another schedule.
    config.lr_scheduler.total_steps = SCHEDULED
    config.checkpoint.enable = True
    config.checkpoint.interval = SCHEDULED
    config.checkpoint.last_save_model_only = False
    return config


def run_through(case: str, folder: Path) -> None:
    config = make_config(case, folder, END)
    config.checkpoint.enable = False
    trainer = config.build()
    losses = train(trainer)
    torch.save(everything(trainer, losses[STOP:]), _file(folder, case))
    trainer.close()


def stop(case: str, folder: Path) -> None:
    trainer = make_config(case, folder, STOP).build()
    # Whoever asks for the state before the first step must not change what follows.
    trainer.optimizers.state_dict()
    train(trainer)
    trainer.close()


def resume(case: str, folder: Path) -> None:
    config = make_config(case, folder, END)
    trainer = config.build()
    losses = train(trainer)
    expected = torch.load(_file(folder, case), weights_only=False)
    differing = differences(everything(trainer, losses), expected)
    result = {"case": case, "compared": len(expected), "differing": differing}
    result["losses"] = losses
    result["keys"] = checkpoint_keys(Path(config.dump_folder))
    result["state"] = list(trainer.optimizers.state_dict())
    trainer.close()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        result["differing"] = sorted({name for one in results for name in one["differing"]})
        result["state"] = sorted({key for one in results for key in one["state"]})
        _write(folder, result)


def resume_with_other_options(case: str, folder: Path) -> None:
    """Resume the stopped run with another lr, weight decay and schedule; look at the first step."""
    for change in ("options", "schedule"):
        config = make_config(case, folder, STOP + 1)
        config.checkpoint.load_only = True
        config.checkpoint.load_step = STOP
        if change == "options":
            config.optimizer = optimizer_config(config.optimizer.name, lr=LR / 4, weight_decay=0.2)
        else:
            config.lr_scheduler.total_steps = 2 * SCHEDULED
        trainer = config.build()
        used: list[Any] = []
        optimizer = trainer.optimizers.optimizers[0]

        def note(optimizer: Any, *_: Any, used: list[Any] = used, trainer: Any = trainer) -> None:
            scheduler = trainer.lr_schedulers.schedulers[0]
            used.append(
                {
                    "lr": [group["lr"] for group in optimizer.param_groups],
                    "base": [group["initial_lr"] for group in optimizer.param_groups],
                    "weight_decay": [group["weight_decay"] for group in optimizer.param_groups],
                    "scheduled": list(scheduler.get_last_lr()),
                    "factor": scheduler.lr_lambdas[0](scheduler.last_epoch),
                }
            )

        optimizer.register_step_pre_hook(note)
        train(trainer)
        trainer.close()
        if dist.get_rank() == 0:
            _write(folder, {"case": f"{case} | other {change}", "used": used})
        _forget(trainer)


def resume_without_state(case: str, folder: Path) -> None:
    """Resume with new optimizer state: what a comparison that can fail must see."""
    config = make_config(case, folder, END)
    config.checkpoint.load_only = True
    config.checkpoint.load_step = STOP
    config.checkpoint.exclude_from_loading = ["optimizer"]
    trainer = config.build()
    losses = train(trainer)
    expected = torch.load(_file(folder, case), weights_only=False)
    differing = differences(everything(trainer, losses), expected)
    trainer.close()
    if dist.get_rank() == 0:
        _write(folder, {"case": f"{case} | without state", "differing": differing})


def train(trainer: Any) -> list[float]:
    """Train to the end of the config and return the loss of each step."""
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    trainer.train()
    return losses


def everything(trainer: Any, losses: list[float]) -> dict[str, Any]:
    """Return all that a run is made of, this rank's shards by name."""
    found: dict[str, Any] = {}
    for part in trainer.model_parts:
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            found[name] = local(tensor).clone()
    for number, group in enumerate(trainer.optimizers.optimizers[0].param_groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            for key, value in trainer.optimizers.optimizers[0].state[param].items():
                found[f"{name}/{key}"] = local(value).clone()
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found |= {f"group {number}/{key}": value for key, value in options.items()}
    found["last_lr"] = trainer.lr_schedulers.schedulers[0].get_last_lr()
    found["last_epoch"] = trainer.lr_schedulers.schedulers[0].last_epoch
    found["train state"] = trainer.state_dict()
    found["data"] = trainer.dataloader.state_dict()
    found["losses"] = losses
    return found


def differences(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of what is missing or differs in a bit."""
    names = [name for name in {**got, **expected} if name not in got or name not in expected]
    for name in set(got) & set(expected):
        a, b = got[name], expected[name]
        if isinstance(a, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        else:
            same = a == b
        if not same:
            names.append(name)
    return names


def checkpoint_keys(dump_folder: Path) -> list[str]:
    folder = dump_folder / "checkpoint" / f"step-{STOP}"
    return sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _file(folder: Path, case: str) -> Path:
    return folder / f"{case.replace(' | ', '-').replace(' ', '_')}-{dist.get_rank()}.pt"


def _write(folder: Path, result: dict[str, Any]) -> None:
    with (folder / "results.jsonl").open("a") as file:
        print(json.dumps(result), file=file)


def _forget(*_: Any) -> None:
    gc.collect()
    # DTensor's cache would answer the next Trainer with this one's mesh objects.
    _clear_sharding_prop_cache()


def each(function: Callable[[str, Path], None], cases: list[str], folder: Path) -> None:
    for case in cases:
        function(case, folder)
        _forget()


def main() -> None:
    logging.disable(logging.WARNING)
    folder, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for function in (run_through, stop, resume):
        run_ranks(ranks, each, function, cases, folder, limit=LIMIT_SECONDS)
    for function in (resume_with_other_options, resume_without_state):
        run_ranks(ranks, each, function, cases[:1], folder, limit=LIMIT_SECONDS)


if __name__ == "__main__":
    main()
