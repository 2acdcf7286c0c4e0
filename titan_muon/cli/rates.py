"""How long the parts of a step would take at given rates."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Rates", "Times", "elementwise_bytes", "set_seconds"]

# Bytes that pass through memory for one float32 weight: gradient read, momentum read and written,
# direction written, update read, weight read and written; for AdamW gradient, weight, two moments.
_MATRIX_BYTES = 24
_ADAM_BYTES = 28
# Ranks of one host, which a faster link connects.
_HOST = 8
_HOST_LINK, _NETWORK_LINK = 300.0, 50.0


@dataclass(frozen=True)
class Rates:
    """What the model assumes of one GPU.

    Args:
        tflops: Rate of the orthogonalization, symmetric products counted half.
        memory_gbs: Memory traffic in GB/s.
        link_gbs: What a rank sends to other ranks in GB/s.
    """

    # H200: the README's table of orthogonalizations runs at 430 to 590, its AdamW step at 3300.
    tflops: float = 550.0
    memory_gbs: float = 3300.0
    link_gbs: float = _HOST_LINK

    @staticmethod
    def link_of(world_size: int) -> float:
        """Return the link's rate to assume: NVLink inside a host of 8, else 400 Gbit/s a rank."""
        return _HOST_LINK if world_size <= _HOST else _NETWORK_LINK


@dataclass(frozen=True)
class Times:
    """Milliseconds of one step on the slowest rank.

    Args:
        orthogonalize: Arithmetic.
        exchange: All-to-alls, hidden or not.
        elementwise: Momentum, direction, write, and AdamW.
        total: Of the step; the exchange hides under arithmetic, but for its first and last stage.
    """

    orthogonalize: float
    exchange: float
    elementwise: float
    total: float


def set_seconds(
    loads: Tensor, bytes_sent: Tensor, edge_bytes: Tensor, rates: Rates
) -> tuple[float, float, float]:
    """Return the seconds of arithmetic, of exchange and of both of one plan; its ranks wait.

    Args:
        loads: FLOPs of each rank.
        bytes_sent: By each rank.
        edge_bytes: Those of them that run under no arithmetic.
        rates: Assumed.
    """
    compute = float(loads.max()) / (rates.tflops * 1e12)
    exchange, edges = (float(b.max()) / (rates.link_gbs * 1e9) for b in (bytes_sent, edge_bytes))
    return compute, exchange, edges + max(compute, exchange - edges)


def elementwise_bytes(matrix_weights: Tensor, other_weights: Tensor) -> Tensor:
    """Return the memory traffic of each rank outside the orthogonalization.

    Args:
        matrix_weights: Elements of each rank's shards of matrices.
        other_weights: The same of all other parameters.
    """
    return _MATRIX_BYTES * matrix_weights + _ADAM_BYTES * other_weights
