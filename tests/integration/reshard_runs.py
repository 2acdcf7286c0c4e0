"""Run by test_reshard.py: a torchtitan model's optimizer saved on every mesh, loaded on every mesh.

reshard_runs.py FOLDER ALGORITHM PAIRS writes one JSON line a pair of meshes to
FOLDER/results.jsonl, and one a mesh for steps with a NaN on one rank. PAIRS is ``all`` or ``ring``:
every mesh loads what it saved itself and what the mesh before it did.
"""

import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from tests.helpers import real_layouts  # noqa: E402
from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.real_layouts import local, parameters_of, state_of, whole  # noqa: E402
from tests.helpers.torchtitan_runs import LAYOUTS, SAMPLES_PER_STEP, run_config  # noqa: E402
from titan_muon.integration.checkpoint import CrossingPlanner  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

LIMIT_SECONDS = 600.0
MODEL = "deepseek_v3 small"
# name -> (ranks, layout); the first one is the yardstick.
MESHES: dict[str, tuple[int, str]] = {
    "1 process": (1, "fsdp"),
    "fsdp 2": (2, "fsdp"),
    "pp 2": (2, "pp x fsdp"),
    "fsdp 4": (4, "fsdp"),
    "hsdp 2x2": (4, "hsdp"),
    "fsdp 2 x tp 2": (4, "fsdp x tp"),
    "ep 2 x fsdp 2": (4, "ep x fsdp"),
    "pp 2 x fsdp 2": (4, "pp x fsdp"),
}
# Where the Trainer itself meets an inf or a NaN.
TRAINED = ("fsdp 2", "pp 2")
POISONED = "layers.1.attention.wo.weight"


def build_trainer(mesh: str) -> Any:
    ranks, layout = MESHES[mesh]
    batch = SAMPLES_PER_STEP if ranks == 1 else 2
    return run_config(MODEL, LAYOUTS[layout], "Muon", local_batch_size=batch).build()


def build_optimizer(trainer: Any, algorithm: str, **options: Any) -> Any:
    config = optimizer_config(algorithm, lr=real_layouts.GIVEN_LR, wire_dtype="float32", **options)
    return config.build(model_parts=trainer.model_parts)


def everything(trainer: Any, container: Any) -> dict[str, Tensor]:
    """Return weights and state of this rank's stage as whole tensors. Collective."""
    weights = {name: whole(p) for name, p in parameters_of(trainer.model_parts).items()}
    return weights | state_of(container.optimizers[0])


def local_bits(trainer: Any, container: Any) -> dict[str, Tensor]:
    parameters = parameters_of(trainer.model_parts)
    found = {name: local(p).clone() for name, p in parameters.items()}
    state = container.optimizers[0].state
    for name, p in parameters.items():
        found |= {f"{name}/{key}": local(value).clone() for key, value in state[p].items()}
    return found


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in parameters_of(trainer.model_parts).items()}


def next_step(trainer: Any, container: Any) -> dict[str, Tensor]:
    """Step once more with given gradients; return the change of each weight. Collective."""
    parameters = parameters_of(trainer.model_parts)
    before = {name: whole(p) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        grad = real_layouts.draw(f"gradient next {name}", parameter.shape, 1e-3)
        parameter.grad = real_layouts.like(parameter, grad)
    container.step()
    container.zero_grad()
    return {name: whole(p) - before[name] for name, p in parameters.items()}


def save(trainer: Any, mesh: str, algorithm: str, folder: Path) -> None:
    """Save after two given steps; keep what was saved, and what the next step makes of it."""
    _, container, _ = real_layouts.give_steps(trainer.model_parts, algorithm, "float32")
    dcp.save({"optimizer": container, "weights": weights_of(trainer)}, checkpoint_id=folder / mesh)
    kept = {"saved": everything(trainer, container)}
    kept["moved"] = next_step(trainer, container)
    kept["bits"] = local_bits(trainer, container)
    torch.save(kept, folder / f"{mesh} {dist.get_rank()}.pt")


def kept_of(mesh: str, key: str, folder: Path) -> dict[str, Tensor]:
    """Return what all ranks of a mesh kept under a key, by name."""
    files = [folder / f"{mesh} {rank}.pt" for rank in range(MESHES[mesh][0])]
    parts = [torch.load(file, mmap=True)[key] for file in files]
    return {name: value for part in parts for name, value in part.items()}


def sources_of(mesh: str) -> list[str]:
    names = list(MESHES)
    return names if sys.argv[3] == "all" else [names[names.index(mesh) - 1], mesh]


def load(trainer: Any, mesh: str, algorithm: str, folder: Path) -> None:
    """Load what other meshes saved into new optimizers."""
    expected = kept_of(next(iter(MESHES)), "moved", folder)
    for source in sources_of(mesh):
        container = build_optimizer(trainer, algorithm)
        with torch.no_grad():
            for parameter in parameters_of(trainer.model_parts).values():
                local(parameter).fill_(7.0)
        planner = CrossingPlanner("zeros", folder / source)
        states = {"optimizer": container, "weights": weights_of(trainer)}
        dcp.load(states, checkpoint_id=folder / source, planner=planner)
        saved = kept_of(source, "saved", folder)
        loaded = everything(trainer, container)
        differing = [name for name, value in loaded.items() if not torch.equal(value, saved[name])]
        moved = next_step(trainer, container)
        result = {"from": source, "to": mesh, "names": list(loaded), "differing": differing}
        result["crossings"] = list(planner.notes)
        result["deviation"] = real_layouts.deviation(moved, expected)
        if source == mesh:
            bits = torch.load(folder / f"{mesh} {dist.get_rank()}.pt")["bits"]
            now = local_bits(trainer, container)
            result["differing"] += [f"next {n}" for n in bits if not torch.equal(bits[n], now[n])]
        write(result, folder)


def meet_nan(trainer: Any, mesh: str, algorithm: str, folder: Path) -> None:
    """Step with a NaN in one weight's gradient, on the last rank that holds a part of it."""
    result: dict[str, Any] = {"nan": mesh}
    for mode in ("skip", "error"):
        container = build_optimizer(trainer, algorithm, nonfinite=mode)
        next_step(trainer, container)
        before = local_bits(trainer, container)
        parameters = parameters_of(trainer.model_parts)
        for name, parameter in parameters.items():
            grad = real_layouts.draw(f"gradient nan {name}", parameter.shape, 1e-3)
            parameter.grad = real_layouts.like(parameter, grad)
        guilty = parameters.get(POISONED)
        holders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(holders, guilty is not None and local(guilty).numel() > 0)
        last = max(rank for rank, holds in enumerate(holders) if holds)
        if dist.get_rank() == last and guilty is not None:
            local(guilty.grad).view(-1)[-1] = float("nan")
        message = ""
        try:
            container.step()
        except FloatingPointError as error:
            message = str(error)
        now = local_bits(trainer, container)
        result[mode] = {
            "differing": [name for name in before if not torch.equal(before[name], now[name])],
            "skipped": container.optimizers[0].skipped_steps,
            "message": message,
        }
        container.zero_grad()
    write(result, folder)


def train_into_nan(trainer: Any, mesh: str, algorithm: str, folder: Path) -> None:
    """Let the Trainer clip and step with an inf, or a NaN, in one gradient."""
    result: dict[str, Any] = {"trained into": mesh}
    original = dist_utils.clip_grad_norm_
    for kind in ("inf", "nan"):
        for mode in ("skip", "error"):
            container = build_optimizer(trainer, algorithm, nonfinite=mode)
            trainer.optimizers = trainer.metrics_processor.optimizers = container
            trainer.lr_schedulers = trainer.config.lr_scheduler.build(
                optimizers=container, training_steps=trainer.config.training.steps
            )

            def clip(parameters: Any, *args: Any, value: str = kind, **kwargs: Any) -> Any:
                guilty = parameters_of(trainer.model_parts).get(POISONED)
                if guilty is not None and dist.get_rank() == dist.get_world_size() - 1:
                    local(guilty.grad).view(-1)[0] = float(value)
                return original(parameters, *args, **kwargs)

            vars(dist_utils)["clip_grad_norm_"] = clip
            before, message = local_bits(trainer, container), ""
            try:
                with torch.enable_grad():
                    trainer.train_step(trainer.batch_generator(trainer.dataloader))
            except FloatingPointError as error:
                message = str(error)
            finally:
                vars(dist_utils)["clip_grad_norm_"] = original
            now = local_bits(trainer, container)
            container.zero_grad()
            result[f"{kind} {mode}"] = {
                "differing": [name for name in before if not torch.equal(before[name], now[name])],
                "skipped": container.optimizers[0].skipped_steps,
                "message": message,
            }
    write(result, folder)


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Append the results of all ranks as one line. Collective."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        with (folder / "results.jsonl").open("a") as file:
            print(json.dumps(results), file=file)


def each(
    functions: list[Callable[..., None]], meshes: list[str], algorithm: str, folder: Path
) -> None:
    for mesh in meshes:
        started = time.perf_counter()
        trainer = build_trainer(mesh)
        with torch.no_grad():
            for function in functions:
                if function is train_into_nan and mesh not in TRAINED:
                    continue
                function(trainer, mesh, algorithm, folder)
        trainer.close()
        del trainer
        gc.collect()
        # DTensor's cache would answer the next Trainer with this one's mesh objects.
        _clear_sharding_prop_cache()
        if dist.get_rank() == 0:
            print(mesh, [f.__name__ for f in functions], f"{time.perf_counter() - started:.1f} s")


def main() -> None:
    logging.disable(logging.WARNING)
    folder, algorithm = Path(sys.argv[1]), sys.argv[2]
    for functions in ([save], [load, meet_nan, train_into_nan]):
        for ranks in (1, 2, 4):
            meshes = [mesh for mesh, (n, _) in MESHES.items() if n == ranks]
            run_ranks(ranks, each, functions, meshes, algorithm, folder, limit=LIMIT_SECONDS)


if __name__ == "__main__":
    main()
