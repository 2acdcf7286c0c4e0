"""What a parameter is: by module type first, by name second, by shape last."""

import math
import re
from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

__all__ = ["Owner", "default_route"]

Owner = tuple[nn.Module, str]

# Modules that hold a whole model: an output head right inside them is the model's own. "output"
# elsewhere (attention.output, layers.0.mlp.output) is a hidden matrix.
_SHELLS = ("base_model", "model", "module", "transformer", "decoder", "language_model", "net")
_HEADS_ANYWHERE = (
    "lm_head",
    "shared_head",
    "embed_out",
    "unembed",
    "unembedding",
    "to_logits",
    "output_projection",
)
_HEAD_PARTS_ON_TOP = ("head", "heads")
_HEADS_ON_TOP = (
    *("output", "out", "classifier", "score", "logits", "proj_out", "fc"),
    *("qa_outputs", "decoder"),
)
_EMBEDDING_MODULES = (
    "embed",
    "embedding",
    "embeddings",
    "tok_embeddings",
    "embed_tokens",
    "wte",
    "wpe",
)
_EMBEDDING_PARTS = {"embed", "embedding", "embeddings", "emb", "token", "tokens", "wte", "wpe"}
_NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _BatchNorm)
_NORM_NAME = re.compile(r"Norm(\dd)?$")


def default_route(param: Tensor, owners: Sequence[Owner]) -> tuple[str | None, dict[str, Any]]:
    """Return why a parameter is no hidden matrix (None if it is one), and options it needs.

    Args:
        param: Any parameter. Not read.
        owners: Every module that holds it, with the parameter's full name there.
    """
    flatten = any(isinstance(module, _ConvNd) for module, _ in owners)
    reasons = (
        *(_by_module(module) for module, _ in owners),
        *(_by_name(full, is_convolution=flatten) for _, full in owners),
        _by_shape(param, flatten),
    )
    return next((r for r in reasons if r), None), {"flatten": True} if flatten else {}


def _by_module(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, _NORM_TYPES) or _NORM_NAME.search(type(module).__name__):
        return "norm"
    if isinstance(module, _ConvNd) and module.groups > 1 and module.groups == module.in_channels:
        return "depthwise convolution"
    return None


def _by_name(name: str, *, is_convolution: bool) -> str | None:
    segments = name.lower().split(".")
    *modules, leaf = segments
    leaf_parts = set(leaf.split("_"))
    if any(part in ("bias", "biases") for s in segments for part in s.split("_")):
        return "bias"
    if _is_head(modules, leaf):
        return "output head"
    owner = modules[-1] if modules else ""
    if not is_convolution and (owner in _EMBEDDING_MODULES or leaf_parts & _EMBEDDING_PARTS):
        return "embedding"
    if any(segment.startswith("lora_") for segment in segments):
        return "LoRA factor"
    return "state-space decay" if leaf == "a_log" else None


def _is_head(modules: Sequence[str], leaf: str) -> bool:
    if leaf in _HEADS_ANYWHERE or any(m in _HEADS_ANYWHERE for m in modules):
        return True
    inner = list(dropwhile(lambda m: m in _SHELLS, modules))
    if not inner:
        # A shell holds no weight; what is called so and has one is a layer.
        owner = modules[-1] if modules and leaf == "weight" else leaf
        return owner in (*_HEADS_ON_TOP, *_HEAD_PARTS_ON_TOP)
    if inner[0] in _HEAD_PARTS_ON_TOP or inner[0].endswith("_head"):
        return True
    return len(inner) == 1 and inner[0] in _HEADS_ON_TOP


def _by_shape(param: Tensor, flatten: bool) -> str | None:
    if param.ndim < 2:
        return f"{param.ndim}-D"
    columns = math.prod(param.shape[1:]) if flatten else param.shape[-1]
    rows = param.shape[0] if flatten else param.shape[-2]
    if param.numel() == 0:
        return "empty"
    return "one row or column" if min(rows, columns) == 1 else None
