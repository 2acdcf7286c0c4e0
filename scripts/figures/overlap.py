"""Draw one step from a profiler trace: arithmetic and exchange of a GPU on two lines.

torchrun --nproc_per_node=2 scripts/bench_distributed.py --trace trace.json
python scripts/figures/overlap.py trace.json scripts/figures/overlap.png
"""

import gzip
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

# What a kernel's name holds, the line it is drawn on, its label and color.
KINDS = [
    ("SendRecv", 0, "exchange", "tab:red"),
    ("_hopper_kernel", 1, "symmetric products", "tab:blue"),
    ("nvjet", 1, "other products", "tab:cyan"),
    ("", 1, "momentum, packing, writing", "tab:gray"),
]


def main(trace: str, output: str) -> None:
    opened = gzip.open(trace, "rt") if trace.endswith(".gz") else Path(trace).open()
    with opened as file:
        events = json.load(file)["traceEvents"]
    kernels = [
        (e["ts"], e["dur"], _kind(e["name"]))
        for e in events
        if e.get("cat") == "kernel" and "AllReduce" not in e["name"]
    ]
    # The profiler's own start holds up whatever comes before.
    start = min(e["ts"] for e in events if e["name"] == "_advance_kernel")
    kernels = [kernel for kernel in kernels if kernel[0] >= start]
    figure, axes = plt.subplots(figsize=(10, 2.2))
    for ts, duration, kind in kernels:
        _, line, _, color = KINDS[kind]
        axes.broken_barh([((ts - start) / 1e3, duration / 1e3)], (line - 0.4, 0.8), color=color)
    axes.set_yticks([0, 1], ["NCCL stream", "compute stream"])
    axes.set_xlabel("ms since the first kernel of the step")
    axes.legend(
        handles=[Patch(color=color, label=label) for _, _, label, color in KINDS],
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.3),
        frameon=False,
    )
    figure.savefig(output, dpi=120, bbox_inches="tight")


def _kind(name: str) -> int:
    return next(i for i, (part, *_) in enumerate(KINDS) if part in name)


if __name__ == "__main__":
    main(*sys.argv[1:])
