"""AdaMuon and Aurora on sharded weights: what the owner needs travels there and back exactly."""

from tests.distributed.test_exactness import FLOAT32, ThreadRanks, entries

VARIANTS = ({"algorithm": "adamuon"}, {"algorithm": "aurora", "pp_iterations": 3})
LAYOUTS = (
    "fsdp shard 0",
    "fsdp shard 1",
    "fsdp uneven",
    "fsdp empty shard",
    "hsdp",
    "fsdp tp column",
    "fsdp tp row uneven",
    "experts whole",
    "experts efsdp shard 1 uneven",
    "convolution",
)
ENTRIES = [entry for entry in entries(*VARIANTS) if entry[0] in LAYOUTS]


class TestVariants(ThreadRanks):
    def test_one_matrix_at_a_time_is_bitwise_equal(self):
        # Parameters, momentum and AdaMuon's second moment, an element each; every product has the
        # same operands, whatever the layout.
        chosen = [entry for entry in ENTRIES if entry[1]["split"] is None]
        self.compare(chosen, {**FLOAT32, "batch_size": 1}, 0.0)

    def test_splits(self):
        # Batched products may add in another order: 1e-7 of an update's elements, which AdaMuon
        # divides by the root of their own history, and that is sometimes as small as 1e-3.
        chosen = [entry for entry in ENTRIES if entry[1]["split"] is not None]
        self.compare(chosen, {**FLOAT32, "max_stage_bytes": 1 << 16}, 1e-3)
