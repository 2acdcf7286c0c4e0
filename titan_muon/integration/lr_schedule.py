"""torchtitan's LR schedulers, known to the optimizer container so that a resumed run follows them.

torchtitan's own leave the lr of the first resumed step to the checkpoint, where it was computed
from the schedule of the run that stopped.
"""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer

from titan_muon.integration.config_class import as_class
from titan_muon.integration.optimizers_container import MuonOptimizersContainer

__all__ = ["LRScheduleConfig", "followed_schedule"]


@dataclass(kw_only=True, slots=True)
class LRScheduleConfig(LRSchedulersContainer.Config):
    """Same fields as torchtitan's."""

    def build(self, *, optimizers: Any, training_steps: int) -> LRSchedulersContainer:
        """Build torchtitan's schedulers and tell the optimizer container."""
        schedulers = LRSchedulersContainer.Config.build(
            self, optimizers=optimizers, training_steps=training_steps
        )
        if isinstance(optimizers, MuonOptimizersContainer):
            optimizers.follow(schedulers)
        return schedulers


def followed_schedule(config: LRSchedulersContainer.Config) -> LRSchedulersContainer.Config:
    """Return torchtitan's schedule config as one that the optimizer container will follow.

    Args:
        config: Not modified; any other class than torchtitan's own comes back as it is.
    """
    return as_class(config, LRSchedulersContainer.Config, LRScheduleConfig)
