"""Elementwise algorithms on shards that their kernels do not take as they are.

Torch's kernels want one dtype and one layout in memory. Where weight, gradient and state differ in
theirs, state is quantised, or weights are rounded stochastically, the kernel runs on float32 copies
(float64 for float64 weights) of at most ``CHUNK`` elements at a time, and the result is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from titan_muon.optim.loans import Loan, Transfers
from titan_muon.optim.observer import ElementwiseStep
from titan_muon.optim.quantized import Quantized, pieces, unwrapped
from titan_muon.optim.rounding import STEP, Rounding

__all__ = ["in_chunks"]

# 64 MiB a tensor; a multiple of every block of quantised state.
CHUNK = 1 << 24


def in_chunks(
    step: ElementwiseStep, roundings: Sequence[Rounding | None], *, conditional: bool
) -> ElementwiseStep:
    """Return a step that also takes shards of mixed dtypes, quantised state and rounded weights.

    Args:
        step: Takes shards, gradients, states and the group, all shards and states of one dtype.
        roundings: How each weight is rounded, None for torch's rounding.
        conditional: Whether the step may turn out to change nothing.
    """

    def run(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        direct: list[int] = []
        staged: dict[tuple[Any, ...], list[_Shard]] = {}
        parts = zip(params, grads, states, roundings, strict=True)
        for place, (param, grad, held, rounding) in enumerate(parts):
            if rounding is None and _is_uniform(param, grad, held):
                direct.append(place)
            else:
                state = {key: unwrapped(tensor) for key, tensor in held.items()}
                shard = _Shard(param, grad, state, rounding)
                staged.setdefault(shard.kind, []).append(shard)
        if direct:
            shards, of_shards = ([tensors[i] for i in direct] for tensors in (params, grads))
            step(shards, of_shards, [states[i] for i in direct], group)
        for alike in staged.values():
            transfers = Transfers(alike[0].device)
            for sections in _cut(alike):
                _step_sections(step, sections, transfers, group, conditional=conditional)
            for shard in alike:
                shard.restore()

    return run


def _is_sliced(key: str, tensor: Tensor | Quantized, param: Tensor) -> bool:
    """Whether a state tensor holds a value for each element of the weight."""
    if isinstance(tensor, Quantized):
        return True
    return tensor.shape == param.shape and (tensor.ndim > 0 or key != STEP)


def _is_uniform(param: Tensor, grad: Tensor, held: Mapping[str, Tensor]) -> bool:
    """Whether torch's kernels take the shards as they are: of one dtype, and laid out alike."""
    dtype, strides = param.dtype, param.stride()
    for key, tensor in held.items():
        if type(tensor) is not Tensor:
            return False
        alike = tensor.stride() == strides and tensor.dtype == dtype
        if not alike and _is_sliced(key, tensor, param):
            return False
    return grad.stride() == strides and grad.dtype == dtype


class _Shard:
    """One parameter's local tensors, flat and in pieces of ``CHUNK`` elements.

    Args:
        param, grad: Local tensors of one shape.
        state: Local tensors of that shape, and 0-d ones.
        rounding: How the weight is rounded, None for torch's rounding.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor | Quantized],
        rounding: Rounding | None,
    ) -> None:
        self.size, self.rounding = param.numel(), rounding
        self.sliced = [key for key, t in state.items() if _is_sliced(key, t, param)]
        self._live = [param, *(state[key] for key in self.sliced)]
        formats = [t.format if isinstance(t, Quantized) else t.dtype for t in self._live]
        self.dtype, self.device = param.dtype, param.device
        self.kind = self.device, grad.dtype, *formats, *self.sliced, rounding is None
        self._flat = [t if isinstance(t, Quantized) else t.reshape(-1) for t in self._live]
        self.pieces = [pieces(t, CHUNK) for t in self._flat]
        self.grads = pieces(grad.reshape(-1), CHUNK)
        items = [(k, t) for k, t in state.items() if k not in self.sliced]
        whole = {k: t for k, t in items if isinstance(t, Tensor)}
        # Each piece of a shard takes the same step, all but the first on copies.
        others = len(self.grads) - 1
        copies = {k: t.expand(others, *t.shape).clone() for k, t in whole.items() if others}
        self.whole = [whole, *({k: t[i] for k, t in copies.items()} for i in range(others))]

    def restore(self) -> None:
        """Write back what had to be copied."""
        for live, flat in zip(self._live, self._flat, strict=True):
            if isinstance(live, Tensor) and not live.is_contiguous():
                live.copy_(cast(Tensor, flat).view(live.shape))


class _Section(NamedTuple):
    shard: _Shard
    number: int
    size: int


def _cut(shards: Sequence[_Shard]) -> Iterator[list[_Section]]:
    """Group pieces of shards to chunks of at most ``CHUNK`` elements."""
    sections = [
        _Section(shard, number, min(shard.size - number * CHUNK, CHUNK))
        for shard in shards
        for number in range(len(shard.grads))
    ]
    # Whole chunks first, so that what is left of shards comes together.
    sections.sort(key=lambda section: -section.size)
    chunk: list[_Section] = []
    used = 0
    for section in sections:
        if chunk and used + section.size > CHUNK:
            yield chunk
            chunk, used = [], 0
        chunk.append(section)
        used += section.size
    yield chunk


def _step_sections(
    step: ElementwiseStep,
    sections: Sequence[_Section],
    transfers: Transfers,
    group: Mapping[str, Any],
    *,
    conditional: bool,
) -> None:
    first = sections[0].shard
    work = torch.float64 if first.dtype == torch.float64 else torch.float32

    def rounded(place: int, values: Tensor) -> Tensor:
        shard, number, _ = sections[place]
        if shard.rounding is None:
            raise AssertionError("shards of one kind are rounded alike")
        return shard.rounding(values, shard.whole[number][STEP], number * CHUNK)

    narrow = None if first.rounding is None else rounded
    lent = []
    for i in range(len(first.pieces)):
        parts = [s.shard.pieces[i][s.number] for s in sections]
        lent.append(Loan(parts, transfers, work, None if i else narrow))
    grads = Loan([s.shard.grads[s.number] for s in sections], transfers, work)
    for loan in (*lent, grads):
        loan.open()
    states = []
    for place, (shard, number, _) in enumerate(sections):
        values = zip(shard.sliced, lent[1:], strict=True)
        states.append({**shard.whole[number], **{key: loan.work[place] for key, loan in values}})
    step(lent[0].work, grads.work, states, group)
    for loan in lent:
        loan.store(only_changed=conditional)
