"""AdamW and Adam, by torch's own kernels."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from titan_muon.optim.algorithms.base import ElementwiseAlgorithm
from titan_muon.optim.options import ADAM_OPTIONS
from titan_muon.optim.state_tensors import new_state

__all__ = ["AdamAlgorithm", "AdamWAlgorithm"]


class AdamAlgorithm(ElementwiseAlgorithm):
    """Adam with L2 regularisation (coupled decay), ``torch.optim.Adam``'s arithmetic."""

    name = "adam"
    title = "Adam"
    options = ADAM_OPTIONS
    decoupled: ClassVar[bool] = False

    def create_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return torch's keys: ``step`` (0-d float32), ``exp_avg``, ``exp_avg_sq``."""
        state_dtype = group["state_dtype"]
        return {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            # Torch's fused kernel wants the weight's strides.
            "exp_avg": new_state(param, state_dtype, dense=False),
            "exp_avg_sq": new_state(param, state_dtype, signed=False, dense=False),
        }

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Run torch's kernel on the shards."""
        self._kernel(params, grads, states, group, None)

    def step_if(
        self,
        take: Tensor,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Let torch's fused kernel read the flag, where it is the one that runs."""
        if _use_fused(params[0], group):
            self._kernel(params, grads, states, group, 1.0 - take)
        else:
            super().step_if(take, params, grads, states, group)

    def _kernel(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        fused = _use_fused(params[0], group)
        beta1, beta2 = group["betas"]
        steps = [state["step"] for state in states]
        adam(
            list(params),
            list(grads),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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


class AdamWAlgorithm(AdamAlgorithm):
    """Adam with decoupled decay, ``torch.optim.AdamW``'s arithmetic."""

    name = "adamw"
    title = "AdamW"
    decoupled = True


def _use_fused(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Follow the group; where it is silent, torch's fused kernel on CUDA."""
    if group["fused"] is None:
        # On a CPU it rounds the last few elements of a tensor in another way, so that its bits
        # would depend on the layout.
        return param.device.type == "cuda" and not group["foreach"]
    return bool(group["fused"])
