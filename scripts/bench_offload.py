"""Time and GPU memory of a step with FSDP2's CPU offload, beside the same step on the GPU.

    python scripts/bench_offload.py [--workload llama8b_x4] [--steps 7]

One process, a mesh of one GPU. Weights, gradients and momentum are float32 and lie in pinned host
memory, as CPUOffloadPolicy leaves them.
"""

import argparse
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from bench_step import WORKLOADS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titan_muon import Muon
from titan_muon.optim.stopwatch import Stopwatch


class Weights(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(s, device="cuda").to(device)) for s in shapes]
        )


def build(shapes: Sequence[tuple[int, ...]], mesh, offload: bool) -> list[nn.Parameter]:
    model = Weights(shapes, "cpu" if offload else "cuda")
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    params = list(model.parameters())
    for param in params:
        assert isinstance(param, DTensor)
        grad = torch.randn(param.shape, device="cuda")
        grad = DTensor.from_local(grad, param.device_mesh, param.placements, run_check=False)
        if offload:
            grad = grad.cpu()
            with torch.no_grad():
                local = grad.to_local()
                local.set_(local.pin_memory())
        param.grad = grad
    return params


def measure(params: list[nn.Parameter], steps: int) -> tuple[float, float]:
    """Return milliseconds a step and the GiB that it adds on the GPU."""
    optimizer = Muon(params, lr=1e-3)
    times = []
    for step in range(steps + 2):
        if step == 2:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        clock = Stopwatch(torch.device("cuda"))
        with clock.part("step"):
            optimizer.step()
        times.append(1e3 * clock.seconds()["step"])
    return median(times[2:]), (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="llama8b_x4")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_offload.py measures copies between a host and a GPU; this machine has no GPU.")
        return
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    shapes = WORKLOADS[options.workload]
    weights = sum(torch.Size(s).numel() for s in shapes)
    print(f"{options.workload}: {weights / 1e6:.0f} M weights, {torch.cuda.get_device_name()}")
    for label, offload in (("on the GPU", False), ("offloaded", True)):
        params = build(shapes, mesh, offload)
        ms, memory = measure(params, options.steps)
        # Gradient and momentum twice, weight once; momentum and weight back.
        moved = f"{weights * 28 / ms / 1e6:6.1f} GB/s over the bus" if offload else ""
        print(f"{label:12}{ms:10.1f} ms{memory:8.2f} GiB more on the GPU  {moved}")
        del params
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
