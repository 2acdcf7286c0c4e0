"""Torch definition of the operations on pieces: the oracle of the kernels and the CPU path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_muon.kernels.pieces import PieceTable, Row

__all__ = [
    "advance",
    "copy_to_flat",
    "copy_to_tensors",
    "emit",
    "measure",
    "merge",
    "statistics",
    "write",
]


# Whether directions are divided by their norm as they are emitted, in the dtype of the iteration.
# Here the orthogonalizer does it, so that the result does not depend on the layout by a single bit.
FUSES_NORM = False


def advance(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    table: PieceTable,
    *,
    momentum: float,
    nesterov: bool,
    sign: float,
    keep: Tensor | None = None,
) -> Tensor:
    """Advance the EMA of the gradients, ``m += (1 - momentum) * (g - m)``, and measure directions.

    Args:
        grads: Gradients, any float dtype. Not modified.
        momenta: EMAs of the same shapes; modified in place.
        table: Its tensor side covers every element once; its flat side is not used.
        momentum: EMA factor.
        nesterov: Whether the direction looks ahead by one step.
        sign: 1, or -1 to use the negative gradients.
        keep: 0-d; where it is 0 the EMAs stay as they are, and what is measured means nothing. None
            for 1.

    Returns:
        (pieces, 2): largest magnitude and sum of squares of the direction of each piece.
    """
    result = _no_statistics(table, momenta[table.tensors[0]])
    for row in table.rows:
        m, g = (_tensor_view(ts[row.tensor], row) for ts in (momenta, grads))
        wide = _signed(g, m, sign)
        advanced = torch.lerp(m.to(wide.dtype), wide, 1 - momentum).to(m.dtype)
        m.copy_(advanced if keep is None else torch.where(keep.to(m.device) > 0, advanced, m))
        _measure(result, row.piece, _direction(wide, m, momentum, nesterov))
    return result


def measure(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    table: PieceTable,
    *,
    momentum: float,
    nesterov: bool,
    sign: float,
) -> Tensor:
    """Measure directions as :func:`advance` does, of EMAs that are advanced already."""
    result = _no_statistics(table, momenta[table.tensors[0]])
    for row in table.rows:
        m, g = (_tensor_view(ts[row.tensor], row) for ts in (momenta, grads))
        _measure(result, row.piece, _direction(_signed(g, m, sign), m, momentum, nesterov))
    return result


def emit(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    flat: Tensor,
    table: PieceTable,
    factors: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    sign: float,
) -> None:
    """Write the direction of every segment to the flat buffer.

    Args:
        grads: As for :func:`advance`. Not modified.
        momenta: Advanced EMAs. Not modified.
        flat: Flat buffer of any float dtype; modified.
        table: Where.
        factors: (pieces,) multiplied into the direction; None for 1.
        momentum, nesterov, sign: As for :func:`advance`.
    """
    for row in table.rows:
        m, g = (_tensor_view(ts[row.tensor], row) for ts in (momenta, grads))
        value = _direction(_signed(g, m, sign), m, momentum, nesterov)
        if factors is not None:
            value = value * factors[row.piece].to(value.device, value.dtype)
        _flat_view(flat, row).copy_(value)


def statistics(tensors: Sequence[Tensor], table: PieceTable) -> Tensor:
    """Return (pieces, 2): largest magnitude and sum of squares of each piece on the tensor side."""
    result = _no_statistics(table, tensors[table.tensors[0]])
    for row in table.rows:
        view = _tensor_view(tensors[row.tensor], row)
        _measure(result, row.piece, view.to(result.dtype))
    return result


def copy_to_flat(
    tensors: Sequence[Tensor], flat: Tensor, table: PieceTable, factors: Tensor | None = None
) -> None:
    """Copy every segment from its tensor to the flat buffer, times its piece's factor, if given."""
    for row in table.rows:
        value = _tensor_view(tensors[row.tensor], row)
        if factors is not None:
            value = value * factors[row.piece].to(value.device)
        _flat_view(flat, row).copy_(value)


def copy_to_tensors(
    flat: Tensor,
    tensors: Sequence[Tensor],
    table: PieceTable,
    factors: Tensor | None = None,
    keep: Tensor | None = None,
) -> None:
    """Copy every segment from the flat buffer to its tensor.

    Args:
        flat: Source.
        tensors: Targets; modified.
        table: Where.
        factors: (pieces,) multiplied into the values; None for 1.
        keep: (pieces,): where it is 0 the target stays as it is; None for 1.
    """
    for row in table.rows:
        view, value = _tensor_view(tensors[row.tensor], row), _flat_view(flat, row)
        value = value.to(view.device)
        if factors is not None:
            value = value * factors[row.piece].to(view.device)
        if keep is not None:
            value = torch.where(keep[row.piece].to(view.device) > 0, value.to(view.dtype), view)
        view.copy_(value)


def merge(
    sources: Sequence[Tensor], targets: Sequence[Tensor], table: PieceTable, keep: Tensor
) -> None:
    """Copy every segment from one list of tensors to the same place in another, where kept.

    Args:
        sources: Not modified.
        targets: Of the same shapes and dtypes; modified.
        table: Its flat side is not used.
        keep: (pieces,): where it is 0 the target stays as it is.
    """
    for row in table.rows:
        old, new = (_tensor_view(ts[row.tensor], row) for ts in (targets, sources))
        old.copy_(torch.where(keep[row.piece].to(old.device) > 0, new, old))


def write(
    params: Sequence[Tensor],
    flat: Tensor,
    table: PieceTable,
    factors: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float,
    cautious: bool,
    keep: Tensor | None = None,
) -> None:
    """Decay the weights with the plain lr, then ``p -= lr * factor * u``.

    Args:
        params: Weights; modified.
        flat: Updates, any float dtype and device. Not modified.
        table: Where.
        factors: (pieces,), positive.
        lr: Number or 0-d tensor; a tensor is not read by the host.
        weight_decay: Decay factor.
        cautious: Decay only where ``u * p > 0``, tested on the weight before the step.
        keep: (pieces,): where it is 0 the weights stay as they are; None for 1.
    """
    for row in table.rows:
        param = _tensor_view(params[row.tensor], row)
        wide = torch.promote_types(param.dtype, torch.float32)
        value, update = param.to(wide), _flat_view(flat, row).to(wide)
        update = update.to(param.device) * factors[row.piece].to(param.device, wide)
        rate = lr.to(param.device, wide) if isinstance(lr, Tensor) else lr
        result = value - update * rate
        if weight_decay != 0:
            decay = value * (rate * weight_decay)
            result -= torch.where(update * value > 0, decay, 0.0) if cautious else decay
        if keep is not None:
            result = torch.where(keep[row.piece].to(param.device) > 0, result, value)
        param.copy_(result)


def _tensor_view(tensor: Tensor, row: Row) -> Tensor:
    start = tensor.storage_offset() + row.tensor_offset
    return tensor.as_strided((row.rows, row.columns), (row.tensor_stride, 1), start)


def _flat_view(flat: Tensor, row: Row) -> Tensor:
    start = flat.storage_offset() + row.flat_offset
    return flat.as_strided((row.rows, row.columns), (row.flat_stride, 1), start)


def _signed(grad: Tensor, momentum: Tensor, sign: float) -> Tensor:
    """Return the gradient in the dtype of the arithmetic, with its sign, on the EMA's device."""
    wide = grad.to(momentum.device, torch.promote_types(momentum.dtype, torch.float32))
    return wide if sign == 1.0 else wide * sign


def _direction(grad: Tensor, m: Tensor, momentum: float, nesterov: bool) -> Tensor:
    wide = m.to(grad.dtype)
    return torch.lerp(grad, wide, momentum) if nesterov else wide


def _no_statistics(table: PieceTable, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros((table.pieces, 2), dtype=dtype, device=like.device)


def _measure(result: Tensor, piece: int, value: Tensor) -> None:
    largest = torch.maximum(result[piece, 0], value.abs().amax())
    result[piece, 0] = largest
    result[piece, 1] += value.square().sum()
