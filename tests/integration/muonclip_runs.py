"""Run by test_muonclip_meshes.py: torchtitan models with QK-clip on 4 gloo ranks.

muonclip_runs.py FOLDER MESH [MESH ...] writes one JSON line a mesh, one for a run at a high lr and
one for a resumed run to FOLDER/results.jsonl; a mesh is ``model | layout`` or ``model | layout |
spmd backend``.
"""

import gc
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

from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402

from tests.helpers import real_layouts  # noqa: E402
from tests.helpers.forked_ranks import run_ranks  # noqa: E402
from tests.helpers.torchtitan_runs import LAYOUTS, SAMPLES_PER_STEP, run_config  # noqa: E402
from tests.integration import resume_runs  # noqa: E402
from titan_muon.integration.toml_optimizer import optimizer_config  # noqa: E402

WORLD_SIZE = 4
STEPS = 3
SECONDS = 900.0
# Watches and never clips.
NEVER = 1e30
# Of the largest logit at the start: some heads are above, some are not.
SHARE = 0.8
# Context parallelism deals in blocks of 128.
SEQUENCE_LENGTHS = {"cp x fsdp": 256}
HIGH_LR, HIGH_LR_STEPS, HIGH_LR_THRESHOLD = 0.1, 40, 10.0
RESUMED = "llama3 small | fsdp x tp | Muon"


def make_config(mesh: str, threshold: float, *, is_alone: bool = False) -> Any:
    model, layout, *backend = mesh.split(" | ")
    if layout == "cp x fsdp":
        fields: dict[str, Any] = {"context_parallel_degree": 2}
    else:
        fields = dict(LAYOUTS[layout])
    if backend:
        fields["spmd_backend"] = backend[0]
    if is_alone:
        config = run_config(model, {}, "Muon", local_batch_size=SAMPLES_PER_STEP)
    else:
        config = run_config(model, fields, "Muon")
    config.training.seq_len = SEQUENCE_LENGTHS.get(layout, config.training.seq_len)
    config.metrics.log_freq = 1
    config.optimizer = optimizer_config(
        "Muon", lr=2e-2, wire_dtype="float32", qk_clip_threshold=threshold
    )
    return config


def train(
    config: Any, steps: int = STEPS
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int]:
    """Return loss and QK-clip's figures of each step, whole weights, and differing replicas."""
    trainer = config.build()
    seen: list[dict[str, float]] = []

    def note(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        seen.append({"loss": loss, **trainer.optimizers.metrics.collect()})

    trainer.metrics_processor.log = note
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, steps + 1):
        trainer.step = step
        trainer.train_step(batches)
    tensors = real_layouts.parameters_of(trainer.model_parts)
    weights = {name: real_layouts.whole(tensor) for name, tensor in tensors.items()}
    replicas = real_layouts.differing_replicas(tensors)
    trainer.close()
    return seen, weights, replicas


def reference_file(mesh: str, folder: Path) -> Path:
    """Return where one process' results lie; meshes share them that see the same samples."""
    model, layout, *_ = mesh.split(" | ")
    return folder / f"{model} {SEQUENCE_LENGTHS.get(layout)}.pt"


def write_references(meshes: list[str], folder: Path) -> None:
    """One process: watch first, choose a threshold, then train with it."""
    for mesh in meshes:
        file = reference_file(mesh, folder)
        if file.exists():
            continue
        watched, without, _ = train(make_config(mesh, NEVER, is_alone=True))
        threshold = SHARE * watched[0]["optimizer/max_logit"]
        seen, weights, _ = train(make_config(mesh, threshold, is_alone=True))
        effect = real_layouts.deviation(without, weights)
        torch.save((threshold, seen, weights, effect), file)


def run_meshes(meshes: list[str], folder: Path) -> None:
    """All ranks: train on every mesh and write how far each weight is from one process'."""
    for mesh in meshes:
        # Pipelines learn their shapes from passes over uninitialised memory: let it be NaN.
        torch.use_deterministic_algorithms("pp" in mesh, warn_only=True)
        threshold, expected, reference, effect = torch.load(reference_file(mesh, folder))
        seen, weights, replicas = train(make_config(mesh, threshold))
        mine = (real_layouts.deviation(weights, reference), seen, replicas)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            moved = {name: d for distances, _, _ in ranks for name, d in distances.items()}
            # Under a pipeline only the last stage knows the loss.
            losses = [max(one[1][step]["loss"] for one in ranks) for step in range(STEPS)]
            result = {
                "mesh": mesh,
                "moved": moved,
                "parameters": list(reference),
                "steps": [{**step, "loss": loss} for step, loss in zip(seen, losses, strict=True)],
                "expected": expected,
                "effect": effect,
                "replicas": sum(one[2] for one in ranks),
            }
            write(folder, result)
        gc.collect()
        # DTensor's cache would answer the next Trainer with this one's mesh objects.
        _clear_sharding_prop_cache()


def write(folder: Path, result: dict[str, Any]) -> None:
    with (folder / "results.jsonl").open("a") as file:
        print(json.dumps(result), file=file)


def run_at_high_lr(folder: Path) -> None:
    """One process: what becomes of the logits at a high lr, without and with a threshold."""
    logits = {}
    for threshold in (NEVER, HIGH_LR_THRESHOLD):
        config = make_config("llama3 small | fsdp", threshold, is_alone=True)
        config.optimizer.lr = HIGH_LR
        config.lr_scheduler.warmup_steps = 1
        config.lr_scheduler.total_steps = 100 * HIGH_LR_STEPS
        seen, _, _ = train(config, HIGH_LR_STEPS)
        logits[threshold == NEVER] = [step["optimizer/max_logit"] for step in seen]
    write(folder, {"mesh": "high lr", "without": logits[True], "with": logits[False]})


def run_resumed(folder: Path) -> None:
    """Run through, stop, and resume, all with QK-clip."""
    original = resume_runs.make_config

    def with_clip(case: str, folder: Path, steps: int) -> Any:
        config = original(case, folder, steps)
        config.optimizer.qk_clip_threshold = 0.1
        return config

    resume_runs.make_config = with_clip
    for function in (resume_runs.run_through, resume_runs.stop, resume_runs.resume):
        run_ranks(WORLD_SIZE, resume_runs.each, function, [RESUMED], folder, limit=SECONDS)


def main() -> None:
    logging.disable(logging.WARNING)
    folder, meshes = Path(sys.argv[1]), sys.argv[2:]
    run_ranks(1, write_references, meshes, folder, limit=SECONDS)
    run_ranks(WORLD_SIZE, run_meshes, meshes, folder, limit=SECONDS)
    run_ranks(1, run_at_high_lr, folder, limit=SECONDS)
    run_resumed(folder)


if __name__ == "__main__":
    main()
