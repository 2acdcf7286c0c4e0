"""A torchtitan dataloader whose samples do not depend on the mesh.

Every mesh sees the same global batch at the same step, so losses and updates may be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

# Documents are this many tokens at most, so that document masks matter.
_LONGEST_DOCUMENT = 48


def sample(step: int, index: int, seq_len: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return "input", "labels" and "positions", each (seq_len,), at one place of a step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    tokens = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
    positions: list[int] = []
    while len(positions) < seq_len:
        length = int(torch.randint(1, _LONGEST_DOCUMENT, (), generator=generator))
        positions.extend(range(length))
    return {
        "input": tokens[:-1],
        "labels": tokens[1:],
        "positions": torch.tensor(positions[:seq_len]),
    }


class IndexedDataLoader(BaseDataLoader):
    """Deals the samples of each step out to ranks and microbatches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        samples_per_step: int
        """Global batch size: over ranks, accumulation steps and pipeline microbatches"""

        vocab_size: int = 2048
        """Tokens are drawn below this"""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        per_round = dp_world_size * local_batch_size
        if config.samples_per_step % per_round:
            raise ValueError(
                f"samples_per_step = {config.samples_per_step} must be a multiple of "
                f"{dp_world_size} ranks x {local_batch_size} samples"
            )
        self._config = config
        self._rounds_per_step = config.samples_per_step // per_round
        self._first_index = dp_rank * local_batch_size
        self._per_round = per_round
        self._batch_size = local_batch_size
        self._seq_len = seq_len
        self._batches_read = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            step, round_in_step = divmod(self._batches_read, self._rounds_per_step)
            first = round_in_step * self._per_round + self._first_index
            rows = [
                sample(step, first + row, self._seq_len, self._config.vocab_size)
                for row in range(self._batch_size)
            ]
            self._batches_read += 1
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            labels = batch.pop("labels")
            yield batch, labels

    def state_dict(self) -> dict[str, Any]:
        return {"batches_read": self._batches_read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches_read = state_dict.get("batches_read", 0)
