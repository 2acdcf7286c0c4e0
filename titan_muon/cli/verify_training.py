"""A short training of a small byte-level transformer with each optimizer, on real text."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

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
class Size:
    """A model and the tokens it sees in a step."""

    layers: int
    width: int
    heads: int
    length: int
    sequences: int
    steps: int


SIZES = {
    "cpu": Size(layers=2, width=128, heads=4, length=128, sequences=8, steps=80),
    "cuda": Size(layers=6, width=512, heads=8, length=512, sequences=32, steps=300),
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


class Block(nn.Module):
    """Attention and a feed-forward layer, both behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, D) from (B, L, D)."""
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (layer(self.norms[0](x)).view(shape).transpose(1, 2) for layer in self.qkv)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.width)
        self.lm_head = nn.Linear(size.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, L, 256) logits from (B, L) tokens."""
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.lm_head(self.norm(self.layers(x)))


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
    size = SIZES["cuda" if device.type == "cuda" else "cpu"]
    count = size.steps if steps is None else steps
    train, held_out = load_text()
    for name in LRS:
        torch.manual_seed(0)
        model = Model(size).to(device)
        yield _train(model, name, size, (train, held_out), partial(on_step, name), count)


def _train(
    model: Model,
    name: str,
    size: Size,
    text: tuple[Tensor, Tensor],
    on_step: Callable[[int], None],
    steps: int,
) -> Curve:
    device = model.norm.weight.device
    lr, rest_lr = LRS[name]
    groups = param_groups(model, name.lower())
    for group in groups:
        group["lr"] = lr if group["algorithm"] != "adamw" else rest_lr
    optimizer = Muon(groups, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _factor(i, steps))
    generator = torch.Generator().manual_seed(1)
    curve, clocks = Curve(name, lr), []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        loss = _loss(model, _batch(text[0], size, generator).to(device))
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
        batches = [_batch(text[1], size, generator).to(device) for _ in range(_VALIDATIONS)]
        curve.validation = statistics.fmean(_loss(model, batch).item() for batch in batches)
    return curve


def _loss(model: Model, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _batch(text: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - size.length - 1, (size.sequences,), generator=generator)
    return torch.stack([text[start : start + size.length + 1] for start in starts])


def _factor(step: int, steps: int) -> float:
    """Return warm-up, then a line to a tenth."""
    warmup = max(1, int(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.9 * (step - warmup) / max(1, steps - warmup)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
