"""Muon, NorMuon and AdamW for PyTorch and torchtitan."""
