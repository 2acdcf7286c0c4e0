"""Every state dtype: what is stored, how far it is from float32, copies and loads."""

import copy
import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers.optimizers import ALGORITHMS, register_averaged, train
from tests.helpers.quantized import bits, values
from titan_muon import Muon, param_groups
from titan_muon.optim import quantized
from titan_muon.optim.state_tensors import copy_state, new_state

torchao = pytest.importorskip("torchao", reason="quantised state needs torchao")
ROOT = Path(__file__).parents[2]
FORMATS = ("int8", "int4", "float8")
EVERY = (*ALGORITHMS, register_averaged())
# Distance from float32 state after five steps of gaussian gradients, relative to the movement:
# a few times the rounding of one value, 2**-8, 2**-7, 2**-4 and one part in five.
DISTANCE = {"bfloat16": 0.05, "int8": 0.12, "float8": 0.2, "int4": 0.45}
SHAPES = ((64, 96), (3, 32, 64), (9, 7))


def _params(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(s, generator=generator) * scale).to(dtype)) for s in SHAPES]


def _optimizer(algorithm: str, state_dtype: str, **options) -> Muon:
    options = {"lr": 0.02, "state_dtype": state_dtype, **options}
    return Muon([{"params": _params(), "algorithm": algorithm}], **options)


def _moved(optimizer: Muon) -> list[Tensor]:
    (group,) = optimizer.param_groups
    return [p.detach() - s.detach() for p, s in zip(group["params"], _params(), strict=True)]


def _every_bit(optimizer: Muon) -> list[list[Tensor]]:
    (group,) = optimizer.param_groups
    return [bits(v) for p in group["params"] for v in optimizer.state[p].values()] + [
        [p.detach().clone()] for p in group["params"]
    ]


def _same(left: Muon, right: Muon) -> None:
    torch.testing.assert_close(_every_bit(left), _every_bit(right), rtol=0, atol=0)


@pytest.mark.parametrize("state_dtype", [*DISTANCE])
@pytest.mark.parametrize("algorithm", EVERY)
class TestEveryAlgorithm:
    def test_stays_near_float32_state(self, algorithm, state_dtype):
        runs = [_optimizer(algorithm, name) for name in ("float32", state_dtype)]
        for run in runs:
            train(run, 5)
        want, got = (_moved(run) for run in runs)
        for number, (a, b) in enumerate(zip(want, got, strict=True)):
            error = ((a - b).norm() / a.norm()).item()
            # The last one is too small for blocks.
            exact = number == 2 and state_dtype != "bfloat16"
            assert error == 0 if exact else 0 < error < DISTANCE[state_dtype]

    def test_copies_and_loads_keep_all_bits(self, algorithm, state_dtype):
        optimizer = _optimizer(algorithm, state_dtype)
        train(optimizer, 2)
        twins = [copy.deepcopy(optimizer)]
        if state_dtype != "float8":  # torch itself cannot pickle a float8 tensor
            twins.append(pickle.loads(pickle.dumps(optimizer)))
            twins.append(copy.deepcopy(twins[1]))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = _optimizer(algorithm, state_dtype)
        train(loaded, 1, first=7)
        with torch.no_grad():
            pairs = zip(
                loaded.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
            )
            for target, source in pairs:
                target.copy_(source)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        twins.append(loaded)
        for twin in twins:
            _same(twin, optimizer)
        train(optimizer, 2, first=2)
        for twin in twins:
            train(twin, 2, first=2)
            _same(twin, optimizer)

    def test_chunks_change_no_bit(self, algorithm, state_dtype, monkeypatch):
        from titan_muon.optim import elements

        runs = [_optimizer(algorithm, state_dtype)]
        train(runs[0], 3)
        monkeypatch.setattr(elements, "CHUNK", 512)
        # One tensor a chunk.
        runs.append(_optimizer(algorithm, state_dtype, max_stage_bytes=1 << 16))
        train(runs[1], 3)
        if algorithm in ("adam", "adamw"):
            _same(*runs)
        else:
            for a, b in zip(*map(_moved, runs), strict=True):
                # Batched products may add in another order, which quantising may amplify.
                assert ((a - b).norm() / a.norm()).item() < 1e-2

    def test_distributed_checkpoint_api(self, algorithm, state_dtype):
        model, other = (nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)) for _ in "ab")
        options = {"lr": 0.1, "state_dtype": state_dtype}
        source, target = (Muon(param_groups(m, algorithm), **options) for m in (model, other))
        train(source, 2)
        saved = get_optimizer_state_dict(model, source)
        set_optimizer_state_dict(other, target, saved)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            for key, value in source.state[p].items():
                torch.testing.assert_close(bits(target.state[q][key]), bits(value), rtol=0, atol=0)


def _random(signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    # Blocks of very different sizes, with a zero one.
    values = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 6, 64).view(-1, 1)
    values[7] = 0
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("state_dtype", FORMATS)
class TestFormats:
    def test_codes_are_torchaos(self, state_dtype, signed):
        ours, theirs = (new_state(_random(signed), state_dtype, signed=signed) for _ in "ab")
        wanted = _random(signed)
        copy_state(ours, wanted)
        theirs.copy_(wanted)
        got, want = ours.dequantize(), theirs.dequantize()
        # Only a value halfway between two codes may go either way; torchao's smallest scale, by
        # which a zero block is divided, is 1e-12.
        assert ((got - want).abs() > 1e-13).float().mean() < 1e-4
        torch.testing.assert_close(ours.scale, theirs.scale, rtol=0, atol=2e-12)

    def test_scale_of_the_values_does_not_matter(self, state_dtype, signed):
        state, unit = (new_state(_random(signed), state_dtype, signed=signed) for _ in "ab")
        plain = _random(signed)[32:33].expand(64, 256).contiguous()
        copy_state(unit, plain)
        for power in (-60, 60):
            copy_state(state, plain * 2.0**power)
            torch.testing.assert_close(bits(state)[0], bits(unit)[0], rtol=0, atol=0)
            assert torch.equal(values(state), values(unit) * 2.0**power)

    def test_nonfinite_values_stay_nonfinite_in_their_block(self, state_dtype, signed):
        state = new_state(_random(signed), state_dtype, signed=signed)
        for bad in (float("nan"), float("inf")):
            wanted = _random(signed)
            wanted[3, 5] = bad
            copy_state(state, wanted)
            finite = values(state).isfinite()
            assert not finite[3, 5]
            assert finite[:3].all()
            assert finite[4:].all()

    def test_every_dtype_loads_into_every_other(self, state_dtype, signed):
        source = new_state(_random(signed), state_dtype, signed=signed)
        copy_state(source, _random(signed))
        for other in ("float32", "bfloat16", *FORMATS):
            target = new_state(_random(signed), other, signed=signed)
            copy_state(target, source)
            error = (values(target) - values(source)).norm() / values(source).norm()
            assert error < 2 * DISTANCE.get(other, 1e-6), other


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_float64_weights_take_quantised_state(algorithm):
    """Several in one chunk: their decoded values are float64 copies of one tensor, not of many."""
    runs = []
    for state_dtype in ("auto", "int8"):
        params = [nn.Parameter(p.detach().double()) for p in _params()]
        optimizer = Muon([{"params": params, "algorithm": algorithm}], state_dtype=state_dtype)
        train(optimizer, 3)
        runs.append([p.detach() - s.detach() for p, s in zip(params, _params(), strict=True)])
    for want, got in zip(*runs, strict=True):
        assert ((want - got).norm() / want.norm()).item() < DISTANCE["int8"]


def test_small_and_one_dimensional_parameters_stay_float32():
    shapes = ((63, 65), (8192,), (64, 64))
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    optimizer = Muon([{"params": params, "algorithm": "adamw"}], state_dtype="int8")
    names = [type(optimizer.state[p]["exp_avg"]).__name__ for p in params]
    assert names == ["Tensor", "Tensor", "OptimState8bit"]


def test_row_statistics_stay_float32():
    weight = nn.Parameter(torch.zeros(64, 8192))
    state = Muon([{"params": [weight], "algorithm": "normuon"}], state_dtype="int4").state[weight]
    assert state["second_moment_buffer"].dtype == torch.float32
    assert type(state["second_moment_buffer"]) is Tensor
    assert type(state["momentum_buffer"]).__name__ == "OptimState4bit"


def test_shape_that_fits_no_block_is_refused_by_name():
    groups = [{"params": [("odd.weight", nn.Parameter(torch.zeros(70, 70)))]}]
    message = (
        r"odd.weight: shape \(70, 70\) leaves 4900 elements .* 'int8' needs whole blocks of 256"
    )
    with pytest.raises(ValueError, match=message):
        Muon(groups, state_dtype="int8")


def test_missing_torchao_is_named(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    quantized.quantized_class.cache_clear()
    try:
        with pytest.raises(ImportError, match="'int8' needs torchao: pip install torchao"):
            _optimizer("muon", "int8")
        assert _optimizer("muon", "bfloat16")
    finally:
        quantized.quantized_class.cache_clear()


def test_import_of_the_package_leaves_torchao_alone():
    import subprocess

    code = (
        "import sys, torch, titan_muon\n"
        "titan_muon.Muon([torch.zeros(64, 64)]).step()\n"
        "assert not any(n.partition('.')[0] == 'torchao' for n in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encoded_memory_is_what_the_format_promises():
    for state_dtype, most in (("int8", 1.02), ("float8", 1.02), ("int4", 0.54)):
        state = new_state(torch.zeros(512, 512), state_dtype)
        assert sum(b.nbytes for b in bits(state)) / 512**2 <= most


def test_memory_table_of_the_readme_is_todays():
    sys.path.insert(0, str(ROOT / "scripts"))
    import memory_table

    text = memory_table.README.read_text(encoding="utf-8")
    assert memory_table.with_table(text) == text, "run python scripts/memory_table.py --write"
