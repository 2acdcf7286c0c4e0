"""Muon: the orthogonalized update as it is."""

from titan_muon.optim.algorithms.base import MatrixAlgorithm

__all__ = ["MuonAlgorithm"]


class MuonAlgorithm(MatrixAlgorithm):
    """Momentum, orthogonalization, shape-scaled write.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/
    """

    name = "muon"
    title = "Muon"
