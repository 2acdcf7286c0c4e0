"""Pipeline stages of which some have no matrix, or none that a pattern means: one verdict."""

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from torchtitan.components.optimizer import ParamGroupConfig  # noqa: E402

from tests.distributed.test_exactness import ThreadRanks  # noqa: E402
from titan_muon.integration.optimizers_container import MuonOptimizersContainer  # noqa: E402


def _stage(rank: int) -> nn.Module:
    """Embedding and layers, layers, layers, and a last stage of norm and head."""
    stage = nn.Module()
    if rank == 0:
        stage.tok_embeddings = nn.Embedding(9, 4)
    if rank < 3:
        layer = nn.ModuleDict({"wq": nn.Linear(4, 6, bias=False), "norm": nn.RMSNorm(4)})
        stage.layers = nn.ModuleDict({str(rank): layer})
    else:
        stage.norm, stage.lm_head = nn.RMSNorm(4), nn.Linear(4, 9, bias=False)
    return stage


def _container(rank: int, *patterns: str, name: str = "Muon") -> MuonOptimizersContainer:
    groups = [
        ParamGroupConfig(pattern=p, optimizer_name="AdamW", optimizer_kwargs={}) for p in patterns
    ]
    config = MuonOptimizersContainer.Config(name=name, lr=0.1, param_groups=groups)
    return MuonOptimizersContainer(config, model_parts=[_stage(rank)])


class TestStages(ThreadRanks):
    def test_stage_without_a_matrix_builds_steps_and_saves(self):
        container = _container(self.rank)
        (optimizer,) = container.optimizers
        names = {g["algorithm"] for g in optimizer.param_groups}
        assert names == ({"adamw"} if self.rank == 3 else {"adamw", "muon"})
        params = [p for g in optimizer.param_groups for p in g["params"]]
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
        container.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))
        container.load_state_dict(container.state_dict())

    def test_pattern_of_another_stage_is_no_mistake(self):
        for pattern in (r"layers\.1\.", "lm_head", "tok_embeddings"):
            _container(self.rank, pattern)

    def test_pattern_that_is_dead_everywhere_is_refused_by_every_rank(self):
        with pytest.raises(ValueError, match=r"pattern .* decides on no trainable"):
            _container(self.rank, r"layers\.9")
        # Nobody hangs afterwards.
        _container(self.rank)

    def test_a_model_without_any_matrix_is_refused_by_every_rank(self):
        with pytest.raises(ValueError, match="no parameter of the model goes to the Muon family"):
            _container(self.rank, "layers")
        _container(self.rank, "layers", name="AdamW")
