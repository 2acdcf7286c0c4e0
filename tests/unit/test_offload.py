"""Shards that lie elsewhere than their matrices are computed: fetched and stored, same update."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers.optimizers import parameters, register_averaged, set_gradients
from tests.helpers.quantized import bits
from titan_muon import Muon
from titan_muon.optim import members
from titan_muon.optim.loans import Transfers
from titan_muon.optim.members import Member
from titan_muon.optim.staging import StagedOperations

EVERY = ("muon", "normuon", "adamuon", "aurora", register_averaged())
SHAPES = ((64, 96), (4, 32, 64), (9, 7))


class Elsewhere:
    """Stands in for the host's memory: whatever an operation works on is a copy."""

    def __enter__(self) -> "Elsewhere":
        self.fetched = self.stored = 0
        store = Transfers.store

        def fetch(_: Transfers, tensors: list[Tensor]) -> list[Tensor]:
            self.fetched += len(tensors)
            return [tensor.clone() for tensor in tensors]

        def count(transfers: Transfers, values: list[Tensor], targets: list[Tensor]) -> None:
            self.stored += len(targets)
            store(transfers, values, targets)

        self._patches = (
            mock.patch.object(Member, "is_staged", True),
            mock.patch.object(Transfers, "fetch", fetch),
            mock.patch.object(Transfers, "store", count),
        )
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _run(algorithm: str, dtype: torch.dtype, **options) -> list[list[Tensor]]:
    params = parameters(*SHAPES, dtype=dtype)
    options = {"lr": 0.05, "adjust_lr_fn": "match_param_rms", **options}
    optimizer = Muon([{"params": params, "algorithm": algorithm}], **options)
    for step in range(3):
        set_gradients(params, step)
        params[1].grad = None if step == 1 else params[1].grad
        optimizer.step()
    return [bits(t) for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("state_dtype", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", EVERY)
def test_fetched_shards_take_the_same_step(algorithm, dtype, state_dtype):
    want = _run(algorithm, dtype, state_dtype=state_dtype)
    with Elsewhere() as elsewhere:
        got = _run(algorithm, dtype, state_dtype=state_dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert elsewhere.fetched > elsewhere.stored > 0


def test_what_is_under_way_at_once_is_bounded():
    largest: list[int] = []
    cut = StagedOperations._cut

    def watch(self, table, tensors):
        chunks = cut(self, table, tensors)
        largest.extend(sum(tensors[i].numel() for i in chunk) for chunk in chunks)
        return chunks

    with Elsewhere(), mock.patch.object(StagedOperations, "_cut", watch):
        # 6144 and 8192 elements: each alone, but the small one beside the second.
        _run("muon", torch.float32, max_stage_bytes=64 * 8300)
        assert max(largest) <= 8300
        largest.clear()
        _run("muon", torch.float32, max_stage_bytes=1)
        assert max(largest) == 8192


def test_path_follows_from_where_the_mesh_computes(monkeypatch):
    params = parameters((4, 6))
    state = Muon(params).state[params[0]]
    group = Muon(params).param_groups[0]
    member = Member(params[0], "w", group, mock.Mock(), {params[0]: state})
    assert not member.is_staged
    monkeypatch.setattr(members, "compute_device", lambda _: torch.device("meta"))
    assert member.is_staged
