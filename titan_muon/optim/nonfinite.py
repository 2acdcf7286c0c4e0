"""What a non-finite gradient does to a step: it propagates, skips the step, or is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.distributed.groups import group_of
from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.tensors import compute_device, local_gradient, mesh_of
from titan_muon.optim.groups import full_names

__all__ = ["Guard", "check_alike"]

# Names in one message; the rest is a number.
_MOST_NAMES = 10


def check_alike(groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse groups that say different things of a step that all of them share.

    Raises:
        ValueError: Names two groups and their values.
    """
    said = [(index, g["nonfinite"]) for index, g in enumerate(groups) if "nonfinite" in g]
    for index, value in said[1:]:
        if value != said[0][1]:
            raise ValueError(
                f"{where}: nonfinite = {value!r} in param group {index} and {said[0][1]!r} in "
                f"group {said[0][0]}; a step is taken or skipped as a whole, so say the same in "
                "every group, or once, to the constructor."
            )


class Guard:
    """Looks at all gradients before a step writes anything, as the option ``nonfinite`` says.

    Attributes:
        taken: What :meth:`look` returned last.
    """

    def __init__(self) -> None:
        self._skipped: Tensor | None = None
        self.taken: Tensor | None = None
        self._chosen: list[Any] = []
        self._default: list[Any] = []

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far; the host waits for the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def agree_over(self, group: dist.ProcessGroup | None) -> None:
        """Let these ranks decide together; by default those that hold shards of a parameter."""
        self._chosen = [group]

    def forget_ranks(self) -> None:
        """Find the ranks again that hold shards, after parameters came."""
        self._default = []

    def look(self, groups: Sequence[dict[str, Any]], where: str) -> Tensor | None:
        """Check the gradients.

        Args:
            groups: All param groups. Not modified.
            where: Start of errors.

        Returns:
            None for a step that is taken; with ``skip`` a 0-d float32 tensor on the device, 1 for a
            step that is taken and 0 for one that must not change anything. The host does not wait.

        Raises:
            FloatingPointError: With ``error``, on all ranks alike; names the parameters.
            RuntimeError: ``error`` while a CUDA graph is captured, or the first look of ``skip``
                there.

        Collective: all ranks that decide together, except with ``propagate``.
        """
        self.taken = None
        mode = next((m for g in groups if (m := g.get("nonfinite")) != "propagate" and m), None)
        if mode is None:
            return None
        params = [param for group in groups for param in group["params"]]
        names = [n for number, group in enumerate(groups) for n in full_names(number, group)]
        if not params and not self._chosen:
            return None
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if mode == "error" and capturing:
            raise RuntimeError(
                f"{where}: nonfinite = 'error' lets the host wait for the device, which a CUDA "
                "graph cannot capture; use nonfinite = 'skip'."
            )
        largest = _largest(params, names)
        device = compute_device(params[0])
        bad = [~values.isfinite() for values, _ in largest]
        found = torch.stack([b.any().to(device) for b in bad]).any() if bad else torch.zeros(())
        found = found.to(device, torch.float32)
        (group,) = self._chosen or self._default or self._find_ranks(params, where)
        if group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        if mode == "error":
            if found.item():
                guilty = [(name, v) for values, n in largest for name, v in _of(values, n)]
                raise FloatingPointError(_message(where, guilty, names, group))
            return None
        self._count(found, where, capturing)
        self.taken = 1.0 - found
        return self.taken

    def _count(self, found: Tensor, where: str, capturing: bool) -> None:
        if self._skipped is None:
            if capturing:
                raise RuntimeError(
                    f"{where}: take one step with nonfinite = 'skip' before a CUDA graph captures "
                    "the next."
                )
            self._skipped = torch.zeros((), dtype=torch.int64, device=found.device)
        self._skipped += found.long()

    def _find_ranks(self, params: Sequence[Tensor], where: str) -> list[Any]:
        """Return the process group of all ranks that hold shards, None for a rank alone."""
        meshes = [mesh_of(p) for p in params if is_dtensor(p)]
        sets = {tuple(sorted(layout_of(p).ranks)) for p in params if is_dtensor(p)}
        together = tuple(sorted({rank for ranks in sets for rank in ranks}))
        if together and together not in sets:
            raise NotImplementedError(
                f"{where}: parameters lie on the ranks {sorted(sets)}, and nonfinite needs ranks "
                "that decide together; name their process group with agree_over()."
            )
        whole = [m for m in meshes if m.size() == len(together)]
        self._default = [group_of(together, whole) if len(together) > 1 else None]
        return self._default


def _largest(params: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Tensor, list[str]]]:
    """Return the largest magnitudes of the local gradients, by device and dtype, and the names."""
    buckets: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[str]]] = {}
    for param, name in zip(params, names, strict=True):
        grad = local_gradient(param, name)
        if grad is not None and grad.numel():
            grads, of_grads = buckets.setdefault((grad.device, grad.dtype), ([], []))
            grads.append(grad)
            of_grads.append(name)
    # The largest magnitude is finite wherever every element is, unlike a sum or a norm of them.
    return [
        (torch.stack(list(torch._foreach_norm(grads, float("inf")))), of_grads)
        for grads, of_grads in buckets.values()
    ]


def _of(values: Tensor, names: Sequence[str]) -> list[tuple[str, str]]:
    found = zip(names, values.tolist(), strict=True)
    return [(name, f"{v}") for name, v in found if v != v or v == float("inf")]


def _message(where: str, guilty: list[tuple[str, str]], names: list[str], group: Any) -> str:
    """Say which gradients are not finite on any rank. Collective: all ranks of the group."""
    everywhere, count = dict(guilty), len(names)
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (everywhere, names), group=group)
        everywhere = {name: kind for found, _ in gathered for name, kind in found.items()}
        count = len({name for _, others in gathered for name in others})
    listed = [f"{name} ({kind})" for name, kind in list(everywhere.items())[:_MOST_NAMES]]
    more = f" and {len(everywhere) - len(listed)} more" if len(everywhere) > len(listed) else ""
    text = (
        f"{where}: the gradients of {len(everywhere)} of {count} parameters are not finite: "
        f"{', '.join(listed)}{more}. The step was not taken; weights and state are as before."
    )
    if len(everywhere) == count > 1 and set(everywhere.values()) == {"nan"}:
        return (
            f"{text} All of them are NaN: clipping by the total norm spreads one NaN to every "
            "gradient, so where it began cannot be seen any more."
        )
    if "nan" in everywhere.values():
        return f"{text} Clipping by the total norm turns an inf into NaN and the rest into zeros."
    return text
