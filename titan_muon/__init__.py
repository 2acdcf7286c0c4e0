"""Muon, NorMuon and AdamW for PyTorch and torchtitan."""

from titan_muon.functional import orthogonalize
from titan_muon.optim import HybridMuonAdamW, Muon, NorMuon, Rule, param_groups

__all__ = ["HybridMuonAdamW", "Muon", "NorMuon", "Rule", "orthogonalize", "param_groups"]
__version__ = "0.1.0"
