"""torchtitan's ``@override`` door: another optimizer on an unmodified ``torchtitan.train`` command.

--override.imports 'titan_muon.integration.override.muon={"name": "NorMuon", "lr": 3e-4}'
"""

from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override
from torchtitan.models.common.attention import FlexAttention

from titan_muon.integration.checkpoint import with_crossing
from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.max_logits import reporting
from titan_muon.integration.metrics import OptimizerMetricsProcessor, with_optimizer_metrics
from titan_muon.integration.toml_optimizer import OptimizerRequest, build_optimizer
from titan_muon.integration.toml_place import ConfigError, Place

__all__ = ["checkpoint", "metrics", "muon", "qk_clip_attention"]


@override(target=OptimizersContainer.Config, description="Muon, NorMuon, AdamW or Adam by name")
def muon(
    config: OptimizersContainer.Config, *, name: str | None = None, **options: Any
) -> OptimizerConfig:
    """Return the config that replaces the model's own optimizer.

    Args:
        config: What the registry function chose; only its ``implementation`` is kept.
        name: Algorithm, in any letter case; Muon by default.
        **options: ``recipe`` and anything else that ``[optimizer]`` of a train config may hold.

    Raises:
        ConfigError: An unknown name or option, or a value that is not allowed.
    """
    place = Place("--override.imports titan_muon.integration.override.muon", "optimizer")
    return build_optimizer(OptimizerRequest(name), options, place, replaced=config)


@override(target=CheckpointManager.Config, description="Checkpoints of other algorithms load too")
def checkpoint(config: CheckpointManager.Config) -> CheckpointManager.Config:
    """Return the config of a checkpoint manager that loads what another algorithm wrote.

    Args:
        config: What the registry function and the flags chose; all of it is kept.
    """
    return with_crossing(config)


@override(target=MetricsProcessor.Config, description="Figures of the optimizer in the metrics")
def metrics(config: MetricsProcessor.Config, *, optimizer_freq: int) -> MetricsProcessor.Config:
    """Return the config that replaces torchtitan's metrics.

    Args:
        config: What the registry function and the flags chose; all of it is kept.
        optimizer_freq: As ``[metrics] optimizer_freq`` of a train config.

    Raises:
        ConfigError: No multiple of ``log_freq``, or the metrics are not torchtitan's own.
    """
    found = with_optimizer_metrics(config)
    if not isinstance(found, OptimizerMetricsProcessor.Config):
        raise ConfigError(
            "--override.imports titan_muon.integration.override.metrics: this run has metrics of "
            f"its own, {type(config).__qualname__}, which cannot take the optimizer's figures."
        )
    found.optimizer_freq = optimizer_freq
    found.check()
    return found


@override(target=FlexAttention.Config, description="FlexAttention that reports its largest logits")
def qk_clip_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    """Return attention that ``qk_clip_threshold`` can clip by; titan_muon.train needs no telling.

    Args:
        config: Any FlexAttention; what is one of this package already comes back as it is.
    """
    return reporting(config)
