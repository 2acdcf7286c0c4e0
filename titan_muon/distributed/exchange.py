"""Moves shards to the ranks that own whole matrices, and updates back. No math here.

This is the plain path: every rank gathers every matrix. It is the reference for faster ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.layout import Cut, Layout, is_dtensor, layout_of, local_region
from titan_muon.distributed.matrices import MatrixRule, assemble, matrix_blocks, row_shape

__all__ = ["GatherExchange", "Stack", "local_of", "missing_everywhere", "zeros_by_row"]


@dataclass(frozen=True)
class Stack:
    """A stack of same-shape matrices that this rank computes.

    Args:
        param: Index of the parameter in the exchange.
        count, rows, columns: (B, M, N) of the stack; M and N are those of the whole matrix.
    """

    param: int
    count: int
    rows: int
    columns: int


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the plain tensor itself; shares its storage."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def zeros_by_row(param: Tensor, rule: MatrixRule, dtype: torch.dtype) -> Tensor:
    """Return a zero buffer with one value a row of the parameter, placed like the parameter.

    Args:
        param: Plain tensor or DTensor. Not read.
        rule: The parameter's rule.
        dtype: Dtype of the buffer.

    Returns:
        ``row_shape(rule)``; Replicate on the mesh axes that cut the parameter's columns.
    """
    shape = row_shape(rule)
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, _row_placements(param, shape)
    layout = _row_layout(layout_of(param), shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("this rank is not part of the parameter's mesh")
    local_shape = [sum(b - a for a, b in dim) for dim in local_region(layout, tuple(coordinate))]
    device = local_of(param).device
    local = torch.zeros(local_shape, dtype=dtype, device=device)
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _row_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    last = len(shape) - 1
    cuts = tuple(c if c.dim is not None and c.dim < last else Cut(None) for c in layout.cuts)
    return Layout(shape, layout.mesh_shape, layout.ranks, cuts)


def _row_placements(param: Any, shape: tuple[int, ...]) -> list[Any]:
    from torch.distributed.tensor import Replicate

    cuts = _row_layout(layout_of(param), shape).cuts
    return [
        Replicate() if cut.dim is None else placement
        for cut, placement in zip(cuts, param.placements, strict=True)
    ]


def missing_everywhere(params: Sequence[Tensor], missing: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether no rank has a gradient.

    Args:
        params: Parameters, plain or DTensor. Not read.
        missing: Whether this rank lacks the gradient, one entry a parameter.

    Collective: one all-reduce for each mesh axis; all ranks that hold shards call.
    """
    result = list(missing)
    by_mesh: dict[Any, list[int]] = {}
    for index, param in enumerate(params):
        if is_dtensor(param):
            by_mesh.setdefault(param.device_mesh, []).append(index)
    for mesh, indices in by_mesh.items():
        present = [float(not missing[i]) for i in indices]
        flags = torch.tensor(present, device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(flags, group=mesh.get_group(axis))
        for index, flag in zip(indices, flags.tolist(), strict=True):
            result[index] = flag == 0.0
    return result


class GatherExchange:
    """Gathers every matrix on every rank; each rank computes all of them.

    Args:
        params: Parameters, plain or DTensor, all of the Muon family. Kept by reference, not read.
        rules: Their matrix rules.
        names: Their names, used in errors.

    Raises:
        NotImplementedError: A placement is ``Partial``.
    """

    def __init__(
        self, params: Sequence[Tensor], rules: Sequence[MatrixRule], names: Sequence[str]
    ) -> None:
        self._params = list(params)
        self._rules = list(rules)
        self._layouts = [layout_of(p, n) for p, n in zip(params, names, strict=True)]
        self._counts: list[int] = []
        self.stacks: list[Stack] = []
        for index, rule in enumerate(rules):
            meta = torch.empty(rule.shape, device="meta")
            shapes = [tuple(b.shape) for b in matrix_blocks(meta, rule)]
            self._counts.append(len(shapes))
            self.stacks.extend(Stack(index, *shape) for shape in shapes)

    def to_owners(self, shards: Sequence[Tensor], *, by_row: bool = False) -> list[Tensor]:
        """Gather local shards to whole matrices.

        Args:
            shards: Local tensors, one a parameter, shaped like the local shard (``by_row``: like
                the local shard of ``zeros_by_row``). Not modified.
            by_row: The shards hold one value a row.

        Returns:
            One (B, M, N) or (B, M, 1) tensor for each of ``stacks``.

        Collective: all ranks that hold shards call, in the same order.
        """
        result: list[Tensor] = []
        for param, rule, shard in zip(self._params, self._rules, shards, strict=True):
            whole = self._gather(param, rule, shard, by_row)
            if by_row:
                row_rule = MatrixRule(
                    row_shape(rule), (rule.stack[0], rule.stack[1], 1), rule.kind, rule.numbers
                )
                result.extend(matrix_blocks(whole, row_rule))
            else:
                result.extend(matrix_blocks(whole, rule))
        return result

    def to_shards(self, updates: Sequence[Tensor], *, by_row: bool = False) -> list[Tensor]:
        """Cut whole updates to this rank's shards.

        Args:
            updates: One (B, M, N) or (B, M, 1) tensor for each of ``stacks``. Not modified.
            by_row: The updates hold one value a row.

        Returns:
            Local tensors, one a parameter.
        """
        result, position = [], 0
        for index, rule in enumerate(self._rules):
            count = self._counts[index]
            whole = assemble(updates[position : position + count], rule)
            position += count
            result.append(self._shard(index, whole, by_row))
        return result

    def _gather(self, param: Tensor, rule: MatrixRule, shard: Tensor, by_row: bool) -> Tensor:
        if not is_dtensor(param):
            return shard
        from torch.distributed.tensor import DTensor

        shape = row_shape(rule) if by_row else tuple(param.shape)
        placements = _row_placements(param, shape) if by_row else param.placements
        whole = torch.empty(shape, device="meta")
        gathered = DTensor.from_local(
            shard,
            param.device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        return gathered.full_tensor()

    def _shard(self, index: int, whole: Tensor, by_row: bool) -> Tensor:
        param, layout = self._params[index], self._layouts[index]
        if not is_dtensor(param):
            return whole
        coordinate = param.device_mesh.get_coordinate()
        if coordinate is None:
            raise AssertionError("this rank is not part of the parameter's mesh")
        if by_row:
            layout = _row_layout(layout, tuple(whole.shape))
        for dim, intervals in enumerate(local_region(layout, tuple(coordinate))):
            if intervals == ((0, whole.shape[dim]),):
                continue
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
            whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
        return whole
