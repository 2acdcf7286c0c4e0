"""Time of ``optimizer.step()`` on one rank of many, without the others: Llama 3 8B under FSDP2.

    python scripts/bench_rank.py [--ranks 8 64 256] [--rank 0] [--layers 32] [--steps 20]

torch's fake process group stands in for the network: collectives return at once, and what they
bring, if anything, is dropped. Random numbers lie where parcels would arrive, since the speed of a
GPU depends on them. What is left is the arithmetic of one rank (``device ms``, which also waits for
the host) and what enqueueing it takes the host (``host ms``): on many ranks that is what a step
waits for. Weights are float32 and cut along dim 0, the competitors take turns, times are medians.
On a CPU every shape is divided by 16.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from bench_distributed import Layout, ShardedRun, dist_muon
from bench_step import competitors, heading, sized, started, take_turns
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_muon.distributed.tensors import local_of
from titan_muon.distributed.wire import Back, There, rows, write_headers

# Projections of one layer: q, k, v, o, gate, down, up.
LAYER = [
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (4096, 14336), (14336, 4096)),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--rank", type=int, default=0, help="which of them to be")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each competitor")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(heading(device))
    dist.all_to_all_single = dropping(dist.all_to_all_single)
    shapes = sized(options.layers * LAYER, device)
    for ranks in options.ranks:
        print(table(shapes, ranks, options.rank, device, options.steps))


def table(
    shapes: list[tuple[int, ...]], ranks: int, rank: int, device: torch.device, steps: int
) -> str:
    """Be one of some ranks, run all competitors there in turns, and return the table."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    layout = Layout("fsdp", init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",)))
    factories = {**competitors(), "torchtitan DistMuon": dist_muon}
    runs, failures = started(factories, lambda f: ShardedRun(f, shapes, layout, device))
    for run in runs.values():
        fill(run)
    take_turns(runs.values(), steps)
    dist.destroy_process_group()
    plan = runs["titan-muon Muon"].optimizer._works[0].plan
    lines = [
        f"\n{len(shapes)} matrices, rank {rank} of {ranks}: {plan.stages} stages, balance "
        f"{plan.balance:.3f}",
        f"{'':26}{'device ms':>10}{'host ms':>9}",
    ]
    for label, run in sorted(runs.items(), key=lambda item: item[1].device_ms()):
        lines.append(f"{label:26}{run.device_ms():10.2f}{run.host_ms():9.2f}")
    return "\n".join(lines + failures)


def dropping(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective with its output elsewhere."""

    def run(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return collective(torch.empty_like(output), *arguments, **options)

    return run


@torch.no_grad()
def fill(run: ShardedRun) -> None:
    """Put random numbers, with headers that fit them, where parcels would arrive."""
    for param in run.params:
        # What the first steps wrote came from nowhere.
        local_of(param).normal_(std=0.02)
    for work in getattr(run.optimizer, "_works", None) or ():
        elements = max(unit.rows * unit.columns for unit in work.plan.units)
        for name, buffer in work.exchange._buffers.items():
            if not name.startswith("receive"):
                continue
            buffer[: buffer.numel() // 2 * 2].view(torch.float16).normal_()
            for index in work._indices:
                one = torch.ones(1, device=buffer.device)
                if name.endswith("there"):
                    header = There(one, one, one, largest=5 * one, squares=elements * one)
                    write_headers(buffer, index.received, rows(header))
                else:
                    write_headers(buffer, index.landed, rows(Back(one, one, one)))


if __name__ == "__main__":
    main()
