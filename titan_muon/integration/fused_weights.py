"""Fused weights of torchtitan's models: which rows are matrices of their own."""

import sys
from typing import Any

from torch import nn
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_muon.optim.param_groups import canonical_name

__all__ = ["fused_splits"]


def fused_splits(model: nn.Module) -> dict[str, Any]:
    """Return the ``split`` option of every fused weight, by canonical parameter name.

    Args:
        model: A torchtitan model, sharded or not. Not modified.
    """
    splits: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FusedQKVLinear):
            rows = module.wqkv.weight.shape[0]
            splits[canonical_name(f"{prefix}.wqkv.weight")] = {
                "kind": "interleaved_qkv",
                "n_kv_heads": rows // ((module.heads_per_kv + 2) * module.head_dim),
                "heads_per_kv": module.heads_per_kv,
                "head_dim": module.head_dim,
            }
        elif isinstance(module, GptOssGroupedExperts):
            # Gate and up rows alternate: swiglu reads x[..., ::2] and x[..., 1::2].
            splits[canonical_name(f"{prefix}.mlp1_weight_EGD")] = {"kind": "strided", "count": 2}
        elif isinstance(module, _gated_types()):
            # (..., hidden, 2, dim): gate and up are a dim of their own.
            splits[canonical_name(f"{prefix}.w13")] = {"kind": "fused_dim"}
    return splits


def _gated_types() -> tuple[type, ...]:
    """Return the modules of torchtitan's fused_swiglu override, which needs Triton, if imported."""
    override = sys.modules.get("torchtitan.overrides.fused_swiglu")
    return (override.FusedSwiGLU, override.FusedGroupedExperts) if override else ()
