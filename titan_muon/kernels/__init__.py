"""Dense operations on plain tensors; nothing here knows of optimizers or of DTensor."""

from titan_muon.kernels.dispatch import Operations, select_operations

__all__ = ["Operations", "select_operations"]
