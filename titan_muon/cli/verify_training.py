"""A short training of a small byte-level transformer with each optimizer, on real text."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from titan_muon.cli.transformer import Size, Transformer
from titan_muon.integration.data import is_held_out, read_documents
from titan_muon.optim import Muon
from titan_muon.optim.param_groups import param_groups
from titan_muon.optim.stopwatch import Stopwatch

__all__ = ["Curve", "compare_optimizers", "load_text"]

# Optimizer -> lr of the matrices, lr of everything else: each near its best for this model.
LRS = {"AdamW": (4e-3, 4e-3), "Muon": (1.6e-2, 4e-3), "NorMuon": (1.6e-2, 4e-3)}
_WARMUP = 0.1
_VALIDATIONS = 8


@dataclass(frozen=True)
class Run:
    """A model and the tokens it sees in a step."""

    model: Size
    length: int
    sequences: int
    steps: int


RUNS = {
    "cpu": Run(Size(layers=2, width=128, heads=4, hidden=384), 128, sequences=8, steps=80),
    "cuda": Run(Size(layers=6, width=512, heads=8, hidden=1536), 512, sequences=32, steps=300),
}


@dataclass
class Curve:
    """What one optimizer reached.

    Args:
        optimizer: Its name.
        lr: Of the matrices.
        losses: Of each training step.
        validation: Loss on held-out text at the end.
        step_milliseconds: Median time of ``optimizer.step()``.
        seconds: Of the whole training.
    """

    optimizer: str
    lr: float
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    step_milliseconds: float = math.nan
    seconds: float = math.nan

    @property
    def passes(self) -> bool:
        """Whether it has learned something: less than the 8 bits of a byte, by a wide margin."""
        return self.validation < 0.75 * math.log(256)


def load_text(most: int = 1 << 23) -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes of the Python standard library's source, int64.

    Args:
        most: Bytes of each, at most.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for document in read_documents():
        parts[is_held_out(document["path"])].append(document["text"])
    train, held_out = ("\n".join(texts).encode()[:most] for texts in parts)
    return _tensor(train), _tensor(held_out)


def compare_optimizers(
    device: torch.device,
    steps: int | None = None,
    on_step: Callable[[str, int], None] = lambda *_: None,
) -> Iterator[Curve]:
    """Train the same model on the same text with AdamW, Muon and NorMuon.

    Args:
        device: Where to train.
        steps: Number of steps; None for what suits the device.
        on_step: Called with the optimizer's name and the number of the step.
    """
    run = RUNS["cuda" if device.type == "cuda" else "cpu"]
    run = run if steps is None else replace(run, steps=steps)
    train, held_out = load_text()
    for name in LRS:
        torch.manual_seed(0)
        model = Transformer(run.model, 256).to(device)
        yield _train(model, name, run, (train, held_out), partial(on_step, name))


def _train(
    model: Transformer,
    name: str,
    run: Run,
    text: tuple[Tensor, Tensor],
    on_step: Callable[[int], None],
) -> Curve:
    device = model.norm.weight.device
    lr, rest_lr = LRS[name]
    groups = param_groups(model, name.lower())
    for group in groups:
        group["lr"] = lr if group["algorithm"] != "adamw" else rest_lr
    optimizer = Muon(groups, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _factor(i, run.steps))
    generator = torch.Generator().manual_seed(1)
    curve, clocks = Curve(name, lr), []
    start = time.perf_counter()
    for step in range(1, run.steps + 1):
        loss = _loss(model, _batch(text[0], run, generator).to(device))
        loss.backward()
        curve.losses.append(loss.item())
        clocks.append(clock := Stopwatch(device))
        with clock.part("step"):
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step)
    curve.step_milliseconds = 1e3 * statistics.median(c.seconds()["step"] for c in clocks)
    curve.seconds = time.perf_counter() - start
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        batches = [_batch(text[1], run, generator).to(device) for _ in range(_VALIDATIONS)]
        curve.validation = statistics.fmean(_loss(model, batch).item() for batch in batches)
    return curve


def _loss(model: Transformer, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _batch(text: Tensor, run: Run, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - run.length - 1, (run.sequences,), generator=generator)
    return torch.stack([text[start : start + run.length + 1] for start in starts])


def _factor(step: int, steps: int) -> float:
    """Return warm-up, then a line to a tenth."""
    warmup = max(1, int(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.9 * (step - warmup) / max(1, steps - warmup)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
