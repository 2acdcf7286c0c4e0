"""Run by test_meshes.py: torchtitan models on 4 gloo ranks, mesh after mesh, against one process.

mesh_runs.py FOLDER MESH [MESH ...] writes one JSON line a mesh to FOLDER/results.jsonl.
"""

import copy
import gc
import json
import logging
import sys
import time
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
from tests.helpers.real_layouts import Outcome  # noqa: E402
from tests.helpers.torchtitan_runs import LAYOUTS, SAMPLES_PER_STEP, run_config  # noqa: E402

WORLD_SIZE = 4
START_SECONDS, MESH_SECONDS = 300.0, 120.0
ALGORITHMS = ("Muon", "NorMuon")
EXACT = [(algorithm, "float32") for algorithm in ALGORITHMS]
DEFAULT = [(algorithm, None) for algorithm in ALGORITHMS]
FAULTS = ("shard", "packet")


def parallelism_of(mesh: str) -> tuple[str, dict[str, Any], bool]:
    """Return model, fields of ParallelismConfig, and whether the optimizer is to be broken too.

    Args:
        mesh: ``model | layout``, ``model | layout | spmd backend`` or ``model | layout | broken``.
    """
    model, layout, *extra = mesh.split(" | ")
    fields = dict(LAYOUTS[layout])
    if extra and extra[0] != "broken":
        fields["spmd_backend"] = extra[0]
    return model, fields, extra == ["broken"]


def write_references(models: list[str], folder: Path) -> None:
    """One process: given steps on plain tensors, trained steps by an unsharded Trainer."""
    for model in models:
        config = run_config(model, {}, "Muon", local_batch_size=SAMPLES_PER_STEP)
        trainer = config.build()
        plain = copy.deepcopy(config.model_spec.model).build()
        start = real_layouts.snapshot(trainer.model_parts)
        reference: dict[Any, Any] = {}
        with torch.no_grad():
            for algorithm in ALGORITHMS:
                outcome, container, _ = real_layouts.give_steps([plain], algorithm, "float32")
                reference["given", algorithm] = outcome
                reference |= sizes(container.optimizers[0])
        for algorithm in ALGORITHMS:
            reference["trained", algorithm] = real_layouts.train_steps(
                trainer, start, algorithm, "float32"
            )
        trainer.close()
        torch.save(reference, folder / f"{model}.pt")


def sizes(optimizer: Any) -> dict[str, int]:
    """Return matrices of a step, and elements of those that no layout keeps whole on a rank."""
    works = optimizer._works
    members = [member for work in works for member in work.members]
    return {
        "matrices": sum(work.exchange.traffic.matrices for work in works),
        "elements": sum(m.param.numel() for m in members if m.param.ndim == 2),
    }


def run_meshes(meshes: list[str], folder: Path) -> None:
    """All ranks: measure every mesh and write the figures of all ranks together."""
    for mesh in meshes:
        started = time.process_time()
        model, parallelism, is_broken = parallelism_of(mesh)
        reference = torch.load(folder / f"{model}.pt", weights_only=False, mmap=True)
        config = run_config(model, parallelism, "Muon")
        trainer = config.build()
        figures = {"mesh": mesh, **(measure_broken if is_broken else measure)(trainer, reference)}
        trainer.close()
        figures["seconds"] = time.process_time() - started
        of_all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all_ranks, figures)
        if dist.get_rank() == 0:
            with (folder / "results.jsonl").open("a") as file:
                print(json.dumps(together(of_all_ranks, reference)), file=file)
        del trainer
        gc.collect()
        # DTensor's cache would answer the next Trainer with this one's mesh objects.
        _clear_sharding_prop_cache()


def measure(trainer: Any, reference: dict[Any, Any]) -> dict[str, Any]:
    """Return this rank's figures of one mesh."""
    start = real_layouts.snapshot(trainer.model_parts)
    given, trained = {}, {}
    is_small = trainer.model_config.dim < 256
    for algorithm, wire_dtype in EXACT + (DEFAULT if is_small else []):
        case = f"{algorithm} {wire_dtype or 'default'}"
        with torch.no_grad():
            outcome, container, wire = real_layouts.give_steps(
                trainer.model_parts, algorithm, wire_dtype
            )
        given[case] = compare_given(outcome, reference["given", algorithm])
        given[case]["replicas"] = count_differing(trainer, container.optimizers[0])
        given[case]["traffic"] = traffic_of(container.optimizers[0], wire)
        # The next case's whole tensors beside these would not fit where every rank holds all.
        del outcome, container
    for algorithm, wire_dtype in EXACT + (DEFAULT[:1] if is_small else []):
        case = f"{algorithm} {wire_dtype or 'default'}"
        outcome = real_layouts.train_steps(trainer, start, algorithm, wire_dtype)
        trained[case] = compare_trained(outcome, reference["trained", algorithm])
        trained[case]["replicas"] = count_differing(trainer, trainer.optimizers.optimizers[0])
        del outcome
    return {"given": given, "trained": trained}


def measure_broken(trainer: Any, reference: dict[Any, Any]) -> dict[str, Any]:
    """Return this rank's figures with an optimizer that loses part of what rank 1 holds."""
    start = real_layouts.snapshot(trainer.model_parts)
    given, trained = {}, {}
    for fault in FAULTS:
        outcome = real_layouts.train_steps(trainer, start, "Muon", "float32", fault)
        trained[fault] = compare_trained(outcome, reference["trained", "Muon"])
        with torch.no_grad():
            outcome, _, _ = real_layouts.give_steps(trainer.model_parts, "Muon", "float32", fault)
        given[fault] = compare_given(outcome, reference["given", "Muon"])
    return {"given": given, "trained": trained}


def compare_given(outcome: Outcome, expected: Outcome) -> dict[str, Any]:
    return {
        "moved": real_layouts.deviation(outcome.moved, expected.moved),
        "state": real_layouts.deviation(outcome.state, expected.state),
    }


def compare_trained(outcome: Outcome, expected: Outcome) -> dict[str, Any]:
    return {
        "moved": real_layouts.deviation(outcome.moved, expected.moved),
        "losses": outcome.losses,
        "expected losses": expected.losses,
    }


def count_differing(trainer: Any, optimizer: Any) -> int:
    tensors = real_layouts.parameters_of(trainer.model_parts)
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            tensors |= {f"{name}/{key}": value for key, value in optimizer.state[param].items()}
    return real_layouts.differing_replicas(tensors)


def traffic_of(optimizer: Any, wire: real_layouts.Wire) -> dict[str, Any]:
    """Return bytes, collectives and matrices: planned, noted by the optimizer, and really sent."""
    steps = real_layouts.GIVEN_STEPS
    noted, planned = [0, 0, 0], [0, 0, 0]
    for work in optimizer._works:
        traffic = work.exchange.traffic
        for i, number in enumerate((traffic.bytes_sent, traffic.collectives, traffic.matrices)):
            noted[i] += number
        for i, number in enumerate(real_layouts.predicted(work.plan, dist.get_rank())):
            planned[i] += steps * number
    return {"planned": planned, "noted": noted, "sent": [wire.bytes_sent, wire.collectives]}


def together(ranks: list[dict[str, Any]], reference: dict[Any, Any]) -> dict[str, Any]:
    """Join the figures of all ranks: the worst of each parameter, the traffic of each rank."""
    joined: dict[str, Any] = {"mesh": ranks[0]["mesh"]}
    joined |= {key: reference[key] for key in ("matrices", "elements")}
    joined["parameters"] = list(reference["given", "Muon"].moved)
    joined["seconds"] = sum(rank["seconds"] for rank in ranks)
    for kind in ("given", "trained"):
        joined[kind] = {}
        for case, figures in ranks[0][kind].items():
            of_ranks = [rank[kind][case] for rank in ranks]
            joined[kind][case] = dict(figures)
            for key in {"moved", "state"} & set(figures):
                worst: dict[str, float] = {}
                for one in of_ranks:
                    for name, value in one[key].items():
                        worst[name] = max(value, worst.get(name, 0.0))
                joined[kind][case][key] = worst
            if "replicas" in figures:
                joined[kind][case]["replicas"] = sum(one["replicas"] for one in of_ranks)
            if "traffic" in figures:
                joined[kind][case]["traffic"] = [one["traffic"] for one in of_ranks]
    return joined


def print_table(results: Path) -> None:
    """Print the largest deviations and the costs of a step on each rank."""
    steps = real_layouts.GIVEN_STEPS
    print("mesh | algorithm, wire | given | trained | bytes per rank, plan = sent | matrices")
    for line in results.read_text().splitlines():
        figures = json.loads(line)
        for case, given in figures["given"].items():
            worst = max([*given["moved"].values(), *given["state"].values()])
            cells = [figures["mesh"], case, f"{worst:.1e}"]
            trained = figures["trained"].get(case)
            cells.append(f"{max(trained['moved'].values()):.1e}" if trained else "-")
            ranks = given.get("traffic", [])
            cells.append(
                ", ".join(f"{r['planned'][0] // steps}={r['sent'][0] // steps}" for r in ranks)
            )
            cells.append(", ".join(str(r["noted"][2] // steps) for r in ranks))
            print(" | ".join(cells))


def main() -> None:
    logging.disable(logging.WARNING)
    folder, meshes = Path(sys.argv[1]), sys.argv[2:]
    models = list(dict.fromkeys(parallelism_of(mesh)[0] for mesh in meshes))
    limit = START_SECONDS + MESH_SECONDS * len(meshes)
    run_ranks(1, write_references, models, folder, limit=limit)
    run_ranks(WORLD_SIZE, run_meshes, meshes, folder, limit=limit)
    print_table(folder / "results.jsonl")


if __name__ == "__main__":
    main()
