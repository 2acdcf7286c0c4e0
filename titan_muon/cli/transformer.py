"""The model that ``titan-muon verify`` and the benchmarks train: Llama's layers in a few lines."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

__all__ = ["Size", "Transformer"]


@dataclass(frozen=True)
class Size:
    """Of a model.

    Args:
        layers: Number of layers.
        width: Features of a token.
        heads: Attention heads, each with ``width / heads`` features.
        hidden: Features inside the MLP.
    """

    layers: int
    width: int
    heads: int
    hidden: int


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return (B, L, D) from (B, L, D); ``turn`` as for :func:`rotate`."""
        y = self.attention_norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y = scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    """Embedding, layers, norm, head; matrices start normal, with a deviation of 0.02."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.head_dim = size.width // size.heads
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, L, vocabulary) logits from (B, L) tokens."""
        x = self.embedding(tokens)
        half = torch.arange(self.head_dim // 2, device=x.device)
        positions = torch.arange(tokens.shape[1], device=x.device)
        angles = torch.outer(positions, 10000.0 ** (-half / len(half)))
        turn = torch.stack([angles.cos(), angles.sin()]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(self.norm(x))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position.

    Args:
        x: (B, heads, L, head dim).
        turn: (2, L, head dim / 2), cosines and sines.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * turn[0] - b * turn[1], a * turn[1] + b * turn[0]], dim=-1)
