"""Elementwise algorithms on shards that their kernels do not take as they are.

Torch's kernels want one dtype. Where weight, gradient and state differ in theirs, state is
quantised, or weights are rounded stochastically, the kernel runs on float32 copies (float64 for
float64 weights) of at most ``CHUNK`` elements at a time, and the result is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from titan_muon.optim.loans import Loan, Transfers
from titan_muon.optim.observer import ElementwiseStep
from titan_muon.optim.quantized import Quantized, section, unwrapped
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
            state = {key: unwrapped(tensor) for key, tensor in held.items()}
            if rounding is None and _is_uniform(param, grad, state):
                direct.append(place)
            else:
                shard = _Shard(param, grad, state, rounding)
                staged.setdefault(shard.kind, []).append(shard)
        if direct:
            shards, of_shards = ([tensors[i] for i in direct] for tensors in (params, grads))
            step(shards, of_shards, [states[i] for i in direct], group)
        for alike in staged.values():
            for sections in _cut(alike):
                _step_sections(step, sections, group, conditional=conditional)
            for shard in alike:
                shard.restore()

    return run


def _is_sliced(key: str, tensor: Tensor | Quantized, param: Tensor) -> bool:
    """Whether a state tensor holds a value for each element of the weight."""
    if isinstance(tensor, Quantized):
        return True
    return tensor.shape == param.shape and (tensor.ndim > 0 or key != STEP)


def _is_uniform(param: Tensor, grad: Tensor, state: Mapping[str, Tensor | Quantized]) -> bool:
    """Whether torch's kernels take the shards as they are."""
    dtype = param.dtype
    for key, tensor in state.items():
        if isinstance(tensor, Quantized):
            return False
        if tensor.dtype != dtype and _is_sliced(key, tensor, param):
            return False
    return grad.dtype == dtype


class _Shard:
    """One parameter's local tensors, flat.

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
        self.kind = grad.dtype, *formats, *self.sliced, rounding is None
        self.dtype, self.device = param.dtype, param.device
        self.flat = [t if isinstance(t, Quantized) else t.reshape(-1) for t in self._live]
        self.flat_grad = grad.reshape(-1)
        items = [(k, t) for k, t in state.items() if k not in self.sliced]
        self.whole = {k: t for k, t in items if isinstance(t, Tensor)}
        # Each chunk of a shard takes the same step.
        cut = self.size > CHUNK
        self.before = {k: t.clone() for k, t in self.whole.items()} if cut else {}

    def restore(self) -> None:
        """Write back what had to be copied."""
        for live, flat in zip(self._live, self.flat, strict=True):
            if isinstance(live, Tensor) and not live.is_contiguous():
                live.copy_(cast(Tensor, flat).view(live.shape))


class _Section(NamedTuple):
    shard: _Shard
    start: int
    stop: int


def _cut(shards: Sequence[_Shard]) -> Iterator[list[_Section]]:
    """Cut shards into chunks of at most ``CHUNK`` elements."""
    chunk: list[_Section] = []
    used = 0
    for shard in shards:
        size = shard.size
        for start in range(0, max(size, 1), CHUNK):
            stop = min(start + CHUNK, size)
            if chunk and used + stop - start > CHUNK:
                yield chunk
                chunk, used = [], 0
            chunk.append(_Section(shard, start, stop))
            used += stop - start
    yield chunk


def _step_sections(
    step: ElementwiseStep,
    sections: Sequence[_Section],
    group: Mapping[str, Any],
    *,
    conditional: bool,
) -> None:
    first = sections[0].shard
    transfers = Transfers(first.device)
    work = torch.float64 if first.dtype == torch.float64 else torch.float32
    lent = []

    def rounded(place: int, values: Tensor) -> Tensor:
        shard, start, _ = sections[place]
        if shard.rounding is None:
            raise AssertionError("shards of one kind are rounded alike")
        return shard.rounding(values, shard.whole[STEP], start)

    narrow = None if first.rounding is None else rounded
    for number in range(len(first.flat)):
        parts = [section(s.flat[number], start, stop) for s, start, stop in sections]
        lent.append(Loan(parts, transfers, work, None if number else narrow))
    grads = Loan([section(s.flat_grad, *at) for s, *at in sections], transfers, work)
    for loan in (*lent, grads):
        loan.open()
    states = []
    for place, (shard, start, _) in enumerate(sections):
        for key, value in shard.before.items() if start else ():
            shard.whole[key].copy_(value)
        values = zip(shard.sliced, lent[1:], strict=True)
        states.append({**shard.whole, **{key: loan.work[place] for key, loan in values}})
    step(lent[0].work, grads.work, states, group)
    for loan in lent:
        loan.store(only_changed=conditional)
