"""torchtitan's ``@override`` door: another optimizer on an unmodified ``torchtitan.train`` command.

--override.imports 'titan_muon.integration.override.muon={"name": "NorMuon", "lr": 3e-4}'
"""

from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override

from titan_muon.integration.config import OptimizerConfig
from titan_muon.integration.toml_optimizer import OptimizerRequest, build_optimizer
from titan_muon.integration.toml_place import Place

__all__ = ["muon"]


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
