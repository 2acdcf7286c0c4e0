"""Model parts that compute on a CPU what torchtitan's own compute only on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import (
    _attention as context_parallel,
)
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from titan_muon.integration.max_logits import MaxLogitFlexAttention, MaxLogits
from titan_muon.optim.qk_clip import observe

_CAUSAL_WINDOW = (-1, 0)
_DENSE_MASK = "_titan_muon_dense_mask"


class DenseMaskAttention(MaxLogits, FlexAttention):
    """``scaled_dot_product_attention`` under the dense form of a FlexAttention block mask.

    FlexAttention has no backward on a CPU. A subclass, so that torchtitan goes on building the
    same causal document masks for it. Where largest logits are asked for, the same function is
    computed step by step, since the kernel keeps its logits to itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Same fields as FlexAttention's; ``kernel_options`` mean nothing here."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., torch.Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend within the mask.

        Args:
            q_BLNH: (batch, length, heads, head dim); the names are part of torchtitan's contract.
            k_BLNH: (batch, key length, key heads, head dim).
            v_BLNH: (batch, key length, key heads, value head dim).
            attention_masks: Which key each query sees, padding and documents included.
            score_mod: Unsupported here.
            scale: Factor on the scores; None means 1 / sqrt(head dim).
            enable_gqa: Whether the key heads are shared by groups of query heads.
            out_transform: Unsupported here.
            **kwargs: Ignored, as FlexAttention does.

        Returns:
            (batch, length, heads, value head dim).

        Raises:
            TypeError: ``attention_masks`` is not a BlockMask.
            NotImplementedError: ``score_mod`` or ``out_transform`` is given.
        """
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(
                "attention on a CPU needs a BlockMask as attention_masks, got "
                f"{type(attention_masks).__name__}"
            )
        for name, value in (("score_mod", score_mod), ("out_transform", out_transform)):
            if value is not None:
                raise NotImplementedError(
                    f"attention with {name} does not run on a CPU; train this model on a GPU"
                )
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = _dense_mask(attention_masks)
        max_logits = self.observed()
        if max_logits is None:
            out_BNLH = F.scaled_dot_product_attention(
                q_BNLH, k_BNLH, v_BNLH, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
        else:
            scale = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
            out_BNLH = _observed_attention(q_BNLH, k_BNLH, v_BNLH, mask, scale, max_logits)
        return out_BNLH.transpose(1, 2)


class FullPrecisionExperts(GroupedExperts):
    """Grouped experts in the dtype of their weights, one matrix product per expert.

    torchtitan's own cast to bfloat16 for a grouped GPU product, which on a CPU is slower and
    would make the result depend on how the tokens are spread over ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Same fields as GroupedExperts'."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens.

        Args:
            x_RD: (tokens, dim), sorted by local expert.
            num_tokens_per_expert_E: (local experts,) token counts that add up to ``tokens``.

        Returns:
            (tokens, dim).
        """
        gate, down, up = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        tokens = x_RD.to(gate.dtype).split(num_tokens_per_expert_E.tolist())
        outputs = [
            F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)
            for x, w_gate, w_down, w_up in zip(tokens, gate, down, up, strict=True)
        ]
        return torch.cat(outputs).type_as(x_RD)


def replace_modules(model_config: Module.Config) -> list[str]:
    """Replace the nodes of a model config that cannot run on a CPU.

    Args:
        model_config: Modified in place; the fields of replaced nodes (sharding, local map,
            initialisers) carry over. Quantised and other subclasses stay as they are.

    Returns:
        One phrase per kind of node replaced.

    Raises:
        ValueError: A node has no counterpart here; names the node and what to do.
    """
    # Both are compiled otherwise, for which a CPU needs a C++ compiler.
    attention._compiled_create_block_mask = cast(Any, _all_blocks_mask)
    context_parallel._compiled_create_block_mask = cast(Any, _all_blocks_mask)
    replaced: dict[str, None] = {}
    for fqn, node, parent, key in list(model_config.traverse(Module.Config, recurse=True)):
        _refuse_window(fqn, node)
        for source, target in _REPLACEMENTS.items():
            if type(node) is source:
                _put(parent, key, _carry_over(node, target))
                name, substitute = (
                    part.__qualname__.removesuffix(".Config") for part in (source, target)
                )
                replaced[f"{name} by {substitute}"] = None
    return list(replaced)


_REPLACEMENTS: dict[type[Module.Config], type[Module.Config]] = {
    FlexAttention.Config: DenseMaskAttention.Config,
    MaxLogitFlexAttention.Config: DenseMaskAttention.Config,
    VarlenAttention.Config: DenseMaskAttention.Config,
    GroupedExperts.Config: FullPrecisionExperts.Config,
}


def _refuse_window(fqn: str, node: object) -> None:
    if isinstance(node, VarlenAttention.Config) and node.window_size != _CAUSAL_WINDOW:
        raise ValueError(
            f"{fqn}: window_size = {node.window_size} does not run on a CPU; only "
            f"{_CAUSAL_WINDOW} (causal, no window) does. Train this model on a GPU."
        )


def _observed_attention(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    max_logits: torch.Tensor,
) -> torch.Tensor:
    """Attend by separate products and fold the largest logit of each head into ``max_logits``."""
    shared = q_BNLH.shape[1] // k_BNLH.shape[1]
    if shared > 1:
        k_BNLH, v_BNLH = (x.repeat_interleave(shared, dim=1) for x in (k_BNLH, v_BNLH))
    logits = (scale * q_BNLH @ k_BNLH.mT).masked_fill(~mask, -torch.inf)
    observe(max_logits, logits)
    # A query that sees no key gets 0, as from the kernel.
    return logits.softmax(-1).masked_fill(~mask, 0.0) @ v_BNLH


def _dense_mask(mask: BlockMask) -> torch.Tensor:
    """Return the (B, heads or 1, queries, keys) boolean mask; all layers share one evaluation."""
    dense = getattr(mask, _DENSE_MASK, None)
    if dense is None:
        batch, heads = mask.shape[:2]
        queries, keys = mask.seq_lengths
        dense = create_mask(mask.mask_mod, batch, heads, queries, keys, device="cpu")
        setattr(mask, _DENSE_MASK, dense)
    return dense


def _all_blocks_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    **kwargs: Any,
) -> BlockMask:
    """Build a BlockMask that visits every block, since only its ``mask_mod`` will be used."""
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    rows, columns = (
        -(-length // size) for length, size in zip((Q_LEN, KV_LEN), block, strict=True)
    )
    counts = torch.full((B or 1, H or 1, rows), columns, dtype=torch.int32, device=device)
    indices = torch.arange(columns, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        counts,
        indices.expand(*counts.shape, columns).contiguous(),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
    )


def _carry_over(node: Any, target: type[Module.Config]) -> Module.Config:
    known = {field.name for field in fields(target)}
    values = {f.name: getattr(node, f.name) for f in fields(node) if f.name in known}
    return target(**values)


def _put(parent: Any, key: str | int | None, node: Module.Config) -> None:
    if isinstance(key, str):
        setattr(parent, key, node)
    else:
        parent[key] = node
