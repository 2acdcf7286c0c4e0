"""Local shards of DTensors, and buffers placed like a parameter."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from titan_muon.distributed.layout import is_dtensor, layout_of, local_region, region_shape

__all__ = [
    "compute_device",
    "local_gradient",
    "local_of",
    "local_slice",
    "mesh_of",
    "own_coordinate",
    "with_local",
    "zeros_by_row",
]


_PLAIN = frozenset((Tensor, Parameter))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the plain tensor itself; shares its storage.

    Of a tensor that wraps the one with its values, as torchao's float8 and MXFP8 training weights
    do, it is that one: kernels work on addresses.
    """
    # Every step asks it of every tensor, and most are plain.
    if type(tensor) in _PLAIN:
        return tensor
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local if type(local) in _PLAIN else _unwrapped(local)


def _unwrapped(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    # Each question to such a class takes microseconds of the host.
    shape, dtype = tensor.shape, tensor.dtype
    for name in names:
        inner = getattr(tensor, name)
        if inner.dtype == dtype and inner.shape == shape:
            return inner
    return tensor


def local_gradient(param: Tensor, name: str) -> Tensor | None:
    """Return the local shard of a parameter's gradient, None where it has none.

    Args:
        param: Plain tensor or DTensor. Not read.
        name: Used in errors.

    Raises:
        NotImplementedError: The gradient is placed otherwise than the parameter.
        ValueError: The gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return None
    if grad.is_sparse:
        raise ValueError(
            f"{name}: sparse gradients are not supported; build the embedding with sparse=False"
        )
    if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
        raise NotImplementedError(
            f"{name}: the gradient has placements {grad.placements}, the parameter "
            f"{param.placements}; reduce or redistribute the gradient before step()"
        )
    return local_of(grad)


def compute_device(tensor: Tensor) -> torch.device:
    """Return where a parameter's matrices are computed: on its mesh's device, even if offloaded."""
    if is_dtensor(tensor) and tensor.device_mesh.device_type != tensor.device.type:
        if tensor.device_mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(tensor.device_mesh.device_type)
    return local_of(tensor).device


def mesh_of(tensor: Tensor) -> Any:
    """Return the device mesh of a DTensor."""
    if not is_dtensor(tensor):
        raise AssertionError("a plain tensor has no mesh")
    return tensor.device_mesh


def own_coordinate(tensor: Tensor) -> tuple[int, ...]:
    """Return this rank's place in the mesh of a DTensor; empty for a plain tensor."""
    if not is_dtensor(tensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("this rank is not part of the tensor's mesh")
    return tuple(coordinate)


def local_slice(like: Tensor, whole: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of a DTensor.

    Args:
        like: The DTensor. Not read.
        whole: Plain tensor of its global shape. Not modified.
    """
    if not is_dtensor(like):
        return whole
    for dim, intervals in enumerate(local_region(layout_of(like), own_coordinate(like))):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
        whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole.contiguous()


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor of the same shape, mesh and placements with another local shard."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def zeros_by_row(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zero buffer with one value a row of the parameter, placed like the parameter.

    Args:
        param: Plain tensor or DTensor. Not read.
        shape: Global shape of the buffer, last dim 1.
        dtype: Dtype of the buffer.

    Returns:
        Plain tensor or DTensor; Replicate on the mesh axes that cut the parameter's columns.
    """
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    layout = layout_of(param).by_row(shape)
    placements = [
        Replicate() if cut.dim is None else placement
        for cut, placement in zip(layout.cuts, param.placements, strict=True)
    ]
    local_shape = region_shape(local_region(layout, own_coordinate(param)))
    local = torch.zeros(local_shape, dtype=dtype, device=param.to_local().device)
    like = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
