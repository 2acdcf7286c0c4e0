"""Train a Llama-like model in plain PyTorch with FSDP2; speed, share of the optimizer, loss.

    torchrun --nproc_per_node=2 scripts/bench_training.py --optimizers AdamW Muon NorMuon

Each optimizer starts from the same weights and sees the same tokens. ``--checkpoint DIR`` saves
model and optimizer after half of the steps (DCP); ``--resume DIR`` starts there, on any number of
ranks, and the losses of the remaining steps can be compared. bfloat16 compute, float32 weights and
optimizer. The text is Python's standard library. Without GPUs it runs a small model on gloo.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from titan_muon import Muon, param_groups
from titan_muon.cli.transformer import Size, Transformer
from titan_muon.integration.data import prepare
from titan_muon.optim.stopwatch import Stopwatch

SIZES = {"tiny": Size(2, 128, 4, 384), "1b": Size(16, 2048, 16, 8192)}
# The matrices' lr and that of the rest; None: AdamW everywhere.
LRS = {"AdamW": (1e-3, None), "Muon": (2e-3, 1e-3), "NorMuon": (2e-3, 1e-3)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=sorted(LRS), default=sorted(LRS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", choices=sorted(SIZES))
    parser.add_argument("--sequences", type=int, default=8, help="in a batch, over all ranks")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--checkpoint", type=Path, help="save here after half of the steps")
    parser.add_argument("--resume", type=Path, help="start from a checkpoint of --checkpoint")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    options.size = options.size or ("1b" if gpu else "tiny")
    dist.init_process_group("nccl" if gpu else "gloo")
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()
    for name in options.optimizers:
        run(name, options, torch.device(device))
    dist.destroy_process_group()


def run(name: str, options: argparse.Namespace, device: torch.device) -> None:
    """Train with one optimizer and print what was seen, on rank 0."""
    tokens, vocabulary = corpus()
    model = build(SIZES[options.size], vocabulary, device, compiled=options.compile)
    lr, rest = LRS[name]
    groups = param_groups(model, name.lower())
    for group in groups:
        if group["algorithm"] == "adamw":
            group["lr"] = rest or lr
    optimizer = Muon(groups, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    folder = {k: path / name for k in ("checkpoint", "resume") if (path := getattr(options, k))}
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    if "resume" in folder:
        load(model, optimizer, schedule, folder["resume"])
    first = schedule.last_epoch
    clocks, losses = [], []
    for step in range(first, options.steps):
        inputs, targets = batch(tokens, step, options, device)
        clocks.append(clock := Stopwatch(device))
        with clock.part("model"):
            loss = cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(mean(loss.detach()))
        if "checkpoint" in folder and step + 1 == options.steps // 2:
            save(model, optimizer, schedule, folder["checkpoint"])
    report(name, losses, first, milliseconds(clocks), options)


def build(size: Size, vocabulary: int, device: torch.device, *, compiled: bool) -> nn.Module:
    """Return the model, the same weights on every number of ranks, sharded by FSDP2."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(size, vocabulary)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def corpus() -> tuple[Tensor, int]:
    """Return the tokens of the training text and the size of the vocabulary."""
    from tokenizers import Tokenizer

    paths = prepare()
    tokenizer = Tokenizer.from_file(str(paths.tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in paths.train.open(encoding="utf-8")]
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in encoding.ids]
    return torch.tensor(ids), tokenizer.get_vocab_size()


def batch(
    tokens: Tensor, step: int, options: argparse.Namespace, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the batch of a step: inputs and targets."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - options.length, (options.sequences,), generator=generator)
    rows = [tokens[s : s + options.length + 1] for s in starts.chunk(ranks)[rank].tolist()]
    whole = torch.stack(rows).to(device)
    return whole[:, :-1], whole[:, 1:]


def mean(loss: Tensor) -> float:
    """Return the loss over all ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def save(model: nn.Module, optimizer: Muon, schedule: LambdaLR, folder: Path) -> None:
    """Write everything that a run needs to go on."""
    dcp.save(state_of(model, optimizer, schedule), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Muon, schedule: LambdaLR, folder: Path) -> None:
    """Read what ``save`` wrote, on any number of ranks."""
    read = state_of(model, optimizer, schedule)
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    schedule.load_state_dict(read["schedule"])


def state_of(model: nn.Module, optimizer: Muon, schedule: LambdaLR) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}


def milliseconds(clocks: Sequence[Stopwatch]) -> tuple[float, float]:
    """Return the medians of a whole step and of its optimizer; the first third warms up."""
    parts = [clock.seconds() for clock in clocks[len(clocks) // 3 :]]
    whole = statistics.median(part["model"] + part["optimizer"] for part in parts)
    return 1e3 * whole, 1e3 * statistics.median(part["optimizer"] for part in parts)


def report(
    name: str,
    losses: list[float],
    first: int,
    times: tuple[float, float],
    options: argparse.Namespace,
) -> None:
    """Print one optimizer's figures on rank 0."""
    step, part = times
    peak = 0.0
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    if dist.get_rank():
        return
    tokens = options.sequences * options.length
    shown = {first + i + 1: round(losses[i], 4) for i in indices(len(losses))}
    print(
        f"{name:8} {dist.get_world_size()} ranks, {tokens * 1e3 / step:10,.0f} tokens/s, step "
        f"{step:.1f} ms, optimizer {part:.1f} ms ({100 * part / step:.1f} %), peak {peak:.1f} GiB, "
        f"loss {shown}",
        flush=True,
    )


def indices(count: int) -> Iterator[int]:
    """Yield some steps to print, the last one among them."""
    step = max(1, count // 5)
    yield from range(0, count - 1, step)
    yield count - 1


if __name__ == "__main__":
    sys.exit(main())
