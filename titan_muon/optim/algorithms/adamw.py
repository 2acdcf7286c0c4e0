"""AdamW and Adam, by torch's own kernels."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from titan_muon.optim.algorithms.base import ElementwiseAlgorithm
from titan_muon.optim.options import ADAM_OPTIONS, resolve_state_dtype

__all__ = ["AdamAlgorithm", "AdamWAlgorithm"]

# Elements stepped at once where dtypes differ and float32 copies are needed: 64 MiB a tensor.
_CHUNK = 1 << 24


class AdamAlgorithm(ElementwiseAlgorithm):
    """Adam with L2 regularisation (coupled decay), ``torch.optim.Adam``'s arithmetic."""

    name = "adam"
    title = "Adam"
    options = ADAM_OPTIONS
    decoupled: ClassVar[bool] = False

    def create_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return torch's keys: ``step`` (0-d float32), ``exp_avg``, ``exp_avg_sq``."""
        dtype = resolve_state_dtype(group["state_dtype"], param.dtype)
        return {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
        }

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Run torch's kernel on the shards; on float32 copies where its kernels refuse the mix."""
        same, mixed = _by_dtypes(params, grads, states)
        for i in mixed:
            self._step_mixed(params[i], grads[i], states[i], group)
        if same:
            self._step_same(same, params, grads, states, group)

    def step_if(
        self,
        take: Tensor,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Let torch's fused kernel read the flag, where it is the one that runs."""
        same, others = _by_dtypes(params, grads, states)
        if same and _use_fused(params[same[0]], group):
            self._step_same(same, params, grads, states, group, found_inf=1.0 - take)
        else:
            others = sorted([*same, *others])
        if others:
            super().step_if(
                take,
                [params[i] for i in others],
                [grads[i] for i in others],
                [states[i] for i in others],
                group,
            )

    def _step_same(
        self,
        same: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
        found_inf: Tensor | None = None,
    ) -> None:
        self._kernel(
            [params[i] for i in same],
            [grads[i] for i in same],
            [states[i]["exp_avg"] for i in same],
            [states[i]["exp_avg_sq"] for i in same],
            [states[i]["step"] for i in same],
            group,
            found_inf,
        )

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        group: Mapping[str, Any],
        found_inf: Tensor | None = None,
    ) -> None:
        fused = _use_fused(params[0], group)
        beta1, beta2 = group["betas"]
        adam(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            foreach=group["foreach"] if not fused else False,
            # Steps live beside the parameters; capturable keeps the host from reading them.
            capturable=not fused and steps[0].is_cuda,
            fused=fused,
            found_inf=found_inf,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _step_mixed(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        work = torch.float64 if param.dtype == torch.float64 else torch.float32
        live = [
            t.view(-1) if t.is_contiguous() else t.reshape(-1)
            for t in (param, state["exp_avg"], state["exp_avg_sq"])
        ]
        step_before = state["step"].clone()
        flat_grad = grad.reshape(-1)
        for start in range(0, max(param.numel(), 1), _CHUNK):
            stop = start + _CHUNK
            copies = [t[start:stop].to(work, copy=True) for t in live]
            state["step"].copy_(step_before)
            self._kernel(
                copies[:1],
                [flat_grad[start:stop].to(work)],
                copies[1:2],
                copies[2:],
                [state["step"]],
                group,
            )
            for target, copy in zip(live, copies, strict=True):
                target[start:stop].copy_(copy)
        for target, flat in zip((param, state["exp_avg"], state["exp_avg_sq"]), live, strict=True):
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))


class AdamWAlgorithm(AdamAlgorithm):
    """Adam with decoupled decay, ``torch.optim.AdamW``'s arithmetic."""

    name = "adamw"
    title = "AdamW"
    decoupled = True


def _by_dtypes(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
) -> tuple[list[int], list[int]]:
    """Return which tensors torch's kernels take as they are, and which they refuse."""
    same: list[int] = []
    mixed: list[int] = []
    for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
        matches = param.dtype == grad.dtype == state["exp_avg"].dtype
        (same if matches else mixed).append(i)
    return same, mixed


def _use_fused(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Follow the group; where it is silent, torch's fused kernel on CUDA."""
    if group["fused"] is None:
        return param.device.type == "cuda" and not group["foreach"]
    return bool(group["fused"])
