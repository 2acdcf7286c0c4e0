"""Attention written out in float64, head by head, and what QK-clip must make of its weights."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_muon.optim.qk_clip import HeadRows, head_rows, interleaved_rows

DIM, BATCH, LENGTH = 12, 2, 5


class Kind(NamedTuple):
    """One way to project queries and keys.

    Args:
        n_heads: Query heads.
        shapes: Weights by name.
        rows: Their rows, as QKClip takes them.
        logits: (weights, x) to the scaled logits (batch, heads, length, length), float64.
        scaled: (weights, gamma of each head) to what the clip must make of them.
    """

    n_heads: int
    shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, list[HeadRows]]
    logits: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    scaled: Callable[[Mapping[str, Tensor], list[float]], dict[str, Tensor]]


def _dots(queries: list[Tensor], keys: list[Tensor], scale: float) -> Tensor:
    return torch.stack([scale * q @ k.mT for q, k in zip(queries, keys, strict=True)], dim=1)


def _separate(n_heads: int, n_kv_heads: int, head_dim: int) -> Kind:
    group = n_heads // n_kv_heads
    power = 0.5 if group == 1 else 1.0

    def logits(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q = (x @ weights["wq"].mT + weights["bq"]).split(head_dim, -1)
        k = (x @ weights["wk"].mT).split(head_dim, -1)
        return _dots(list(q), [k[h // group] for h in range(n_heads)], head_dim**-0.5)

    def scaled(weights: Mapping[str, Tensor], gamma: list[float]) -> dict[str, Tensor]:
        result = {name: w.clone() for name, w in weights.items()}
        for head in range(n_heads):
            part = slice(head * head_dim, (head + 1) * head_dim)
            for name in ("wq", "bq"):
                result[name][part] *= gamma[head] ** power
            if group == 1:
                result["wk"][part] *= gamma[head] ** 0.5
        return result

    queries = head_rows(n_heads, (head_dim, power))
    rows = {"wq": queries, "bq": queries}
    if group == 1:
        rows["wk"] = queries
    shapes = {
        "wq": (n_heads * head_dim, DIM),
        "bq": (n_heads * head_dim,),
        "wk": (n_kv_heads * head_dim, DIM),
    }
    return Kind(n_heads, shapes, rows, logits, scaled)


def _fused(n_heads: int, n_kv_heads: int, head_dim: int) -> Kind:
    group = n_heads // n_kv_heads
    shape = (n_kv_heads, group + 2, head_dim, DIM)

    def logits(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        parts = weights["wqkv"].view(shape)
        heads = [divmod(head, group) for head in range(n_heads)]
        queries = [x @ parts[kv, query].mT for kv, query in heads]
        keys = [x @ parts[kv, group].mT for kv, _ in heads]
        return _dots(queries, keys, head_dim**-0.5)

    def scaled(weights: Mapping[str, Tensor], gamma: list[float]) -> dict[str, Tensor]:
        parts = weights["wqkv"].clone().view(shape)
        for head in range(n_heads):
            kv, query = divmod(head, group)
            if group == 1:
                parts[kv, :2] *= gamma[head] ** 0.5
            else:
                parts[kv, query] *= gamma[head]
        return {"wqkv": parts.view(-1, DIM)}

    shapes = {"wqkv": (shape[0] * shape[1] * shape[2], DIM)}
    rows = {"wqkv": interleaved_rows(n_kv_heads, group, head_dim)}
    return Kind(n_heads, shapes, rows, logits, scaled)


def _latent(n_heads: int, plain: int, rotary: int, value: int) -> Kind:
    width = plain + rotary

    def logits(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q = (x @ weights["wq"].mT).split(width, -1)
        kv = (x @ weights["wkv_b"].mT).split(plain + value, -1)
        shared = x @ weights["wkv_a"].mT
        keys = [torch.cat([part[..., :plain], shared], -1) for part in kv]
        return _dots(list(q), keys, width**-0.5)

    def scaled(weights: Mapping[str, Tensor], gamma: list[float]) -> dict[str, Tensor]:
        result = {name: w.clone() for name, w in weights.items()}
        for head in range(n_heads):
            query, key = head * width, head * (plain + value)
            result["wq"][query : query + plain] *= gamma[head] ** 0.5
            result["wq"][query + plain : query + width] *= gamma[head]
            result["wkv_b"][key : key + plain] *= gamma[head] ** 0.5
        return result

    shapes = {
        "wq": (n_heads * width, DIM),
        "wkv_b": (n_heads * (plain + value), DIM),
        "wkv_a": (rotary, DIM),
    }
    rows = {
        "wq": head_rows(n_heads, (plain, 0.5), (rotary, 1.0)),
        "wkv_b": head_rows(n_heads, (plain, 0.5), (value, 0.0)),
    }
    return Kind(n_heads, shapes, rows, logits, scaled)


KINDS = {
    "multi-head": _separate(4, 4, 3),
    "grouped": _separate(4, 2, 3),
    "fused grouped": _fused(4, 2, 3),
    "fused multi-head": _fused(4, 4, 2),
    "latent": _latent(4, 3, 2, 4),
}


def weights_of(kind: Kind, seed: int = 0) -> dict[str, Tensor]:
    """Return random float64 weights; head 2 has small queries, so that it stays below the rest."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in kind.shapes.items()
    }
    for name in kind.rows:
        for row in kind.rows[name]:
            if row.head == 2:
                weights[name][row.start : row.start + row.count] *= 1e-2
    return weights


def inputs(seed: int) -> Tensor:
    """Return (BATCH, LENGTH, DIM) float64."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(BATCH, LENGTH, DIM, generator=generator, dtype=torch.float64)


def largest(kind: Kind, weights: Mapping[str, Tensor], xs: list[Tensor]) -> list[float]:
    """Return the largest logit of each head over several inputs."""
    logits = torch.cat([kind.logits(weights, x) for x in xs])
    return [logits[:, head].max().item() for head in range(kind.n_heads)]


def gammas(maxima: list[float], threshold: float) -> list[float]:
    """Return the factor of each head's logits."""
    return [min(1.0, threshold / value) if value > 0 else 1.0 for value in maxima]


def add(clip: Any, kind: Kind, weights: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Add a layer of a kind to a clip; return its maxima."""
    pairs = [(weights[name], rows) for name, rows in kind.rows.items()]
    return clip.add_layer(kind.n_heads, pairs, **options)
