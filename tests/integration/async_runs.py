"""Run by test_async_save.py on 2 gloo ranks: steps are taken while a checkpoint is being written.

async_runs.py FOLDER MODE STATE_DTYPE [MODE STATE_DTYPE ...] writes one JSON line a case to
FOLDER/results.jsonl.
"""

import gc
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402

from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.torchtitan_runs import run_config  # noqa: E402
from titan_muon.integration.checkpoint import CrossingPlanner  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

SAVE, RELEASE, END = 3, 5, 6


def saved_step(mode: str, state_dtype: str, folder: Path) -> None:
    """Train; hold the writer of step 3 back until step 5 is over; load what it wrote."""
    config = run_config("llama3 small", {}, "NorMuon")
    config.optimizer = optimizer_config("NorMuon", lr=2e-2, state_dtype=state_dtype)
    config.dump_folder = str(folder / f"{mode} {state_dtype}")
    config.training.steps = END
    config.checkpoint.enable = True
    config.checkpoint.interval = SAVE
    config.checkpoint.async_mode = mode
    config.checkpoint.last_save_model_only = False
    cpu_runtime.adapt_config(config)
    trainer = config.build()
    optimizer = trainer.optimizers.optimizers[0]
    held, at_save, steps_while_held = threading.Event(), {}, 0
    save, write = trainer.checkpointer.save, FileSystemWriter.write_data

    def noting_save(step: int, last_step: bool = False) -> bool:
        nonlocal steps_while_held
        if step == SAVE:
            at_save.update(copies(trainer))
        elif step > SAVE and not held.is_set():
            steps_while_held += 1
            if step == RELEASE:
                held.set()
        return save(step, last_step)

    def held_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if mode != "disabled":
            held.wait(120)
        return write(self, *args, **kwargs)

    trainer.checkpointer.save = noting_save
    FileSystemWriter.write_data = held_write  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
    moved = [name for name, value in copies(trainer).items() if value != at_save[name]]
    path = Path(config.dump_folder) / "checkpoint" / f"step-{SAVE}"
    states = {"optimizer": trainer.optimizers, **trainer.checkpointer.states["model"].state_dict()}
    dcp.load(states, checkpoint_id=path, planner=CrossingPlanner("zeros", path))
    trainer.checkpointer.states["model"].load_state_dict(states)
    loaded = copies(trainer)
    result = {
        "mode": mode,
        "state_dtype": state_dtype,
        "steps": steps_while_held,
        "compared": len(loaded),
        "moved": len(moved),
        "differing": [name for name in loaded if loaded[name] != at_save[name]],
        "used": trainer.config.checkpoint.async_mode,
        "types": sorted(
            {type(_inner(v)).__name__ for s in optimizer.state.values() for v in s.values()}
        ),
    }
    trainer.close()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        with (folder / "results.jsonl").open("a") as file:
            print(json.dumps(results), file=file)


def copies(trainer: Any) -> dict[str, bytes]:
    """Return the bytes of all weights and state of this rank."""
    found = {}
    for part in trainer.model_parts:
        for name, p in part.named_parameters():
            found[name] = _bytes(p)
    for group in trainer.optimizers.optimizers[0].param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            for key, value in trainer.optimizers.optimizers[0].state[p].items():
                found[f"{name}/{key}"] = _bytes(value)
    return found


def _inner(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensor: Any) -> bytes:
    local = _inner(tensor)
    flatten = getattr(local, "__tensor_flatten__", None)
    parts = [getattr(local, name) for name in flatten()[0]] if flatten else [local]
    return b"".join(
        part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts
    )


def main() -> None:
    logging.disable(logging.WARNING)
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    run_ranks(2, each, list(zip(cases[::2], cases[1::2], strict=True)), folder, limit=300.0)


def each(cases: list[tuple[str, str]], folder: Path) -> None:
    for mode, state_dtype in cases:
        saved_step(mode, state_dtype, folder)
        gc.collect()
        # DTensor's cache would answer the next Trainer with this one's mesh objects.
        _clear_sharding_prop_cache()


if __name__ == "__main__":
    main()
