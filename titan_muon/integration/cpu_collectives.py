"""The one collective of torchtitan's MoE token exchange that gloo does not carry."""

import types
from typing import Any

import spmd_types._dist
import torch
import torch.distributed as dist


def install_all_to_all() -> None:
    """Give ``spmd_types`` a ``torch.distributed`` whose list ``all_to_all`` takes uneven sizes."""
    module = types.ModuleType("titan_muon_gloo_distributed", "torch.distributed for gloo.")
    vars(module).update(all_to_all=all_to_all, __getattr__=lambda name: getattr(dist, name))
    spmd_types._dist.set_dist(module)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """``torch.distributed.all_to_all`` by one ``all_to_all_single``: gloo wants equal chunks.

    Args:
        output_tensor_list: One tensor per rank of ``group``; overwritten.
        input_tensor_list: One tensor per rank of ``group``; sizes may differ and may be 0.
        group: Process group; None means the default one.
        async_op: Must be False.

    Raises:
        NotImplementedError: ``async_op`` is True.

    Collective:
        Every rank of ``group``.
    """
    if async_op:
        raise NotImplementedError("all_to_all with async_op=True is not provided for gloo")
    received_sizes = [tensor.numel() for tensor in output_tensor_list]
    sent = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
    received = sent.new_empty(sum(received_sizes))
    sent_sizes = [tensor.numel() for tensor in input_tensor_list]
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    for target, part in zip(output_tensor_list, received.split(received_sizes), strict=True):
        target.copy_(part.view_as(target))
