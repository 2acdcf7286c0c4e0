"""What quantised state tensors hold."""

import torch
from torch import Tensor

from titan_muon.distributed.tensors import local_of
from titan_muon.optim.quantized import is_quantized, stored


def bits(tensor: Tensor) -> list[Tensor]:
    """Return copies of the plain tensors that a state tensor's local shard consists of."""
    parts = stored(local_of(tensor.detach()))
    return [p.view(torch.uint8).clone() if p.itemsize == 1 else p.clone() for p in parts]


def values(tensor: Tensor) -> Tensor:
    """Return what a state tensor's local shard stands for."""
    local = local_of(tensor.detach())
    return local.dequantize() if is_quantized(local) else local
