"""torchtitan's attention with the largest logit of each head as a by-product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.distributed.compile import maybe_regional_inductor
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    FusedQKVLinear,
    GQAttention,
    QKVLinear,
    VarlenAttention,
)
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.protocols.module import Module

from titan_muon.integration.config_class import as_class
from titan_muon.optim.qk_clip import observe

__all__ = [
    "MaxLogitFlexAttention",
    "MaxLogits",
    "reporting",
    "with_max_logits",
    "without_max_logits",
]

_FLEX = "build the model with attn_backend = 'flex'"
_LINEARS = ("wq", "wk", "wkv", "wqkv", "wq_b", "wkv_b")


class MaxLogits(nn.Module):
    """What an attention module that can report its largest logits has beside its forward."""

    # (local heads,) float32 once something watches. A buffer, because torch's pipelining learns
    # its shapes from passes over uninitialised memory and restores the buffers afterwards.
    max_logits: Tensor | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("max_logits", None, persistent=False)

    def observed(self) -> Tensor | None:
        """Return what to observe into, None where this forward pass does not count."""
        return self.max_logits if self.training and torch.is_grad_enabled() else None


class MaxLogitFlexAttention(MaxLogits, FlexAttention):
    """torchtitan's FlexAttention; the kernel's row maxima come with the output it computes anyway.

    ``max_logits`` keeps its storage from step to step and is changed in place alone, so compiled
    blocks do not compile again and a CUDA graph may hold it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Same fields as FlexAttention's."""

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[..., Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend, and observe the largest logit of each head where this pass counts.

        Args and result are those of FlexAttention; the names are part of torchtitan's contract.
        """
        max_logits = self.observed()
        if max_logits is None:
            return super().forward(
                q_BLNH,
                k_BLNH,
                v_BLNH,
                attention_masks=attention_masks,
                score_mod=score_mod,
                scale=scale,
                enable_gqa=enable_gqa,
                out_transform=out_transform,
                **kwargs,
            )
        with maybe_regional_inductor(FlexAttention.inductor_configs):
            out, aux = FlexAttention.compiled_flex_attn(
                q_BLNH.transpose(1, 2),
                k_BLNH.transpose(1, 2),
                v_BLNH.transpose(1, 2),
                score_mod=score_mod,
                block_mask=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
                return_aux=AuxRequest(lse=out_transform is not None, max_scores=True),
                kernel_options=self.kernel_options,
            )
        with spmd.no_typecheck():
            observe(max_logits, aux.max_scores)
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, aux.lse.transpose(1, 2))


def with_max_logits(model_config: Module.Config, where: str) -> None:
    """Let the attention of a model report its largest logits, or refuse the model.

    Args:
        model_config: Before it is built. Modified in place; other attention than that of the
            decoder (a vision tower's) stays as it is.
        where: Start of an error, what asked for it.

    Raises:
        ValueError: A layer cannot be clipped; names it and the reason.
    """
    attentions: list[tuple[str, Any]] = [
        (fqn, node) for fqn, node, *_ in model_config.traverse(BaseAttention.Config)
    ]
    if not attentions:
        raise ValueError(f"{where}: the model has no attention that could be clipped")
    for fqn, node in attentions:
        reason = _unfit(node)
        if reason:
            raise ValueError(f"{where}: {fqn} {reason}")
        node.inner_attention = reporting(node.inner_attention)


def without_max_logits(attention: nn.Module) -> str | None:
    """Return why the attention inside an attention layer reports no largest logits, or None.

    Args:
        attention: A built layer. Not modified.
    """
    inner = attention.inner_attention
    if isinstance(inner, MaxLogits):
        return None
    if isinstance(inner, VarlenAttention):
        return f"uses VarlenAttention, which does not report its logits; {_FLEX}"
    return (
        f"uses {type(inner).__name__}, which does not report its logits here; with "
        "--override.imports, name titan_muon.integration.override.qk_clip_attention too"
    )


def reporting(config: FlexAttention.Config) -> FlexAttention.Config:
    """Return the config of the same attention that also reports its largest logits.

    Args:
        config: Not modified; a subclass of FlexAttention's comes back as it is.
    """
    return as_class(config, FlexAttention.Config, MaxLogitFlexAttention.Config)


def _unfit(node: Any) -> str | None:
    """Return why a layer cannot be clipped, as the end of a sentence about it."""
    kind = type(node)
    if getattr(node, "qk_norm", None) is not None or getattr(node, "k_norm", None) is not None:
        return (
            "normalizes queries and keys, which undoes any scale of their weights and bounds the "
            "logits already; leave qk_clip_threshold out"
        )
    qkv = getattr(node, "qkv_linear", node)
    for name in _LINEARS:
        linear = getattr(qkv, name, None)
        if linear is not None and hasattr(linear, "rank") and hasattr(linear, "alpha"):
            return f"has LoRA factors beside {name}; leave qk_clip_threshold out"
    if kind not in (GQAttention.Config, LatentAttention.Config, SinkAttention.Config):
        return f"is of an unknown kind, {_name(kind)}; leave qk_clip_threshold out"
    inner = node.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        return f"uses VarlenAttention, which does not report its logits; {_FLEX}"
    if not isinstance(inner, FlexAttention.Config):
        return f"uses {_name(type(inner))}, which does not report its logits; {_FLEX}"
    if inner.kernel_options.get("BACKEND") == "FLASH":
        return f"uses FlexAttention's FLASH backend, which does not report its logits; {_FLEX}"
    if qkv is not node and not isinstance(qkv, QKVLinear.Config | FusedQKVLinear.Config):
        return f"projects by {_name(type(qkv))}, whose rows are not known here"
    return None


def _name(config_class: type) -> str:
    return config_class.__qualname__.removesuffix(".Config")
