"""Update rules by name: math only, on plain tensors."""

from titan_muon.optim.algorithms.adamuon import AdaMuonAlgorithm
from titan_muon.optim.algorithms.adamw import AdamAlgorithm, AdamWAlgorithm
from titan_muon.optim.algorithms.aurora import AuroraAlgorithm
from titan_muon.optim.algorithms.base import (
    Algorithm,
    Buffer,
    ElementwiseAlgorithm,
    MatrixAlgorithm,
    Polar,
    algorithm_names,
    all_option_names,
    check_options,
    get_algorithm,
    register_algorithm,
)
from titan_muon.optim.algorithms.muon import MuonAlgorithm
from titan_muon.optim.algorithms.normuon import NorMuonAlgorithm

__all__ = [
    "Algorithm",
    "Buffer",
    "ElementwiseAlgorithm",
    "MatrixAlgorithm",
    "Polar",
    "algorithm_names",
    "all_option_names",
    "check_options",
    "get_algorithm",
    "register_algorithm",
]

for _algorithm in (
    MuonAlgorithm,
    NorMuonAlgorithm,
    AdaMuonAlgorithm,
    AuroraAlgorithm,
    AdamWAlgorithm,
    AdamAlgorithm,
):
    register_algorithm(_algorithm())
