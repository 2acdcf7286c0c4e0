"""What QK-clip costs a training step: attention with and without row maxima, and the clip itself.

    python scripts/bench_qk_clip.py [--kinds grouped latent] [--layers 4] [--length 8192]

Compiled transformer blocks in bfloat16 on FlexAttention with a causal mask, forward and backward;
both variants take turns, times are medians between device events. ``attention`` is one forward of
FlexAttention alone. On a CPU the shapes are small and the attention is written out, to show that
the script works.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from titan_muon import HybridMuonAdamW
from titan_muon.optim.qk_clip import QKClip, head_rows, observe
from titan_muon.optim.stopwatch import Stopwatch


class Shape(NamedTuple):
    """Sizes of a block: Llama 3 8B's, and those of latent attention in DeepSeek-V3 (16 heads)."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    hidden: int


SHAPES = {
    "grouped": Shape(4096, 32, 8, 128, 128, 14336),
    "latent": Shape(2048, 16, 16, 192, 128, 10944),
}
SMALL = {"grouped": Shape(64, 4, 2, 16, 16, 128), "latent": Shape(64, 4, 4, 24, 16, 128)}


class Block(nn.Module):
    """Attention and a gated feed-forward layer, with norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        linear = lambda rows, columns: nn.Linear(columns, rows, bias=False)  # noqa: E731
        self.wq = linear(shape.heads * shape.head_dim, shape.dim)
        self.wk = linear(shape.kv_heads * shape.head_dim, shape.dim)
        self.wv = linear(shape.kv_heads * shape.value_dim, shape.dim)
        self.wo = linear(shape.dim, shape.heads * shape.value_dim)
        self.w1, self.w3 = linear(shape.hidden, shape.dim), linear(shape.hidden, shape.dim)
        self.w2 = linear(shape.dim, shape.hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.dim) for _ in range(2))
        self.max_logits: Tensor | None = None

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (w(h).unflatten(2, (n, -1)).transpose(1, 2) for w, n in self.projections())
        out = attend(q, k, v, mask, self.max_logits)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))

    def projections(self) -> list[tuple[nn.Linear, int]]:
        kv_heads = self.shape.kv_heads
        return [(self.wq, self.shape.heads), (self.wk, kv_heads), (self.wv, kv_heads)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, max_logits: Tensor | None) -> Tensor:
    if q.is_cuda:
        request = AuxRequest(max_scores=max_logits is not None)
        gqa = q.shape[1] != k.shape[1]
        out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, return_aux=request)
        if max_logits is not None:
            observe(max_logits, aux.max_scores)
        return out
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask, -torch.inf)
    if max_logits is not None:
        observe(max_logits, logits)
    return logits.softmax(-1) @ v


def clip_of(blocks: Sequence[Block], shape: Shape) -> tuple[QKClip, list[Tensor]]:
    power = 1.0 if shape.heads > shape.kv_heads else 0.5
    rows = head_rows(shape.heads, (shape.head_dim, power))
    clip = QKClip(100.0)
    maxima = []
    for block in blocks:
        weights = [(block.wq.weight, rows)]
        weights += [(block.wk.weight, rows)] if power == 0.5 else []
        maxima.append(clip.add_layer(shape.heads, weights))
    return clip, maxima


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return milliseconds of one call."""
    clock = Stopwatch(device)
    with clock.part("all"):
        work()
    return 1e3 * clock.seconds()["all"]


def in_turns(
    device: torch.device, works: dict[str, Callable[[], object]], steps: int
) -> dict[str, float]:
    """Return the median milliseconds of each piece of work, all of them taking turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for step in range(steps + 3):
        for name, work in works.items():
            elapsed = timed(device, work)
            # Compilation and warm-up.
            if step >= 3:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape: Shape, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    length = options.length if is_gpu else 64
    mask: Any = torch.ones(length, length, dtype=torch.bool).triu(1)
    if is_gpu:
        causal = lambda b, h, q, k: q >= k  # noqa: E731
        mask = create_block_mask(causal, None, None, length, length, device=device)
    blocks = [Block(shape).to(device, dtype) for _ in range(options.layers)]
    clip, maxima = clip_of(blocks, shape)
    optimizer = HybridMuonAdamW(nn.ModuleList(blocks), muon_lr=1e-3, adamw_lr=1e-3)
    x = torch.randn(options.batch, length, shape.dim, device=device, dtype=dtype)
    run = torch.compile(lambda block, h: block(h, mask)) if is_gpu else (lambda b, h: b(h, mask))

    def train(is_observed: bool) -> None:
        h = x
        for block, tensor in zip(blocks, maxima, strict=True):
            block.max_logits = tensor if is_observed else None
            h = run(block, h)
        h.float().square().mean().backward()

    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim)]
    sizes.append((shape.kv_heads, shape.value_dim))
    q, k, v = (
        torch.randn(options.batch, n, length, d, device=device, dtype=dtype) for n, d in sizes
    )
    kernel = torch.compile(attend) if is_gpu else attend
    with torch.no_grad():
        alone = in_turns(
            device,
            {
                "attention": lambda: kernel(q, k, v, mask, None),
                "attention with maxima": lambda: kernel(q, k, v, mask, maxima[0]),
            },
            options.steps,
        )
    whole = in_turns(
        device,
        {"forward, backward": lambda: train(False), "with maxima": lambda: train(True)},
        options.steps,
    )
    ends = in_turns(device, {"optimizer": optimizer.step, "clip": clip.step}, options.steps)
    return {**alone, **whole, **ends}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args(arguments)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    name = torch.cuda.get_device_name() if is_gpu else "CPU, small shapes"
    print(f"{name}, torch {torch.__version__}, medians of {options.steps}")
    for kind in options.kinds:
        shape = (SHAPES if is_gpu else SMALL)[kind]
        found = measure(shape, options, device)
        before = found["forward, backward"] + found["optimizer"]
        after = found["with maxima"] + found["optimizer"] + found["clip"]
        print(f"{kind}: {options.layers} layers {tuple(shape)}, batch {options.batch}")
        print("  " + ", ".join(f"{key} {value:.3f} ms" for key, value in found.items()))
        print(f"  step {before:.2f} -> {after:.2f} ms ({100 * (after / before - 1):+.2f} %)")


if __name__ == "__main__":
    main()
