"""Time of a whole ``optimizer.step()``, one table per workload, peers in the same process.

    python scripts/bench_step.py [--quick] [--no-peers] [--workloads llama8b_x4 ...] [--steps 12]

Parameters and gradients are float32, or bfloat16 by ``--weights``. ``device ms`` is the median
between two device events, the competitors taking turns; ``host ms`` is the time to enqueue one
step; ``memory`` is what a step adds at its peak to weights and gradients, state included. On a CPU
every shape is divided by 16.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from titan_muon import Muon

WORKLOADS: dict[str, list[tuple[int, ...]]] = {
    "llama8b_x4": 4 * [(6144, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)],
    "llama1b": 16 * [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)],
    "sq1024_x48": 48 * [(1024, 1024)],
    "moe16b_ep8_x2": 2 * [(8, 1408, 2048), (8, 1408, 2048), (8, 2048, 1408)],
}
Factory = Callable[[list[Tensor]], torch.optim.Optimizer]
Started = TypeVar("Started", bound="Run")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, two workloads")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each competitor")
    parser.add_argument(
        "--state-dtypes",
        nargs="+",
        choices=("bfloat16", "int8", "float8", "int4"),
        default=(),
        help="Muon and AdamW with these too",
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="leave out what is installed beside torch"
    )
    parser.add_argument(
        "--weights",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of weights and gradients; bfloat16 adds Muon and AdamW that round at random",
    )
    options = parser.parse_args(arguments)
    found = competitors(options.state_dtypes, peers=not options.no_peers)
    if options.weights == "bfloat16":
        found |= _rounded()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = options.workloads or (["llama8b_x4", "sq1024_x48"] if options.quick else WORKLOADS)
    print(heading(device))
    for name in names:
        shapes = sized(WORKLOADS[name], device)
        steps = 3 if options.quick else options.steps
        print(table(name, shapes, device, steps, found, getattr(torch, options.weights)))


def competitors(state_dtypes: Sequence[str] = (), *, peers: bool = True) -> dict[str, Factory]:
    """Return every optimizer that can be imported; titan-muon first, also with other state."""

    def with_state(state_dtype: str, algorithm: str) -> Factory:
        groups = {"algorithm": algorithm, "state_dtype": state_dtype}
        return lambda p: Muon([{"params": p, **groups}], lr=1e-3)

    found: dict[str, Factory] = {
        f"titan-muon {title}, {state_dtype}": with_state(state_dtype, title.lower())
        for state_dtype in state_dtypes
        for title in ("Muon", "AdamW")
    }
    found |= {
        "titan-muon Muon": lambda p: Muon(p, lr=1e-3),
        "titan-muon NorMuon": lambda p: Muon([{"params": p, "algorithm": "normuon"}], lr=1e-3),
        "titan-muon AdamW": lambda p: Muon([{"params": p, "algorithm": "adamw"}], lr=1e-3),
        "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    }
    if hasattr(torch.optim, "Muon"):
        found["torch Muon (2-D only)"] = lambda p: torch.optim.Muon(p, lr=1e-3)
    return found | _peers() if peers else found


def _rounded() -> dict[str, Factory]:
    def rounded(algorithm: str) -> Factory:
        groups = {"algorithm": algorithm, "stochastic_rounding": True}
        return lambda p: Muon([{"params": p, **groups}], lr=1e-3)

    return {f"titan-muon {t}, stochastic": rounded(t.lower()) for t in ("Muon", "AdamW")}


def _peers() -> dict[str, Factory]:
    found: dict[str, Factory] = {}
    if find_spec("muonium"):
        import muonium

        found["muonium Muon"] = lambda p: muonium.Muon(p, lr=1e-3)
        found["muonium NorMuon"] = lambda p: muonium.NorMuon(p, lr=1e-3)
    if find_spec("dtensor_muon"):
        import dtensor_muon

        found["dtensor_muon MuonForeach"] = lambda p: dtensor_muon.MuonForeach(p, lr=1e-3)
    if find_spec("dion"):
        import dion

        found["dion Muon"] = lambda p: dion.Muon([{"params": p}], lr=1e-3, use_triton=True)
        found["dion NorMuon"] = lambda p: dion.NorMuon([{"params": p}], lr=1e-3, use_triton=True)
    return found


def table(
    name: str,
    shapes: list[tuple[int, ...]],
    device: torch.device,
    steps: int,
    factories: Mapping[str, Factory],
    dtype: torch.dtype = torch.float32,
) -> str:
    """Run all competitors on one workload, in turns, and return the table."""
    runs, failures = started(factories, lambda f: Run(f, shapes, device, dtype))
    take_turns(runs.values(), steps)
    own = runs["titan-muon Muon"].device_ms()
    weights = sum(torch.Size(s).numel() for s in shapes)
    lines = [f"\n{name}: {len(shapes)} tensors, {weights / 1e6:.0f} M weights"]
    header = f"{'':28}{'device ms':>10}{'host ms':>9}{'first s':>9}{'memory MiB':>12}"
    lines.append(header + f"{'titan-muon / it':>17}")
    for label, run in sorted(runs.items(), key=lambda item: item[1].device_ms()):
        lines.append(
            f"{label:28}{run.device_ms():10.2f}{run.host_ms():9.2f}{run.first:9.1f}"
            f"{run.memory / 2**20:12.0f}{own / run.device_ms():17.2f}"
        )
    return "\n".join(lines + failures)


def sized(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[tuple[int, ...]]:
    """Return shapes as they are timed on a device."""
    if device.type != "cpu":
        return list(shapes)
    return [(*s[:-2], s[-2] // 16, s[-1] // 16) for s in shapes]


def started(
    factories: Mapping[str, Factory], make: Callable[[Factory], Started]
) -> tuple[dict[str, Started], list[str]]:
    """Return the competitors that run, and a line on each that does not."""
    runs, failures = {}, []
    for label, factory in factories.items():
        try:
            runs[label] = make(factory)
        except Exception as error:  # a peer may fail in any way; say so and go on
            first_line = str(error).splitlines()[0]
            failures.append(f"not run: {label}: {type(error).__name__}: {first_line}")
    return runs, failures


def take_turns(
    runs: "Iterable[Run]", steps: int, before: Callable[[], object] = lambda: None
) -> None:
    """Let everyone take steps in turns, each after a call of ``before``."""
    turns, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(steps):
        # A GPU runs slower after a hot neighbour, so no two keep their places.
        shuffle(turns)
        for run in turns:
            before()
            run.step()


class Run:
    """One optimizer on its own weights; the gradients stay the same."""

    def __init__(
        self,
        factory: Factory,
        shapes: list[tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.dtype = device, dtype
        self.params = [torch.nn.Parameter(self.weight(s, generator)) for s in shapes]
        for param, shape in zip(self.params, shapes, strict=True):
            param.grad = self.weight(shape, generator)
        before = self._allocated(reset=True)
        self.optimizer = factory(self.params)
        start = time.perf_counter()
        for _ in range(3):
            self.optimizer.step()
            self._wait()
            if not hasattr(self, "first"):
                self.first = time.perf_counter() - start
        self.memory = self._allocated() - before
        self._device: list[float] = []
        self._host: list[float] = []

    def weight(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        values = torch.randn(shape, generator=generator, device=self.device) * 0.02
        return values.to(self.dtype)

    def step(self) -> None:
        self._wait()
        begin = time.perf_counter()
        if self.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            self.optimizer.step()
            events[1].record()
            self._host.append(1e3 * (time.perf_counter() - begin))
            self._wait()
            self._device.append(events[0].elapsed_time(events[1]))
        else:
            self.optimizer.step()
            self._host.append(1e3 * (time.perf_counter() - begin))
            self._device.append(self._host[-1])

    def device_ms(self) -> float:
        return statistics.median(self._device)

    def host_ms(self) -> float:
        return statistics.median(self._host)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _allocated(self, *, reset: bool = False) -> int:
        if self.device.type != "cuda":
            return 0
        if reset:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()


def heading(device: torch.device) -> str:
    """Return hardware, versions, and the matmul peak of this run."""
    found = [f"torch {torch.__version__}", f"python {sys.version.split()[0]}"]
    for package in ("triton", "gram-newton-schulz", "muonium", "dtensor-muon", "dion"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    if device.type != "cuda":
        return f"cpu, {torch.get_num_threads()} threads; " + ", ".join(found)
    return f"{torch.cuda.get_device_name()}, matmul peak {matmul_peak():.0f} TFLOP/s; " + ", ".join(
        found
    )


def matmul_peak() -> float:
    """Return TFLOP/s of an 8192-cube bfloat16 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * 8192**3 / statistics.median(times) / 1e9


if __name__ == "__main__":
    main()
