"""On every layout QKClip makes of the weights what one process with all data would, bit for bit."""

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from tests.helpers.attention_references import (
    KINDS,
    Kind,
    add,
    gammas,
    inputs,
    largest,
    weights_of,
)
from tests.helpers.thread_ranks import (
    COLUMN,
    WORLD,
    cut,
    differing_replicas,
    mesh_of,
    region_of,
    shard,
)
from titan_muon.distributed.groups import create_groups
from titan_muon.optim.qk_clip import HeadRows, QKClip, observe

THRESHOLD = 4.0
# Maxima and factors are float32.
ROUNDING = 2e-7


class Layout(NamedTuple):
    """Where the weights of an attention layer lie.

    Args:
        mesh: Mesh shape.
        weight: Placements of a matrix.
        bias: Placements of its bias.
        heads_axis: Mesh axis that divides the heads of the attention, None where there is none.
    """

    mesh: tuple[int, ...]
    weight: Any
    bias: Any
    heads_axis: int | None = None


ROWS, ALL = Shard(0), Replicate()
LAYOUTS = {
    "fsdp": Layout((4,), [ROWS], [ROWS]),
    "fsdp columns": Layout((4,), [Shard(1)], [ALL]),
    "ddp": Layout((4,), [ALL], [ALL]),
    "hsdp": Layout((2, 2), [ALL, ROWS], [ALL, ROWS]),
    "tp": Layout((4,), [ROWS], [ROWS], 0),
    "fsdp tp": Layout((2, 2), COLUMN, COLUMN, 1),
    "fsdp tp both on rows": Layout((2, 2), [ROWS, ROWS], [ROWS, ROWS], 0),
    "hsdp tp": Layout((2, 1, 2), [ALL, *COLUMN], [ALL, *COLUMN], 2),
}


def xs_of(layout: Layout, coordinate: tuple[int, ...]) -> list[Tensor]:
    """Return two micro-batches; ranks that divide the heads see the same ones."""
    data = [c for axis, c in enumerate(coordinate) if axis != layout.heads_axis]
    number = sum(c << axis for axis, c in enumerate(data))
    return [inputs(2 * number), inputs(2 * number + 1)]


def all_xs(layout: Layout) -> list[Tensor]:
    ranks = torch.arange(math.prod(layout.mesh)).view(layout.mesh)
    found = [xs_of(layout, tuple(c)) for c in (ranks >= 0).nonzero().tolist()]
    return [x for xs in found for x in xs]


def heads_of(layout: Layout, n_heads: int, coordinate: tuple[int, ...]) -> range:
    if layout.heads_axis is None:
        return range(n_heads)
    count = n_heads // layout.mesh[layout.heads_axis]
    first = coordinate[layout.heads_axis] * count
    return range(first, first + count)


def observed(
    maxima: Tensor, kind: Kind, whole: dict[str, Tensor], xs: list[Tensor], heads: range
) -> None:
    for x in xs:
        observe(maxima, kind.logits(whole, x)[:, heads.start : heads.stop])


class QKClipTest(DTensorOpTestBase):
    @property
    def world_size(self):
        return WORLD

    def build_device_mesh(self):
        return init_device_mesh("cpu", (WORLD,))

    def alone(self) -> Any:
        """Return a group of this rank: the reference works without the others."""
        groups = [dist.new_group([rank]) for rank in range(WORLD)]
        return groups[dist.get_rank()]

    def test_layouts_equal_one_process(self):
        alone = self.alone()
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for layout_name, layout in LAYOUTS.items():
            mesh = mesh_of(layout.mesh, meshes)
            coordinate = tuple(mesh.get_coordinate() or ())
            clip, reference = QKClip(THRESHOLD), QKClip(THRESHOLD, process_group=alone)
            cases = []
            for seed, (name, kind) in enumerate(KINDS.items()):
                whole = weights_of(kind, seed)
                shards = {
                    key: shard(w, mesh, layout.weight if w.ndim == 2 else layout.bias)
                    for key, w in whole.items()
                }
                heads = heads_of(layout, kind.n_heads, coordinate)
                maxima = add(clip, kind, shards, heads=heads)
                observed(maxima, kind, whole, xs_of(layout, coordinate), heads)
                alone_maxima = add(reference, kind, whole)
                xs = all_xs(layout)
                expected = kind.scaled(whole, gammas(largest(kind, whole, xs), THRESHOLD))
                observed(alone_maxima, kind, whole, xs, range(kind.n_heads))
                cases.append((name, whole, shards, expected))
            clip.step()
            reference.step()
            for name, whole, shards, expected in cases:
                for key, local in shards.items():
                    where = f"{layout_name}, {name}, {key}"
                    one_process = cut(whole[key], region_of(local))
                    assert torch.equal(local.to_local(), one_process), where
                    torch.testing.assert_close(
                        whole[key], expected[key], rtol=ROUNDING, atol=0, msg=where
                    )
                assert differing_replicas(list(shards.values())) == []
            assert clip.metrics() == reference.metrics()
            figures = clip.figures()
            assert figures["clipped_heads"] == reference.metrics()["clipped_heads"].item() > 0

    def test_shards_that_end_inside_a_head_and_a_rank_without_a_row(self):
        mesh, rank = init_device_mesh("cpu", (WORLD,)), dist.get_rank()
        whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        weight = shard(whole, mesh, [ROWS])
        assert weight.to_local().shape[0] == (2, 2, 2, 0)[rank]
        clip = QKClip(THRESHOLD)
        maxima = clip.add_layer(2, [(weight, [HeadRows(0, 0, 3, 1.0), HeadRows(1, 3, 3, 0.5)])])
        # The rank without a row saw the largest logit of head 0.
        observe(maxima, torch.tensor([[8.0 if rank == 3 else 1.0, 64.0]]))
        clip.step()
        scales = torch.tensor([0.5] * 3 + [0.25] * 3)[:, None]
        assert torch.equal(weight.to_local(), cut(whole * scales, region_of(weight)))

    def stages(self) -> tuple[DeviceMesh, int]:
        """Return the mesh of this rank's pipeline stage and the stage; two of two ranks."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        return mesh["dp"], mesh.get_local_rank("pp")

    def test_stages_keep_to_themselves(self):
        """Each stage reduces its own heads, the log all of them."""
        mesh, stage = self.stages()
        kind, rank = KINDS["grouped"], dist.get_rank()
        starts = [weights_of(kind, seed) for seed in (5, 6)]
        shards = {key: shard(value, mesh, [ROWS]) for key, value in starts[stage].items()}
        clip = QKClip(THRESHOLD)
        maxima = add(clip, kind, shards)
        assert clip.rank_sets() == [(2 * stage, 2 * stage + 1)]
        create_groups(clip.rank_sets())
        observed(maxima, kind, starts[stage], [inputs(rank)], range(kind.n_heads))
        clip.step()
        totals = [largest(kind, starts[s], [inputs(2 * s), inputs(2 * s + 1)]) for s in (0, 1)]
        expected = kind.scaled(starts[stage], gammas(totals[stage], THRESHOLD))
        for key, local in shards.items():
            torch.testing.assert_close(
                local.to_local(), cut(expected[key], region_of(local)), rtol=ROUNDING, atol=0
            )
        every = [value for of_stage in totals for value in of_stage]
        figures = clip.figures()
        assert math.isclose(figures["max_logit"], max(every), rel_tol=ROUNDING)
        assert figures["clipped_heads"] == sum(value > THRESHOLD for value in every)

    def test_a_stage_without_a_layer_joins_the_log(self):
        mesh, stage = self.stages()
        clip = QKClip(THRESHOLD)
        if stage == 0:
            kind = KINDS["grouped"]
            shards = {k: shard(w, mesh, [ROWS]) for k, w in weights_of(kind).items()}
            maxima = add(clip, kind, shards)
            observe(maxima, torch.tensor([[1.0, 9.0, 1.0, 8.0]]))
        create_groups(clip.rank_sets())
        clip.step()
        assert clip.figures() == {"max_logit": 9.0, "clipped_heads": 2.0}

    def test_plain_weights_need_their_group(self):
        kind = KINDS["grouped"]
        weights = weights_of(kind)
        with pytest.raises(ValueError, match=r"layers\.0\.attention has plain weights on one of 4"):
            add(QKClip(THRESHOLD), kind, weights, name="layers.0.attention")
        clip = QKClip(THRESHOLD, process_group=dist.group.WORLD)
        maxima = add(clip, kind, weights)
        observed(maxima, kind, weights, [inputs(dist.get_rank())], range(kind.n_heads))
        clip.step()
        start = weights_of(kind)
        expected = kind.scaled(
            start, gammas(largest(kind, start, [inputs(r) for r in range(WORLD)]), THRESHOLD)
        )
        for key in weights:
            torch.testing.assert_close(weights[key], expected[key], rtol=ROUNDING, atol=0)

    def test_one_all_reduce_a_step(self):
        mesh = init_device_mesh("cpu", (WORLD,))
        clip = QKClip(THRESHOLD)
        for seed, kind in enumerate(KINDS.values()):
            whole = weights_of(kind, seed)
            add(clip, kind, {k: shard(w, mesh, [ROWS]) for k, w in whole.items()})
        clip.step()
        counted, original = [], dist.all_reduce
        _COUNTS[dist.get_rank()] = counted
        dist.barrier()
        dist.all_reduce = _counting(original)
        dist.barrier()
        clip.step()
        dist.barrier()
        dist.all_reduce = original
        # 5 kinds of 4 heads.
        assert counted == [20]


_COUNTS: dict[int, list[int]] = {}


def _counting(original):
    # The ranks are threads of one process: each replaces the same attribute by the same.
    def counting(tensor, *args, **kwargs):
        _COUNTS[dist.get_rank()].append(tensor.numel())
        return original(tensor, *args, **kwargs)

    return counting if original.__name__ != "counting" else original


if __name__ == "__main__":
    run_tests()
