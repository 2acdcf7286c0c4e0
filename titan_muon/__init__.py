"""Muon, NorMuon and AdamW for PyTorch and torchtitan."""

from titan_muon.optim import Muon, NorMuon, Rule, param_groups

__all__ = ["Muon", "NorMuon", "Rule", "param_groups"]
__version__ = "0.1.0"
