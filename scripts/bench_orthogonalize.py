"""Time and accuracy of orthogonalization, one table per batch shape.

    python scripts/bench_orthogonalize.py [--quick] [--shapes 4x4096x14336 ...]

Every line of a table ran in this process on the same inputs: a plain torch loop in bfloat16, every
evaluation and dtype of titan-muon, and peers that can be imported. ``error`` compares with the
same polynomial in float64 on three spectra; ``host`` is the time to enqueue one call. On a CPU
small shapes run, in float32 and float64.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from bench_step import heading
from torch import Tensor

from titan_muon.kernels import select_operations
from titan_muon.orthogonalization import (
    Schedule,
    cost,
    explain,
    orthogonalize_batch,
    resolve_schedule,
)

GPU_SHAPES = (
    (4, 4096, 14336),
    (12, 4096, 14336),
    (4, 4096, 6144),
    (4, 4096, 4096),
    (16, 2048, 8192),
    (48, 1024, 1024),
    (16, 1408, 2048),
)
CPU_SHAPES = ((2, 256, 1024), (4, 256, 256), (2, 384, 128))
SPECTRA = ("gaussian", "condition 1e6", "power law")
Function = Callable[[Tensor], Tensor]


@dataclass
class Line:
    """One competitor; ``schedule`` and ``evaluation`` where its arithmetic can be counted."""

    name: str
    run: Function
    schedule: Schedule | None = None
    evaluation: str = ""
    dtype: torch.dtype | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats")
    parser.add_argument("--shapes", nargs="+", metavar="BxMxN", help="batch shapes to run")
    parser.add_argument("--method", default="polar_express", help="schedule of titan-muon")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    if options.shapes:
        shapes = tuple(tuple(int(n) for n in shape.split("x")) for shape in options.shapes)
    elif options.quick:
        shapes = shapes[::3]
    schedule = resolve_schedule(options.method)
    print(heading(device))
    for shape in shapes:
        print_table(shape, device, schedule, repeats=5 if options.quick else 12)


def print_table(
    shape: tuple[int, ...], device: torch.device, schedule: Schedule, repeats: int
) -> None:
    """Print ms, TFLOP/s of the cost model, host ms and errors of every competitor."""
    batch, rows, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator)
    probes = [spectrum(kind, rows, columns, device, generator) for kind in SPECTRA]
    truths = [exact(probe, schedule) for probe in probes]
    lines = competitors(device, schedule)
    print(f"\n{batch} x ({rows}, {columns}), float32 input")
    width = max(len(line.name) for line in lines)
    print(f"{'':{width}}      ms  ratio TFLOP/s host ms   error: {' / '.join(SPECTRA)}")
    base = None
    for line in lines:
        try:
            errors = [relative(line.run(p), t) for p, t in zip(probes, truths, strict=True)]
            device_ms, host_ms = milliseconds(lambda run=line.run: run(x), device, repeats)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{line.name:{width}}  skipped: {str(error).splitlines()[0][:80]}")
            continue
        base = base or device_ms
        flop = ""
        if line.schedule is not None:
            half = (
                line.dtype is not None
                and select_operations(min(rows, columns), line.dtype, device).half_cost
            )
            flop = batch * cost(rows, columns, schedule, line.evaluation, half) / device_ms / 1e9
            flop = f"{flop:.3g}"
        shown = " / ".join(f"{error:.1e}" for error in errors)
        print(
            f"{line.name:{width}} {device_ms:7.2f} {device_ms / base:6.2f} {flop:>7} "
            f"{host_ms:7.2f}   {shown}"
        )
    default = torch.float16 if device.type == "cuda" else torch.float32
    print("auto:", explain(shape, default, device, schedule))


def competitors(device: torch.device, schedule: Schedule) -> list[Line]:
    fast = (torch.float16,) if device.type == "cuda" else (torch.float32, torch.float64)
    lines = [Line("torch dense bfloat16", lambda x: dense(x, schedule), schedule, "standard")]
    for dtype in (*fast, torch.bfloat16):
        for evaluation in ("standard", "gram"):
            if (dtype, evaluation) == (torch.bfloat16, "gram"):
                continue
            name = f"titan-muon {evaluation} {str(dtype).removeprefix('torch.')}"
            lines.append(Line(name, ours(schedule, dtype, evaluation), schedule, evaluation, dtype))
    if find_spec("gram_newton_schulz") is not None and device.type == "cuda":
        lines += peers()
    return lines


def ours(schedule: Schedule, dtype: torch.dtype, evaluation: str) -> Function:
    return lambda x: orthogonalize_batch(x, schedule, dtype=dtype, evaluation=evaluation)


def peers() -> list[Line]:
    from gram_newton_schulz import GramNewtonSchulz, StandardNewtonSchulz

    return [
        Line("gram-newton-schulz gram", GramNewtonSchulz()),
        Line("gram-newton-schulz standard", StandardNewtonSchulz()),
    ]


def dense(x: Tensor, schedule: Schedule) -> Tensor:
    """Run the textbook loop in bfloat16, every product whole."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) * schedule.safety)).bfloat16()
    for a, b, c in schedule.triples:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def spectrum(
    kind: str, rows: int, columns: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return one (1, rows, columns) matrix with the singular values that ``kind`` names."""
    if kind == "gaussian":
        return torch.randn(1, rows, columns, device=device, generator=generator)
    rank = min(rows, columns)
    index = torch.arange(rank, device=device, dtype=torch.float64)
    values = 10 ** (-6 * index / max(1, rank - 1)) if kind == "condition 1e6" else 1 / (1 + index)
    sides = [
        torch.linalg.qr(torch.randn(size, rank, device=device, generator=generator)).Q
        for size in (rows, columns)
    ]
    return ((sides[0] * values) @ sides[1].double().mT).float()[None]


def exact(x: Tensor, schedule: Schedule) -> Tensor:
    """Evaluate the schedule in float64."""
    x = x.double()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (schedule.safety * x.norm())
    for a, b, c in schedule.triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def relative(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


def milliseconds(
    run: Callable[[], object], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Return the median time of ``run`` on the device, and of enqueueing it on the host."""
    for _ in range(3 if device.type == "cuda" else 1):
        run()
    spans, hosts, events = [], [], []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            started = time.perf_counter()
            run()
            hosts.append(time.perf_counter() - started)
            end.record()
            events.append((begin, end))
        else:
            started = time.perf_counter()
            run()
            hosts.append(time.perf_counter() - started)
    if device.type == "cuda":
        torch.cuda.synchronize()
        spans = [begin.elapsed_time(end) for begin, end in events]
    else:
        spans = [1e3 * span for span in hosts]
    return statistics.median(spans), 1e3 * statistics.median(hosts)


if __name__ == "__main__":
    main()
