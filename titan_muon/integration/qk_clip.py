"""MuonClip for torchtitan's models: which rows of which weights belong to which head."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchtitan.models.common.attention import BaseAttention, FusedQKVLinear
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention

from titan_muon.distributed.layout import is_dtensor
from titan_muon.integration.max_logits import without_max_logits
from titan_muon.optim.param_groups import canonical_name
from titan_muon.optim.qk_clip import HeadRows, QKClip, head_rows, interleaved_rows

__all__ = ["attach_qk_clip"]

# torchtitan's own name of the axis that divides the heads.
_TENSOR_PARALLEL = "tp"


def attach_qk_clip(model_parts: Sequence[nn.Module], threshold: float) -> QKClip:
    """Let every attention layer of this rank report its largest logits, and return their clip.

    Args:
        model_parts: Pipeline stages of this rank, or the one model, with storage; built from a
            config that went through ``with_max_logits``. The attention gets a tensor to report in.
        threshold: Largest logit that is left alone.

    Raises:
        ValueError: An attention layer does not report its logits; names it.
    """
    clip = QKClip(threshold)
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, BaseAttention):
                name = canonical_name(name)
                reason = without_max_logits(module)
                if reason:
                    raise ValueError(f"optimizer.qk_clip_threshold = {threshold}: {name} {reason}")
                _attach(clip, module, name)
    return clip


def _attach(clip: QKClip, attention: Any, name: str) -> None:
    linears = _latent(attention) if isinstance(attention, LatentAttention) else _grouped(attention)
    weights = [
        (tensor, rows)
        for linear, rows in linears
        for tensor in (linear.weight, linear.bias)
        if tensor is not None
    ]
    heads = _local_heads(attention.n_heads, weights[0][0])
    attention.inner_attention.max_logits = clip.add_layer(
        attention.n_heads, weights, heads=heads, name=name
    )


def _grouped(attention: Any) -> list[tuple[nn.Linear, list[HeadRows]]]:
    """Return the linear layers of (grouped) multi-head attention with their rows."""
    n_heads, n_kv_heads, head_dim = attention.n_heads, attention.n_kv_heads, attention.head_dim
    qkv = attention.qkv_linear
    if isinstance(qkv, FusedQKVLinear):
        return [(qkv.wqkv, interleaved_rows(n_kv_heads, n_heads // n_kv_heads, head_dim))]
    if n_heads > n_kv_heads:
        return [(qkv.wq, head_rows(n_heads, (head_dim, 1.0)))]
    rows = head_rows(n_heads, (head_dim, 0.5))
    return [(qkv.wq, rows), (qkv.wk, rows)]


def _latent(attention: LatentAttention) -> list[tuple[nn.Linear, list[HeadRows]]]:
    """Return the linear layers of latent attention with their rows.

    The rotary key, rows of wkv_a, is shared by all heads and stays as it is.
    """
    plain, rotary = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    query = attention.wq if attention.q_lora_rank == 0 else attention.wq_b
    return [
        (query, head_rows(attention.n_heads, (plain, 0.5), (rotary, 1.0))),
        (attention.wkv_b, head_rows(attention.n_heads, (plain, 0.5), (attention.v_head_dim, 0.0))),
    ]


def _local_heads(n_heads: int, weight: Tensor) -> range:
    """Return the heads that this rank's attention computes."""
    mesh = weight.device_mesh if is_dtensor(weight) else None
    if mesh is None or _TENSOR_PARALLEL not in (mesh.mesh_dim_names or ()):
        return range(n_heads)
    count = n_heads // mesh[_TENSOR_PARALLEL].size()
    first = mesh.get_local_rank(_TENSOR_PARALLEL) * count
    return range(first, first + count)
