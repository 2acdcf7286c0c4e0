"""The optimizer: groups, state, and the one step."""

from titan_muon.optim.hybrid import HybridMuonAdamW
from titan_muon.optim.muon import Muon, NorMuon
from titan_muon.optim.param_groups import Rule, param_groups

__all__ = ["HybridMuonAdamW", "Muon", "NorMuon", "Rule", "param_groups"]
