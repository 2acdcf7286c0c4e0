"""Bytes of optimizer state a weight, measured, for each algorithm and state dtype.

    python scripts/memory_table.py [--write]

Builds an optimizer on one 2048 x 2048 weight and adds up the storages of its state, all of which
exists from construction; on a GPU it also holds them against what was allocated. ``--write`` puts
the table into README.md. int8, int4 and float8 need torchao.
"""

import argparse

import torch
from option_table import README, between_markers
from torch import Tensor, nn

from titan_muon import Muon
from titan_muon.optim.algorithms import get_algorithm

ALGORITHMS = ("muon", "normuon", "adamuon", "aurora", "adamw")
STATE_DTYPES = ("float32", "bfloat16", "int8", "float8", "int4")
SIZE = 2048


def storages(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a state tensor consists of."""
    if type(tensor) is Tensor:
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in storages(getattr(tensor, name))]


def bytes_per_weight(algorithm: str, state_dtype: str, device: str = "cpu") -> float:
    """Return the bytes of state that one weight has."""
    weight = nn.Parameter(torch.randn(SIZE, SIZE, device=device))
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    optimizer = Muon([{"params": [weight], "algorithm": algorithm}], state_dtype=state_dtype)
    allocated = torch.cuda.memory_allocated() - before if device == "cuda" else 0
    parts = [part for value in optimizer.state[weight].values() for part in storages(value)]
    count = sum(part.untyped_storage().nbytes() for part in parts)
    if allocated > count + (1 << 16):
        raise AssertionError(f"{algorithm}, {state_dtype}: {allocated} bytes allocated for {count}")
    return count / weight.numel()


def table(device: str = "cpu") -> str:
    """Return the table as Markdown."""
    titles = [get_algorithm(name).title for name in ALGORITHMS]
    lines = [f"| `state_dtype` | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    for state_dtype in STATE_DTYPES:
        figures = [f"{bytes_per_weight(name, state_dtype, device):.3f}" for name in ALGORITHMS]
        lines.append(f"| `{state_dtype}` | {' | '.join(figures)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the README's text with today's table in it."""
    return between_markers(text, "memory", "memory_table", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
