"""QK-clip: shrink query and key weights of attention heads whose largest logit passed a threshold.

[Note: one step]
While it computes, the attention folds the largest logit of each head into a tensor (``observe``),
once a micro-batch and, harmlessly, again when activations are recomputed. After the optimizer's
step ``QKClip.step`` takes the maximum over the ranks that hold the weights, scales the rows of
every head by a power of gamma = min(1, threshold / maximum), and forgets the maxima. Nothing of it
is state: a checkpoint holds none.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.groups import group_of
from titan_muon.distributed.layout import is_dtensor, layout_of, local_region
from titan_muon.distributed.tensors import compute_device, local_of
from titan_muon.optim.head_rows import (
    POWERS,
    HeadRows,
    factor_indices,
    head_rows,
    interleaved_rows,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HeadRows", "QKClip", "head_rows", "interleaved_rows", "observe"]

_NONE = -math.inf


@torch.no_grad()
def observe(maxima: Tensor, logits: Tensor) -> None:
    """Fold the attention logits of one forward pass into the largest of each head.

    Call it in training only: what an evaluation observes would clip too. It takes no host
    synchronization, and can be compiled and captured in a CUDA graph.

    Args:
        maxima: (heads,) from :meth:`QKClip.add_layer`; modified.
        logits: (batch, heads, ...): the scaled logits before the softmax, masked ones at -inf, or
            their maximum by row, as FlexAttention's ``AuxRequest(max_scores=True)`` returns it.
            Not modified.

    Raises:
        ValueError: ``logits`` has another number of heads than ``maxima``.
    """
    if logits.ndim < 2 or logits.shape[1] != len(maxima):
        raise ValueError(
            f"observe: logits of shape {tuple(logits.shape)} for {len(maxima)} heads; their shape "
            "must be (batch, heads, ...)"
        )
    others = [dim for dim in range(logits.ndim) if dim != 1]
    maxima.clamp_(min=logits.detach().amax(others).to(maxima.dtype))


class QKClip:
    """Keeps the largest attention logit of every head near a threshold, as MuonClip does.

    Args:
        threshold: Largest logit that is left alone; Kimi K2 took 100.
        process_group: Ranks that hold copies of plain weights, as under DistributedDataParallel;
            DTensors know theirs.

    Raises:
        ValueError: ``threshold`` is not a positive number.

    Source: Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1
    """

    def __init__(self, threshold: float, process_group: "ProcessGroup | None" = None) -> None:
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not (is_number and 0 < threshold < math.inf):
            raise ValueError(f"QKClip: threshold = {threshold!r} must be a number above 0")
        self.threshold = float(threshold)
        self._process_group = process_group
        self._sets: dict[tuple[int, ...], _RankSet] = {}
        self._seen: set[int] = set()

    def add_layer(
        self,
        n_heads: int,
        weights: Sequence[tuple[Tensor, Sequence[HeadRows]]],
        *,
        heads: range | None = None,
        name: str = "attention",
    ) -> Tensor:
        """Take in one attention layer.

        Args:
            n_heads: Number of its query heads, on all ranks together.
            weights: Query and key weights, (rows, columns) or biases (rows,), plain or DTensor,
                each with those of its rows that are to be scaled. Modified by :meth:`step`.
            heads: The heads that this rank's attention computes; by default all.
            name: Used in errors.

        Returns:
            (len(heads),) float32 on the device of the weights, for :func:`observe`. It is changed
            in place from now on; do not replace it. In a model under torch's pipelining make it a
            non-persistent buffer: those are restored after the passes that only learn shapes.

        Raises:
            TypeError: A weight is no tensor.
            ValueError: A weight has no storage, another number of dims, rows outside its shape, or
                was added before; weights of one layer lie on different ranks; plain weights on
                several ranks without a ``process_group``.
        """
        heads = range(n_heads) if heads is None else heads
        if not weights or not set(heads) <= set(range(n_heads)):
            raise ValueError(
                f"QKClip: {name} has {len(weights)} weights and heads {heads} of {n_heads}; give "
                "at least one weight, and heads below n_heads"
            )
        for weight, rows in weights:
            self._check(weight, rows, n_heads, name)
        ranks = {tuple(sorted(layout_of(weight, name).ranks)) for weight, _ in weights}
        if len(ranks) > 1:
            raise ValueError(
                f"QKClip: the weights of {name} lie on different ranks: {sorted(ranks)}; put them "
                "on one device mesh"
            )
        self._seen.update(id(weight) for weight, _ in weights)
        shared = ranks.pop()
        if shared not in self._sets:
            device = compute_device(weights[0][0])
            self._sets[shared] = _RankSet(shared, device, self._process_group)
        return self._sets[shared].add(n_heads, weights, heads)

    def rank_sets(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks that share maxima, each ascending; see ``create_groups``."""
        return sorted(ranks for ranks, found in self._sets.items() if found.meshes)

    @torch.no_grad()
    def step(self, taken: Tensor | None = None) -> None:
        """Scale the weights of heads whose logits passed the threshold, and forget the maxima.

        Call it once after each step of the optimizer. A head that observed nothing, or a logit
        that is not finite, stays as it is. In bfloat16 a factor within 0.2 percent of 1 rounds
        away. Waits for the device where weights are offloaded to the host, else nowhere.

        Args:
            taken: 0-d, 0 where the optimizer skipped its step, so that nothing is scaled; None for
                1. ``Muon.taken`` says it.

        Collective: all ranks that hold the weights; one all-reduce of a float32 a head.
        """
        for found in self._sets.values():
            found.clip(self.threshold, taken)

    def metrics(self) -> dict[str, Tensor]:
        """Return what the last step saw in the layers that this rank has a part of.

        Returns:
            ``max_logit``, the largest logit, and ``clipped_heads``, the number of heads whose
            weights were scaled: 0-d float32 tensors on the device; -inf and 0 without a layer or
            before the first step.
        """
        largest, clipped = self._totals(is_shared=False)
        return {"max_logit": largest, "clipped_heads": clipped}

    def figures(self) -> dict[str, float]:
        """Return :meth:`metrics` of all pipeline stages together, for a log; waits for the device.

        Collective: all ranks of the world.
        """
        largest, clipped = self._totals(is_shared=True)
        if dist.is_initialized():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(clipped)
        return {"max_logit": largest.item(), "clipped_heads": float(round(clipped.item()))}

    def _totals(self, *, is_shared: bool) -> tuple[Tensor, Tensor]:
        """Return largest logit and clipped heads, shared: of every head this rank's part alone."""
        device = next((found.device for found in self._sets.values()), _idle_device())
        largest = torch.full((), _NONE, dtype=torch.float32, device=device)
        clipped = torch.zeros((), dtype=torch.float32, device=device)
        for found in self._sets.values():
            if found.maxima is not None:
                largest = torch.maximum(largest, found.maxima.amax())
                excess = _excess(found.maxima, self.threshold).sum(dtype=torch.float32)
                clipped = clipped + excess / (found.copies if is_shared else 1)
        return largest, clipped

    def _check(self, weight: Tensor, rows: Sequence[HeadRows], n_heads: int, name: str) -> None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"QKClip: a weight of {name} is a {type(weight).__name__}, no tensor")
        shape = tuple(weight.shape)
        if weight.ndim not in (1, 2) or not weight.is_floating_point() or weight.is_meta:
            raise ValueError(
                f"QKClip: a weight of {name} has shape {shape}, dtype {weight.dtype}, device "
                f"{weight.device}; it must be a float matrix or bias with storage"
            )
        if id(weight) in self._seen:
            raise ValueError(f"QKClip: a weight of {name} belongs to another layer already")
        for row in rows:
            is_inside = 0 <= row.start <= row.start + row.count <= shape[0]
            if not (is_inside and 0 <= row.head < n_heads and row.power in POWERS):
                raise ValueError(
                    f"QKClip: {name} with {n_heads} heads: {row} does not fit a weight of shape "
                    f"{shape}; power is one of {POWERS}"
                )
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not (is_dtensor(weight) or is_alone or self._process_group):
            raise ValueError(
                f"QKClip: {name} has plain weights on one of {dist.get_world_size()} ranks; give "
                "process_group the ranks that hold copies of them"
            )


class _RankSet:
    """The layers whose weights lie on one set of ranks; their maxima are reduced together."""

    def __init__(
        self, ranks: tuple[int, ...], device: torch.device, group: "ProcessGroup | None"
    ) -> None:
        self.device = device
        self.meshes: list[Any] = []
        self.copies = 1
        # After the first step (slots,): one for every head of every layer.
        self.maxima: Tensor | None = None
        self._ranks, self._group = ranks, group
        self._slots = 0
        self._observed: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._indices: list[Tensor] = []

    def add(
        self, n_heads: int, weights: Sequence[tuple[Tensor, Sequence[HeadRows]]], heads: range
    ) -> Tensor:
        """Take in a checked layer; return the maxima that its attention observes."""
        for weight, rows in weights:
            indices = _of_local_rows(weight, factor_indices(weight.shape[0], rows, self._slots))
            if indices.numel():
                self._weights.append(weight)
                self._indices.append(indices)
            if is_dtensor(weight) and weight.device_mesh not in self.meshes:
                self.meshes.append(weight.device_mesh)
        self._positions.append(torch.tensor(list(heads), dtype=torch.int64) + self._slots)
        self._slots += n_heads
        self.maxima = None
        self._observed.append(
            torch.full((len(heads),), _NONE, dtype=torch.float32, device=self.device)
        )
        return self._observed[-1]

    def clip(self, threshold: float, taken: Tensor | None) -> None:
        """Reduce the maxima, scale the weights, and reset what the attention observes."""
        maxima = self._prepare() if self.maxima is None else self.maxima
        maxima.fill_(_NONE)
        maxima.index_copy_(0, self._all_positions, torch.cat(self._observed))
        if self._group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group)
        scaled = _excess(maxima, threshold)
        if taken is not None:
            scaled = scaled & (taken.to(maxima.device) > 0)
        gamma = torch.where(scaled, threshold / maxima, 1.0)
        table = torch.cat([self._one, torch.stack([gamma, gamma.sqrt()], dim=1).flatten()])
        factors = table[self._all_indices].split(self._lengths)
        for weight, factor in zip(self._weights, factors, strict=True):
            local = local_of(weight)
            local.mul_(factor.to(local.device).view(-1, *[1] * (local.ndim - 1)))
        # Copies, because arithmetic would keep a NaN.
        torch._foreach_copy_(self._observed, self._resets)

    def _prepare(self) -> Tensor:
        """Build, once for a set of layers, what every step needs; return the maxima."""
        if self.meshes:
            self._group = group_of(self._ranks, self.meshes)
        self.copies = 1 if self._group is None else dist.get_world_size(self._group)
        self._lengths = [indices.numel() for indices in self._indices]
        indices = self._indices or [torch.empty(0, dtype=torch.int64)]
        self._all_indices = torch.cat(indices).to(self.device)
        self._all_positions = torch.cat(self._positions).to(self.device)
        self._one = torch.ones(1, dtype=torch.float32, device=self.device)
        self._resets = [observed.new_full(observed.shape, _NONE) for observed in self._observed]
        self.maxima = torch.empty(self._slots, dtype=torch.float32, device=self.device)
        return self.maxima


def _excess(maxima: Tensor, threshold: float) -> Tensor:
    """Return which heads are scaled; a logit that is not finite tells no scale."""
    return (maxima > threshold) & maxima.isfinite()


def _of_local_rows(weight: Tensor, by_row: Tensor) -> Tensor:
    """Return the entries of the rows that this rank holds a part of, in local order."""
    if not is_dtensor(weight):
        return by_row
    coordinate = weight.device_mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("this rank is not part of the weight's mesh")
    intervals = local_region(layout_of(weight), tuple(coordinate))[0]
    pieces = [by_row[start:stop] for start, stop in intervals]
    return torch.cat(pieces) if pieces else by_row[:0]


def _idle_device() -> torch.device:
    """Return a device that the world communicates on, for a rank without a layer."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
