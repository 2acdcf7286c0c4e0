"""Which noise rounds which element of a bfloat16 parameter.

The noise of an element is a function of the option ``rounding_seed``, the parameter's name, the
number of the step and the element's place in the whole tensor: so it is the same on every replica,
on every layout, and after a resume.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.layout import layout_of, local_region
from titan_muon.distributed.tensors import own_coordinate
from titan_muon.kernels.noise import Noise
from titan_muon.kernels.rounding import round_to_bfloat16

__all__ = ["STEP", "Rounding", "is_rounded"]

# State key of the number of the step.
STEP = "step"


def is_rounded(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a parameter is rounded stochastically."""
    return bool(group.get("stochastic_rounding")) and param.dtype == torch.bfloat16


class Rounding:
    """Rounds the shard of one parameter.

    Args:
        param: Plain tensor or DTensor. Not read.
        name: Its name, the same on every rank.
        seed: The option ``rounding_seed``.
    """

    def __init__(self, param: Tensor, name: str, seed: int) -> None:
        layout = layout_of(param, name)
        region = local_region(layout, own_coordinate(param))
        # A row is what the last dim holds for one index of all others.
        rows = torch.zeros(1, dtype=torch.int64)
        for size, intervals in zip(layout.shape[:-1], region[:-1], strict=True):
            rows = (rows.view(-1, 1) * size + _numbers(intervals)).view(-1)
        columns = _numbers(region[-1]) if region else torch.zeros(1, dtype=torch.int64)
        self._rows, self._columns = rows.to(torch.int32), columns.to(torch.int32)
        base = zlib.crc32(f"{seed} {name}".encode()) - (1 << 31)
        self._base = torch.tensor(base, dtype=torch.int32)

    def __call__(self, values: Tensor, step: Tensor, start: int = 0) -> Tensor:
        """Return values in bfloat16.

        Args:
            values: (n,) float32, elements of the flat shard. Not modified.
            step: 0-d, number of the step, on any device. Not read by the host.
            start: Place of the first one in the shard.
        """
        if self._rows.device != values.device:
            held = self._rows, self._columns, self._base
            self._rows, self._columns, self._base = (t.to(values.device) for t in held)
        noise = Noise(self._rows, self._columns, step, self._base)
        out = torch.empty_like(values, dtype=torch.bfloat16)
        round_to_bfloat16(values, out, noise, start)
        return out


def _numbers(intervals: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(*interval) for interval in intervals)])
