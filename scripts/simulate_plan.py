"""Plan real models for meshes that nobody has at hand: balance, bytes, modelled time, plan time.

Usage: python scripts/simulate_plan.py [--only NAME] [--output FILE.png] [--flops F] [--bandwidth B]

Layouts are those of torchtitan's own models on the meta device, in one process. The time of a step
is modelled: the slowest rank's FLOPs at --flops (default: what (4, 4096, 14336) reached on one H200
with untuned Triton kernels), its bytes at --bandwidth (default: one 400 Gbit/s port a GPU), all but
the first and the last of the exchanges under the arithmetic of another stage.
"""

import argparse
import importlib
import logging
import multiprocessing
import time
import tracemalloc
from dataclasses import asdict, dataclass, fields
from typing import Any

# Before anything of torchtitan: on a machine without GPU it must find a device that is there.
from titan_muon.integration import cpu_runtime

if cpu_runtime.needs_cpu_runtime():
    cpu_runtime.install()

from titan_muon.cli.gpu_plans import plan_model  # noqa: E402
from titan_muon.cli.rates import Rates, set_seconds  # noqa: E402
from titan_muon.distributed.costs import owner_bound, plan_costs  # noqa: E402
from titan_muon.distributed.geometry import geometry, segments  # noqa: E402
from titan_muon.distributed.layout import local_region  # noqa: E402
from titan_muon.distributed.plan import Plan  # noqa: E402
from titan_muon.distributed.tables import rank_tables  # noqa: E402
from titan_muon.integration.meta_model import fake_ranks, meta_model  # noqa: E402
from titan_muon.integration.text_table import table  # noqa: E402

LLAMA = "torchtitan.models.llama3.config_registry"
DEEPSEEK = "torchtitan.models.deepseek_v3.config_registry"
# Two configs cannot be loaded everywhere: that of 405B asks for float8, which needs a GPU, Kimi's
# for torchvision. Their models can, in the config of another model: package and flavor after it.
LLAMA_405B = "llama3_70b:torchtitan.models.llama3:405B"
KIMI = "deepseek_v3_671b:torchtitan.models.kimi_k2_7:Kimi-K2.5"

# name, module, config, ranks, tensor parallel, expert parallel
RUNS = [
    *(("llama3 8B", LLAMA, "llama3_8b", n, 1, 1) for n in (8, 64, 256)),
    *(("llama3 70B", LLAMA, "llama3_70b", n, 8, 1) for n in (64, 256, 1024)),
    *(("llama3 405B", LLAMA, LLAMA_405B, n, 8, 1) for n in (128, 512, 4096)),
    *(("deepseek 671B", DEEPSEEK, "deepseek_v3_671b", n, 1, 64) for n in (256, 1024, 2048)),
    *(("kimi k2 1T", DEEPSEEK, KIMI, n, 1, 64) for n in (384, 1024, 4096)),
]


@dataclass
class Result:
    model: str
    ranks: int
    tp: int
    ep: int
    matrices: int
    stages: int
    balance: float
    best_balance: float
    sent_mib: float
    shard_mib: float
    compute_ms: float
    step_ms: float
    plan_s: float
    plan_mib: float


def build(module: str, name: str, ranks: int, tp: int, ep: int) -> Any:
    config_name, *other = name.split(":")
    config = getattr(importlib.import_module(module), config_name)()
    if other:
        package, flavor = other
        config.model_spec = importlib.import_module(package).model_registry(flavor)
    parallelism = config.parallelism
    parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree = tp, ep
    parallelism.pipeline_parallel_degree = 1
    parallelism.data_parallel_replicate_degree = 1
    parallelism.data_parallel_shard_degree = -1
    config.compile.enable = False
    return meta_model(config, ranks)


def plan_one_rank(model: Any) -> list[Plan]:
    """Do what one rank does once: plan, digest, and the tables of the busiest rank."""
    plans = plan_model(model)
    for plan in plans:
        plan.fingerprint()
        rank_tables(plan, max(zip(plan.loads, plan.ranks, strict=True))[1])
    return plans


def measure(run: tuple[Any, ...], flops: float, bandwidth: float) -> Result:
    label, module, name, ranks, tp, ep = run
    with fake_ranks(ranks):
        model = build(module, name, ranks, tp, ep)
        start = time.process_time()
        plans = plan_one_rank(model)
        seconds = time.process_time() - start
        for cached in (geometry, segments, local_region):
            cached.cache_clear()
        tracemalloc.start()
        plan_one_rank(model)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    (plan,) = plans
    return result(plan, (label, ranks, tp, ep), (flops, bandwidth), (seconds, memory))


def result(
    plan: Plan, run: tuple[str, int, int, int], rates: tuple[float, float], spent: tuple[float, int]
) -> Result:
    costs, (flops, bandwidth) = plan_costs(plan), rates
    model = Rates(tflops=flops / 1e12, link_gbs=bandwidth / 1e9)
    compute, _, step = set_seconds(costs.loads, costs.bytes_sent, costs.edge_bytes, model)
    return Result(
        *run,
        matrices=len(plan.units),
        stages=plan.stages,
        balance=plan.balance,
        best_balance=sum(plan.loads) / len(plan.loads) / owner_bound(plan),
        sent_mib=costs.bytes_sent.max().item() / 2**20,
        shard_mib=costs.shard_bytes.max().item() / 2**20,
        compute_ms=1e3 * compute,
        step_ms=1e3 * step,
        plan_s=spent[0],
        plan_mib=spent[1] / 2**20,
    )


def print_table(results: list[Result]) -> None:
    rows = [[_text(value) for value in asdict(result).values()] for result in results]
    print(table([field.name for field in fields(Result)], rows, left=("model",)))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(results: list[Result], path: str) -> None:
    """Draw the four figures over the number of ranks, one line a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True)
    shown = [
        ("step_ms", "modelled time of a step, ms", True),
        ("sent_mib", "most bytes sent by a rank, MiB", True),
        ("balance", "balance (dashed: the most that whole matrices allow)", False),
        ("plan_s", "CPU time of plan and tables, s", True),
    ]
    for axis, (key, title, logarithmic) in zip(axes.flat, shown, strict=True):
        for label in dict.fromkeys(r.model for r in results):
            own = [r for r in results if r.model == label]
            ranks = [r.ranks for r in own]
            (line,) = axis.plot(ranks, [getattr(r, key) for r in own], marker="o", label=label)
            if key == "balance":
                best = [r.best_balance for r in own]
                axis.plot(ranks, best, "--", color=line.get_color(), linewidth=1)
        axis.set(title=title, xscale="log", yscale="log" if logarithmic else "linear")
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--output", help="write a plot")
    parser.add_argument("--flops", type=float, default=553e12, help="FLOP/s of one GPU")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes/s out of one GPU")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    results = []
    for run in RUNS:
        if options.only in run[0]:
            # Each in a process of its own: torch keeps meshes and their groups of the last world.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                results.append(pool.apply(measure, (run, options.flops, options.bandwidth)))
            print(*(_text(v) for v in asdict(results[-1]).values()), flush=True)
    if not results:
        parser.error(f"--only {options.only!r} names none of {sorted({r[0] for r in RUNS})}")
    print_table(results)
    if options.output:
        plot(results, options.output)


if __name__ == "__main__":
    main()
