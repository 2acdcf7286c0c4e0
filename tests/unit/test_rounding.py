"""Stochastic rounding: unbiased, the same noise wherever an element lies, resumed bit for bit."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.helpers.interpreter import interpreted
from tests.helpers.optimizers import ALGORITHMS, AveragedAlgorithm, set_gradients, train
from tests.helpers.ptx import global_accesses
from titan_muon import Muon
from titan_muon.kernels.noise import Noise, noise_reference
from titan_muon.kernels.rounding import round_reference
from titan_muon.optim import elements
from titan_muon.optim.algorithms import ElementwiseAlgorithm, register_algorithm
from titan_muon.optim.load_planner import StateLoadPlanner
from titan_muon.optim.options import COMMON_OPTIONS
from titan_muon.optim.rounding import Rounding

SHAPES = ((6, 10), (2, 4, 8), (5, 3))


def _params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in SHAPES]


def _optimizer(algorithm: str, params: list[nn.Parameter] | None = None, **options) -> Muon:
    options = {"lr": 1e-3, "stochastic_rounding": True, **options}
    named = [(f"w{i}", p) for i, p in enumerate(params or _params())]
    return Muon([{"params": named, "algorithm": algorithm}], **options)


def _weights(optimizer: Muon) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def noise_of(step: int, shape: tuple[int, int], device: str = "cpu") -> Noise:
    rows, columns = (torch.arange(n, dtype=torch.int32, device=device) for n in shape)
    base = torch.tensor(-1234567, dtype=torch.int32, device=device)
    return Noise(rows, columns, torch.tensor(float(step), device=device), base)


def test_rounds_to_neighbours_without_bias():
    # Halfway up by a quarter: rounds up in a quarter of all cases, the rest down.
    low = torch.tensor(1.0)
    high = torch.tensor(1.0 + 2**-7)
    for share in (0.25, 0.5, 0.9):
        for sign in (1, -1):
            values = (sign * (low + share * (high - low))).expand(1 << 16).contiguous()
            out = torch.empty(1 << 16, dtype=torch.bfloat16)
            round_reference(values, out, noise_of(3, (256, 256)), 0)
            up = (out.float() == sign * high).float().mean().item()
            assert set(out.float().unique().tolist()) == {sign * low.item(), sign * high.item()}
            # 65536 draws: one standard deviation is at most 0.002.
            assert abs(up - share) < 0.01


def test_noise_is_uniform_and_uncorrelated_between_neighbours():
    noise, next_step = (
        noise_reference(noise_of(step, (512, 512)), 0, 1 << 18).view(512, 512).double() / 65536
        for step in (11, 12)
    )
    assert abs(noise.mean() - 0.5) < 0.003
    assert abs(noise.var() - 1 / 12) < 0.002
    centred = noise - 0.5
    for neighbour in (centred.roll(1, 0), centred.roll(1, 1), next_step - 0.5):
        # 262144 pairs: one standard deviation of the correlation is 0.002.
        assert abs((centred * neighbour).mean() * 12) < 0.01


def test_values_that_need_no_rounding_and_nonfinite_ones_stay():
    values = torch.randn(64, 64).bfloat16().float()
    values[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    # The NaN with all bits set must not overflow into a number.
    values.view(torch.int32)[1, 0] = 0x7FFFFFFF
    out = torch.empty(64 * 64, dtype=torch.bfloat16)
    round_reference(values.view(-1), out, noise_of(1, (64, 64)), 0)
    torch.testing.assert_close(out.view(64, 64).float(), values, rtol=0, atol=0, equal_nan=True)


def test_slices_draw_the_noise_of_the_whole():
    values = torch.randn(40 * 24)
    whole, part = (torch.empty(40 * 24, dtype=torch.bfloat16) for _ in "ab")
    noise = noise_of(5, (40, 24))
    round_reference(values, whole, noise, 0)
    # Whole rows, parts of several, of one, and from within one to its end.
    for start, stop in ((0, 48), (48, 101), (101, 110), (110, 120), (120, 960)):
        round_reference(values[start:stop], part[start:stop], noise, start)
    assert torch.equal(whole, part)


def test_noise_never_changes():
    """A run that was saved by an earlier version goes on with the noise it would have had."""
    rounding = Rounding(nn.Parameter(torch.zeros(3, 2, 5)), "layers.0.weight", 0)
    low = torch.full((30,), 0x3F800000, dtype=torch.int32)
    noise = torch.zeros(30, dtype=torch.int32)
    for bit in reversed(range(16)):
        trial = noise | 1 << bit
        # What this far below the next bfloat16 is rounded up by this much noise and more.
        values = (low + (0x10000 - trial)).view(torch.float32)
        noise = torch.where(rounding(values, torch.tensor(3.0)) > 1, trial, noise)
    assert noise.tolist() == [
        18940, 28719, 48615, 50883, 12063, 17426, 7511, 12110, 36328, 52922,
        53238, 65039, 64792, 8567, 2826, 53916, 35348, 47137, 52262, 43060,
        56123, 25730, 31247, 41912, 38971, 1243, 19538, 33969, 36795, 58912,
    ]  # fmt: skip
    rounding = Rounding(nn.Parameter(torch.zeros(3, 2, 5)), "layers.0.weight", 7)
    values = torch.linspace(-1.9, 1.9, 30)[13:]
    ups = rounding(values, torch.tensor(12345.0), 13) > values
    assert "".join(str(int(up)) for up in ups) == "11001111001001110"


def check_kernel(rounds, device="cpu"):
    """Compare with the torch definition, bit for bit but for which NaN it is."""
    # Rows of a tile and more, of part of a tile, of an element; slices as in the test above.
    shapes = {(3, 1500): (0, 1, 1600), (50, 41): (0, 7, 1999), (2100, 1): (0, 3), (5, 16): (0, 50)}
    for shape, starts in shapes.items():
        noise, size = noise_of(7, shape, device), shape[0] * shape[1]
        values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
        values[3], values[4], values[5] = float("inf"), float("nan"), -float("inf")
        for start in starts:
            for stop in (start + 9, size - 2, size):
                part, outs = values[start:stop], []
                for function in (round_reference, rounds):
                    outs.append(torch.zeros(len(part) + 1, dtype=torch.bfloat16, device=device))
                    function(part, outs[-1][:-1], noise, start)
                assert outs[1][-1] == 0, (shape, start, stop)
                torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)


def test_triton_kernel_equals_reference_in_the_interpreter():
    code = (
        "import test_rounding; from titan_muon.kernels import triton_rounding;"
        "test_rounding.check_kernel(triton_rounding.round_to_bfloat16); print('equal')"
    )
    assert interpreted("-c", code) == "equal"


def test_values_and_columns_are_loaded_in_vectors():
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_rounding

    types = {
        "values": "*fp32", "out": "*bf16", "rows": "*i32", "columns": "*i32", "step": "*fp32",
        "base": "*i32", "height": "i32",
    }  # fmt: skip
    constants = {"start": 0, "count": 1 << 24, "width": 4096, "ROWS": 1, "COLUMNS": 1024}
    accesses = global_accesses(triton_rounding._kernel, types, constants)
    # A thread has eight values and as many columns; row, step and base are the same for all.
    assert sorted(accesses) == ["ld.global.b32"] * 3 + ["ld.global.v4.b32"] * 4 + [
        "st.global.v4.b32"
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestEveryAlgorithm:
    def test_small_steps_add_up_only_with_it(self, algorithm):
        moved = {}
        for rounds in (False, True):
            # Each step is a twentieth of the distance between neighbours at 1.
            weight = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))
            options = {"lr": 2**-7 / 20, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
            optimizer = _optimizer(algorithm, [weight], stochastic_rounding=rounds, **options)
            exact = nn.Parameter(torch.ones(32, 32))
            reference = Muon([{"params": [exact], "algorithm": algorithm}], **options)
            generator = torch.Generator().manual_seed(2)
            grad = torch.randn(32, 32, generator=generator)
            for _ in range(40):
                weight.grad, exact.grad = grad.bfloat16(), grad.bfloat16().float()
                optimizer.step()
                reference.step()
            wanted = exact.detach() - 1
            moved[rounds] = ((weight.detach().float() - 1) * wanted).sum() / wanted.square().sum()
        # 1024 elements, forty steps: the share of the exact movement is near 1. Upwards from 1
        # torch's rounding loses every step; downwards neighbours are nearer, and it loses some.
        assert abs(moved[True] - 1) < 0.1
        assert moved[False] < 0.6

    def test_resumed_equals_uninterrupted(self, algorithm):
        optimizer = _optimizer(algorithm)
        train(optimizer, 2)
        resumed = _optimizer(
            algorithm, [nn.Parameter(p.detach().clone()) for p in _weights(optimizer)]
        )
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, 3, first=2)
        train(resumed, 3, first=2)
        for a, b in zip(_weights(optimizer), _weights(resumed), strict=True):
            assert torch.equal(a, b)
            assert optimizer.state[a]["step"] == 5

    def test_noise_follows_seed_name_and_step(self, algorithm):
        runs = [_optimizer(algorithm, rounding_seed=seed) for seed in (0, 0, 1)]
        for run in runs:
            train(run, 2)
        first, again, other = ([p.detach() for p in _weights(run)] for run in runs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))

    def test_only_bfloat16_weights_are_concerned(self, algorithm):
        weights = [nn.Parameter(p.detach().float()) for p in _params()]
        plain = [nn.Parameter(p.detach().clone()) for p in weights]
        runs = (
            _optimizer(algorithm, weights),
            _optimizer(algorithm, plain, stochastic_rounding=False),
        )
        for run in runs:
            train(run, 2)
        for a, b in zip(weights, plain, strict=True):
            assert torch.equal(a, b)
            assert set(runs[0].state[a]) == set(runs[1].state[b])

    def test_one_rounding_of_the_exact_step(self, algorithm):
        params = _params()
        exact = [nn.Parameter(p.detach().float()) for p in params]
        optimizer = _optimizer(algorithm, params, lr=0.1)
        reference = _optimizer(algorithm, exact, lr=0.1)
        set_gradients(params)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, q in zip(params, exact, strict=True):
            # Never further than one distance between neighbours.
            assert ((p.float() - q).abs() <= q.abs() * 2**-7 + 1e-30).all()


def test_it_goes_on_and_off_at_a_load():
    for before, after in ((False, True), (True, False)):
        source = _optimizer("muon", stochastic_rounding=before)
        train(source, 2)
        target = _optimizer("muon", stochastic_rounding=after)
        target.load_state_dict(source.state_dict())
        for p, q in zip(_weights(source), _weights(target), strict=True):
            momenta = (o.state[w]["momentum_buffer"] for o, w in ((source, p), (target, q)))
            assert torch.equal(*momenta)
            assert ("step" in target.state[q]) == after
        train(target, 1)


def test_it_goes_on_at_a_distributed_load(tmp_path):
    off, on = _optimizer("muon", stochastic_rounding=False), _optimizer("muon")
    train(off, 2)
    dcp.save({"state": off.state_dict()["state"]}, checkpoint_id=tmp_path, no_dist=True)
    state = {"state": on.state_dict()["state"]}
    planner = StateLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    for ours, theirs in zip(_weights(on), _weights(off), strict=True):
        assert torch.equal(on.state[ours]["momentum_buffer"], off.state[theirs]["momentum_buffer"])
        assert on.state[ours]["step"] == 0
    train(on, 1)
    assert all(on.state[w]["step"] == 1 for w in _weights(on))


def test_chunks_of_a_shard_draw_the_noise_of_the_whole(monkeypatch):
    whole, parts = _optimizer("adamw"), _optimizer("adamw")
    train(whole, 2)
    monkeypatch.setattr(elements, "CHUNK", 16)
    train(parts, 2)
    for one, other in zip(_weights(whole), _weights(parts), strict=True):
        assert torch.equal(one, other)


def test_skipped_step_draws_no_noise():
    optimizer = _optimizer("muon", nonfinite="skip")
    train(optimizer, 1)
    before = [p.detach().clone() for p in _weights(optimizer)]
    set_gradients(_weights(optimizer), 1)
    _weights(optimizer)[0].grad[0, 0] = float("nan")
    optimizer.step()
    for p, old in zip(_weights(optimizer), before, strict=True):
        assert torch.equal(p, old)
        assert optimizer.state[p]["step"] == 1


def test_algorithm_without_a_step_is_refused():
    class Stepless(ElementwiseAlgorithm):
        name, title, options = "stepless_test", "Stepless", COMMON_OPTIONS

        def create_state(self, param, group):
            return {}

        def step(self, params, grads, states, group):
            raise AssertionError

    register_algorithm(Stepless())
    with pytest.raises(ValueError, match="Stepless keeps no 'step'"):
        _optimizer("stepless_test")


def test_algorithm_from_outside_is_rounded_too():
    register_algorithm(AveragedAlgorithm())
    optimizer = _optimizer("averaged_test")
    train(optimizer, 2)
    assert {"momentum_buffer", "average_buffer", "count_buffer", "step"} == set(
        optimizer.state[_weights(optimizer)[0]]
    )
