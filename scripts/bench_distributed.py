"""Time of a whole ``optimizer.step()`` on sharded weights, peers in the same run.

    torchrun --nproc_per_node=2 scripts/bench_distributed.py [--workloads ...] [--layout tp]

Weights are float32 DTensors over all ranks: ``fsdp`` cuts dim 0, as FSDP2 does; ``tp`` rows and
columns in turn, as tensor parallelism does; ``efsdp`` dim 1, as FSDP2 does with few experts. Times
are the slowest rank's, medians, the competitors taking turns; ``one rank`` is the same workload
without sharding, run by rank 0 alone. Last, both take the same steps, and their weights are
compared. Without GPUs it runs on gloo with small shapes.
"""

import argparse
import os
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from bench_step import WORKLOADS, Run, competitors, heading, sized, started, take_turns
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_muon import Muon
from titan_muon.distributed.tensors import local_of

LAYOUTS = ("fsdp", "tp", "efsdp")
_PROFILED_STEPS = 7
# About 40 ms of an H200, twice what the host takes to enqueue a step.
_PRODUCTS_BEFORE = 30


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["llama8b_x4"])
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--trace", help="write a profiler trace of a Muon step on rank 0, the last one, here"
    )
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; {heading(device)}")
    for name in options.workloads:
        shapes = sized(WORKLOADS[name], device)
        layout = Layout(options.layout, mesh)
        report(name, shapes, layout, device, options.steps)
        agreement(name, shapes, layout, device)
        if gpu:
            overlap(name, shapes, layout, device, options.trace)
    dist.destroy_process_group()


class Layout:
    """Which dim of each weight is cut, weights counted in the order in which they are made."""

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.name, self.mesh = name, mesh

    def dim(self, index: int) -> int:
        return {"fsdp": 0, "tp": index % 2, "efsdp": 1}[self.name]

    def cut(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of this rank's part of a weight."""
        parts = whole.chunk(self.mesh.size(), self.dim(index))
        part = parts[self.mesh.get_local_rank()]
        return part.clone(memory_format=torch.contiguous_format)

    def placed(self, local: torch.Tensor, shape: tuple[int, ...], index: int) -> DTensor:
        """Return the weight of which this is the local part."""
        like, placements = torch.empty(shape, device="meta"), [Shard(self.dim(index))]
        size = {"shape": like.shape, "stride": like.stride()}
        return DTensor.from_local(local, self.mesh, placements, run_check=False, **size)


class ShardedRun(Run):
    """One optimizer on weights that every rank holds a part of."""

    def __init__(self, factory, shapes, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.made, self.count = 0, len(shapes)
        super().__init__(factory, shapes, device)

    def weight(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        # All weights are made first, then all gradients.
        index = self.made % self.count
        self.made += 1
        local = list(self.layout.cut(torch.empty(shape, device="meta"), index).shape)
        local = torch.randn(local, generator=generator, device=self.device)
        return self.layout.placed(local, shape, index)


def dist_muon(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Build torchtitan's DistMuon: whole matrices on owners, ten to a bucket."""
    from torchtitan.distributed.flex_shard import (
        BucketConfig,
        ComputeLayout,
        Owned,
        build_dist_muon,
    )

    names = [f"p{index:04d}" for index in range(len(params))]
    buckets = [BucketConfig(tuple(names[i : i + 10])) for i in range(0, len(names), 10)]
    owned = ComputeLayout({"ranks": Owned()})
    return build_dist_muon(
        [{"params": params, "param_names": names}],
        compute_sharding_by_fqn=dict.fromkeys(names, owned),
        bucket_configs=buckets,
        lr=1e-3,
    )


def report(name, shapes, layout: Layout, device: torch.device, steps: int) -> None:
    """Run all competitors on one workload and print the table on rank 0."""
    factories = competitors()
    factories["titan-muon Muon, float32 wire"] = lambda p: Muon(p, lr=1e-3, wire_dtype="float32")
    factories["torchtitan DistMuon"] = dist_muon
    mesh = layout.mesh
    runs, failures = started(factories, lambda f: ShardedRun(f, shapes, layout, device))
    take_turns(runs.values(), steps, before=dist.barrier)
    one = Run(factories["titan-muon Muon"], shapes, device)
    for _ in range(steps if dist.get_rank() == 0 else 0):
        one.step()
    times = torch.tensor([[r.device_ms(), r.host_ms(), r.memory] for r in runs.values()])
    times = times.to(device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    if dist.get_rank():
        return
    own = times[list(runs).index("titan-muon Muon"), 0].item()
    print(f"\n{name}: {len(shapes)} tensors, {layout.name} over {mesh.size()} ranks")
    print(f"{'':30}{'device ms':>10}{'host ms':>9}{'memory MiB':>12}{'titan-muon / it':>17}")
    for label, (ms, host, memory) in sorted(
        zip(runs, times.tolist(), strict=True), key=lambda x: x[1]
    ):
        print(f"{label:30}{ms:10.2f}{host:9.2f}{memory / 2**20:12.0f}{own / ms:17.2f}")
    print(f"{'titan-muon Muon, one rank':30}{one.device_ms():10.2f}{one.host_ms():9.2f}")
    for label, run in runs.items():
        works = getattr(run.optimizer, "_works", None)
        if works and label.startswith("titan"):
            traffic = works[0].exchange.traffic
            plan = works[0].plan
            print(
                f"{label}: balance {plan.balance:.3f}, {plan.stages} stages, per step "
                f"{traffic.bytes_sent / (steps + 3) / 2**20:.0f} MiB sent in "
                f"{traffic.collectives / (steps + 3):.0f} collectives, "
                f"{traffic.matrices / (steps + 3):.0f} matrices on rank 0"
            )
    print("\n".join(failures))


def agreement(name, shapes, layout: Layout, device: torch.device, steps: int = 3) -> None:
    """Print how far sharded and whole weights part in a few steps on the same gradients."""
    for wire_dtype in ("float16", "float32"):
        generator = torch.Generator(device).manual_seed(0)
        starts = [0.02 * torch.randn(s, generator=generator, device=device) for s in shapes]
        whole = [torch.nn.Parameter(w.clone()) for w in starts]
        cut = [
            torch.nn.Parameter(layout.placed(layout.cut(w, i), w.shape, i))
            for i, w in enumerate(starts)
        ]
        optimizers = Muon(whole, lr=1e-3), Muon(cut, lr=1e-3, wire_dtype=wire_dtype)
        for _ in range(steps):
            for i, (param, sharded) in enumerate(zip(whole, cut, strict=True)):
                grad = torch.randn(param.shape, generator=generator, device=device)
                param.grad = grad
                sharded.grad = layout.placed(layout.cut(grad, i), grad.shape, i)
            for optimizer in optimizers:
                optimizer.step()
        parted, moved = torch.zeros(2, device=device)
        for i, (param, sharded, start) in enumerate(zip(whole, cut, starts, strict=True)):
            part, first = layout.cut(param.detach(), i), layout.cut(start, i)
            parted += (local_of(sharded.detach()) - part).square().sum()
            moved += (part - first).square().sum()
        squares = torch.stack([parted, moved])
        dist.all_reduce(squares)
        if dist.get_rank() == 0:
            deviation = (squares[0] / squares[1]).sqrt().item()
            print(f"{name}: {wire_dtype} wire, {deviation:.1e} from one rank's {steps} steps")


def overlap(name, shapes, layout: Layout, device: torch.device, trace: str | None) -> None:
    """Print how much of the exchange's time on the GPU runs under other kernels, over some steps.

    As after a backward pass, the GPU is busy when the host begins with the step. A kernel of the
    exchange also waits until the other rank has begun with it.
    """
    run = ShardedRun(competitors()["titan-muon Muon"], shapes, layout, device)
    shares, lengths = [], []
    for _ in range(_PROFILED_STEPS):
        profile = _profiled(run, device)
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        # The barrier before the step is an all-reduce.
        exchange = [_span(e) for e in kernels if "nccl" in e.name.lower() and "SendRecv" in e.name]
        other = [_span(e) for e in kernels if "nccl" not in e.name.lower() and "step" not in e.name]
        lengths.append(sum(stop - start for start, stop in exchange) / 1e3)
        hidden = sum(_covered(span, other) for span in exchange) / 1e3
        shares.append(100 * hidden / max(lengths[-1], 1e-9))
    if dist.get_rank():
        return
    print(
        f"{name}: exchange {statistics.median(lengths):.2f} ms in {len(exchange)} kernels, "
        f"{statistics.median(shares):.0f} % of it under other kernels "
        f"({min(shares):.0f} to {max(shares):.0f} in {len(shares)} steps)"
    )
    if trace:
        profile.export_chrome_trace(trace)


def _profiled(run: ShardedRun, device: torch.device) -> torch.profiler.profile:
    x = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dist.barrier()
        for _ in range(_PRODUCTS_BEFORE):
            torch.mm(x, x, out=y)
        # Not through the run, which waits for the GPU before and after.
        run.optimizer.step()
        torch.cuda.synchronize()
    return profile


def _span(event) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _covered(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Return the length of the part of a span that lies under any of the others."""
    covered, position = 0.0, span[0]
    for start, stop in sorted(others):
        start, stop = max(start, position), min(stop, span[1])
        if start < stop:
            covered += stop - start
            position = stop
    return covered


if __name__ == "__main__":
    main()
