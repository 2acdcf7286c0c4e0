"""What a step is measured to have done: against whole tensors on every layout, changing nothing."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from tests.helpers.thread_ranks import LAYOUTS, WORLD, like, mesh_of, shard
from titan_muon import Muon
from titan_muon.optim import meter
from titan_muon.optim.meter import FIELDS, StepMeter, orthogonality_error

CASES = [(name, case) for name, case in LAYOUTS.items() if not case.flatten]
# Elementwise groups go last, so that the parameters of both kinds are all layouts.
OPTIONS = {"lr": 0.05, "weight_decay": 0.0, "wire_dtype": "float32"}
STEPS = 2


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(case.shape, generator=generator) for _ in "ab" for _, case in CASES]


def build(params: list[nn.Parameter]) -> Muon:
    half = len(params) // 2
    groups = [
        {"params": params[:half:2]},
        {"params": params[1:half:2], "algorithm": "normuon"},
        {"params": params[half:], "algorithm": "adamw"},
    ]
    return Muon(groups, **OPTIONS)


def run(params: list[nn.Parameter], *, measured: bool) -> StepMeter | None:
    """Take all steps; the last one is measured."""
    optimizer = build(params)
    watch = StepMeter(optimizer) if measured else None
    for step in range(STEPS):
        for param, grad in zip(params, draw(1 + step), strict=True):
            param.grad = like(param, grad)
        if watch is not None and step == STEPS - 1:
            with watch:
                optimizer.step()
        else:
            optimizer.step()
    return watch


_LOCK = threading.Lock()


@functools.cache
def _expected() -> Tensor:
    """Return the sums by definition, from whole tensors before and after the last step."""
    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = build(params)
    for step in range(STEPS):
        before = [p.detach().clone() for p in params]
        momenta = {p: _momentum(optimizer, p).clone() for p in params}
        for param, grad in zip(params, draw(1 + step), strict=True):
            param.grad = grad
        optimizer.step()
    old = dict(zip(params, before, strict=True))
    rows = []
    for group in optimizer.param_groups:
        sums = dict.fromkeys(FIELDS, 0.0)
        for p in group["params"]:
            weight, change = old[p].double(), (p.detach() - old[p]).double()
            grad, momentum = p.grad.double(), momenta[p].double()
            sums["update_squares"] += change.square().sum().item()
            sums["update_count"] += p.numel()
            sums["weight_squares"] += weight.square().sum().item()
            sums["weight_count"] += p.numel()
            sums["gradient_squares"] += grad.square().sum().item()
            sums["momentum_squares"] += momentum.square().sum().item()
            sums["gradient_dot_momentum"] += (grad * momentum).sum().item()
        rows.append([sums[name] for name in FIELDS])
    return torch.tensor(rows, dtype=torch.float64)


def _momentum(optimizer: Muon, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    return state.get("momentum_buffer", state.get("exp_avg"))


def expected() -> Tensor:
    with _LOCK:
        return _expected()


COMPARED = [i for i, name in enumerate(FIELDS) if not name.startswith("orthogonality")]


class TestMeter(DTensorOpTestBase):
    @property
    def world_size(self) -> int:
        return WORLD

    def build_device_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (WORLD,))

    def sharded(self) -> list[nn.Parameter]:
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        places = [case for _ in "ab" for _, case in CASES]
        return [
            nn.Parameter(shard(w, mesh_of(case.mesh, meshes), case.placements))
            for w, case in zip(draw(0), places, strict=True)
        ]

    def test_sums_over_ranks_are_those_of_whole_tensors(self):
        watch = run(self.sharded(), measured=True)
        total = watch.sums.clone()
        dist.all_reduce(total)
        # float32 sums of a few hundred elements, added by rank instead of at once.
        torch.testing.assert_close(
            total[:, COMPARED], expected()[:, COMPARED], rtol=1e-4, atol=1e-4
        )
        errors, count = (total[:, FIELDS.index(f"orthogonality_{n}")] for n in ("errors", "count"))
        assert (count[:2] > 0).all()
        # The polynomial alone leaves squared singular values within [0.74, 1.3] of their mean.
        assert (errors[0] / count[0]).item() < 0.35
        assert count[2] == 0

    def test_measuring_changes_no_bit(self):
        seen, unseen = self.sharded(), self.sharded()
        run(seen, measured=True)
        run(unseen, measured=False)
        for left, right in zip(seen, unseen, strict=True):
            assert torch.equal(left.detach().to_local(), right.detach().to_local())

    def test_plain_tensors_that_every_rank_holds_count_once(self):
        watch = run([nn.Parameter(w) for w in draw(0)], measured=True)
        total = watch.sums.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(
            total[:, COMPARED], expected()[:, COMPARED], rtol=1e-4, atol=1e-4
        )


def test_parts_add_up_to_the_step_and_nothing_is_watched_outside():
    import time

    params = [nn.Parameter(torch.randn(64, 96))]
    optimizer = Muon(params, lr=0.1)
    watch = StepMeter(optimizer)
    params[0].grad = torch.randn(64, 96)
    optimizer.step()
    begin = time.perf_counter()
    with watch:
        optimizer.step()
    spent = time.perf_counter() - begin
    parts = watch.seconds()
    assert {"momentum", "orthogonalize", "write"} <= set(parts)
    assert all(value >= 0 for value in parts.values())
    assert 0.5 * spent < sum(parts.values()) <= spent
    before = watch.sums.clone()
    optimizer.step()
    assert torch.equal(before, watch.sums)


def test_long_shards_are_sampled(monkeypatch):
    """The sample stands for the whole: its scale makes counts exact and squares unbiased."""
    monkeypatch.setattr(meter, "_SAMPLE", 1000)
    param = nn.Parameter(torch.randn(512, 256, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([{"params": [param], "algorithm": "adamw"}], lr=0.1)
    watch = StepMeter(optimizer)
    param.grad = torch.randn(512, 256)
    with watch:
        optimizer.step()
    sums = dict(zip(FIELDS, watch.sums[0].tolist(), strict=True))
    assert abs(sums["weight_count"] - param.numel()) < 1e-6
    # 1000 normal numbers know their mean square to 4.5 % (one sigma).
    assert abs(sums["weight_squares"] / param.numel() - 1) < 0.15


def test_quantised_momentum_is_read_by_its_values():
    pytest.importorskip("torchao", reason="the extra lp is not installed")
    found = []
    for dtype in ("float32", "int8"):
        params = [nn.Parameter(w) for w in (torch.ones(256, 256), torch.ones(4096))]
        groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer = Muon(groups, lr=0.1, state_dtype=dtype)
        watch = StepMeter(optimizer)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator) + 0.5
            with watch:
                optimizer.step()
        found.append(watch.sums[:, FIELDS.index("gradient_dot_momentum")])
    # Blocks of 256 values keep two digits each; their errors mostly cancel in the dot product.
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=0)


def test_every_dtype_of_weights_is_measured():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        param = nn.Parameter(torch.ones(6, 4, dtype=dtype))
        param.grad = torch.arange(24, dtype=dtype).view(6, 4)
        before = param.detach().clone()
        optimizer = Muon([param], lr=0.5, weight_decay=0.0)
        watch = StepMeter(optimizer)
        with watch:
            optimizer.step()
        moved = (param.detach() - before).double().square().sum()
        measured = watch.sums[0, FIELDS.index("update_squares")]
        # The weights' rounding: bfloat16 has 8 bits.
        torch.testing.assert_close(measured, moved, rtol=0.02, atol=0, msg=str(dtype))


def test_empty_groups_are_measured():
    param = nn.Parameter(torch.ones(6, 4))
    param.grad = torch.ones(6, 4)
    optimizer = Muon([{"params": [], "algorithm": "adamw"}, {"params": [param]}])
    watch = StepMeter(optimizer)
    with watch:
        optimizer.step()
    counts = watch.sums[:, FIELDS.index("update_count")]
    assert counts.tolist() == [0.0, 24.0]
    with StepMeter(Muon([{"params": []}])) as watch:
        assert watch.sums.tolist() == [[0.0] * len(FIELDS)]


def test_orthogonality_error_of_known_matrices():
    q, _ = torch.linalg.qr(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))
    assert orthogonality_error(3e4 * q) < 1e-5
    assert orthogonality_error(q.mT) < 1e-5
    # Squares of the singular values 1 and 3: mean 5, so 1/5 and 9/5, each 4/5 away from 1.
    values = torch.diag(torch.tensor([1.0, 3.0]))
    assert abs(orthogonality_error(values) - 0.8) < 1e-6
    assert orthogonality_error(torch.zeros(4, 6)) == 1
