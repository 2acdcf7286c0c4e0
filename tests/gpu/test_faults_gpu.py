"""Non-finite gradients, determinism, and saves in flight on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from titan_muon import Muon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(256, 512), (384, 384), (4, 96, 128), (65, 33)]
ALGORITHMS = ("muon", "normuon", "adamuon", "aurora", "adamw", "adam")


def _optimizer(nonfinite: str, dtype: torch.dtype = torch.float32, **adamw) -> Muon:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for algorithm in ALGORITHMS:
        params = [
            torch.nn.Parameter(torch.randn(s, generator=generator).to("cuda", dtype))
            for s in SHAPES
        ]
        options = adamw if algorithm.startswith("adam") and algorithm != "adamuon" else {}
        groups.append({"params": params, "algorithm": algorithm, **options})
    return Muon(groups, lr=torch.tensor(0.02, device="cuda"), nonfinite=nonfinite)


def _params(optimizer: Muon) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _give(optimizer: Muon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in _params(optimizer):
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = gradient.to(param.device, param.dtype)


def _poison(optimizer: Muon, index: int, value: float) -> None:
    gradient = _params(optimizer)[index].grad
    assert gradient is not None
    gradient.view(-1)[3] = value


def _bits(optimizer: Muon) -> list[Tensor]:
    params = _params(optimizer)
    state = [v for p in params for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*params, *state]]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adamw", [{}, {"fused": False}, {"fused": False, "foreach": True}])
def test_skipped_step_changes_no_bit(value, dtype, adamw):
    optimizer = _optimizer("skip", dtype, **adamw)
    for seed in range(2):
        _give(optimizer, seed)
        optimizer.step()
    # One parameter of every algorithm in turn.
    for count, index in enumerate(range(0, len(_params(optimizer)), len(SHAPES))):
        before = _bits(optimizer)
        _give(optimizer, 10 + count)
        _poison(optimizer, index, value)
        optimizer.step()
        assert _same(_bits(optimizer), before), index
        assert optimizer.skipped_steps == count + 1
    _give(optimizer, 30)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(_bits(optimizer), before, strict=True))
    assert all(t.isfinite().all() for t in _bits(optimizer))


def test_skip_waits_for_nothing():
    optimizer = _optimizer("skip")
    for seed in range(2):
        _give(optimizer, seed)
        optimizer.step()
    _poison(optimizer, 0, math.nan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 1


def test_captured_step_skips_and_counts():
    optimizer = _optimizer("skip")
    _give(optimizer, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = _bits(optimizer)
    gradient = _params(optimizer)[0].grad
    assert gradient is not None
    whole = gradient.clone()
    gradient.view(-1)[0] = math.nan
    for _ in range(3):
        graph.replay()
    assert _same(_bits(optimizer), before)
    assert optimizer.skipped_steps == 3
    gradient.copy_(whole)
    graph.replay()
    assert not torch.equal(_bits(optimizer)[0], before[0])
    assert optimizer.skipped_steps == 3


def test_error_names_it_and_is_refused_under_capture():
    optimizer = _optimizer("error")
    _give(optimizer, 0)
    optimizer.step()
    before = _bits(optimizer)
    _poison(optimizer, 5, math.inf)
    expected = r"1 of 24 parameters .* param group 1: parameter 1 \(inf\)"
    with pytest.raises(FloatingPointError, match=expected):
        optimizer.step()
    assert _same(_bits(optimizer), before)
    with (
        pytest.raises(RuntimeError, match="use nonfinite = 'skip'"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_run_to_run_with_every_algorithm(dtype):
    runs = []
    for _ in range(2):
        optimizer = _optimizer("skip", dtype)
        for seed in range(4):
            _give(optimizer, seed)
            optimizer.step()
        runs.append(_bits(optimizer))
    assert _same(*runs)


@pytest.mark.parametrize("algorithm", ALGORITHMS[:4])
def test_momentum_that_fades_away_never_becomes_a_nan(algorithm):
    """Gradients of zero until the momentum is nothing; its squares leave float32 at 1e-23."""
    w = torch.nn.Parameter(torch.randn(96, 160, device="cuda"))
    options = {"lr": 1e-4, "weight_decay": 0.0, "momentum": 0.5}
    optimizer = Muon([{"params": [w], "algorithm": algorithm, **options}])
    w.grad = torch.randn_like(w)
    optimizer.step()
    w.grad.zero_()
    for step in range(160):
        optimizer.step()
        assert w.isfinite().all(), step


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-24, 1e-18, 1e15, 1e30])
def test_size_of_a_direction_matters_little_where_squares_under_and_overflow(size):
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(96, 160, device="cuda"))
    gradient, updates = torch.randn_like(w), []
    for scale in (1.0, size):
        optimizer = Muon([w], lr=0.1, weight_decay=0.0)
        before = w.detach().clone()
        w.grad = gradient * scale
        optimizer.step()
        updates.append(w.detach() - before)
        with torch.no_grad():
            w.copy_(before)
    # There the norm is bounded by the largest element, four times too large for a gaussian: small
    # singular values end at another place of the band.
    assert ((updates[0] - updates[1]).norm() / updates[0].norm()).item() < 0.2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["gaussian", "condition 1e6", "power law"])
def test_finite_in_finite_out(kind, dtype):
    """A thousand matrices of each spectrum through every evaluation that the GPU chooses."""
    from tests.helpers.spectra import matrix
    from titan_muon import orthogonalize

    base = matrix(kind, 512, 1408).float().to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        signs = torch.randint(0, 2, (50, 512, 1), device="cuda", generator=generator) * 2.0 - 1.0
        x = base[:, torch.randperm(1408, device="cuda", generator=generator)] * signs
        for shape in (x, x.mT.contiguous(), x[..., :512].contiguous()):
            y = orthogonalize(shape, ns_dtype=dtype)
            assert y.isfinite().all()
            assert torch.linalg.matrix_norm(y[:4].float(), 2).max() < 1.5


@pytest.mark.parametrize("mode", ["thread", "pinned"])
def test_save_in_flight_does_not_see_the_next_step(mode, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    optimizer = _optimizer("propagate")
    _give(optimizer, 0)
    optimizer.step()
    saved = _bits(optimizer)
    number = dict(enumerate(_params(optimizer)))
    tensors = {f"w{i}": p.detach() for i, p in number.items()}
    tensors |= {f"s{i}.{k}": v for i, p in number.items() for k, v in optimizer.state[p].items()}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        stager = None
        if mode == "pinned":
            # As torchtitan's checkpoint.async_mode = "async_with_pinned_mem" asks for it.
            stager = DefaultStager(StagingOptions(True, True, True, True))
        done = dcp.async_save(tensors, checkpoint_id=tmp_path / "save", async_stager=stager)
        if mode == "pinned":
            # torchtitan waits for this before its next optimizer step.
            done.staging_completion.result()
            done = done.upload_completion
        for seed in range(1, 6):
            _give(optimizer, seed)
            optimizer.step()
        torch.cuda.synchronize()
        done.result()
        loaded = {key: torch.zeros_like(value) for key, value in tensors.items()}
        dcp.load(loaded, checkpoint_id=tmp_path / "save")
        order = [f"w{i}" for i in number]
        order += [f"s{i}.{k}" for i, p in number.items() for k in optimizer.state[p]]
        assert _same([loaded[key] for key in order], saved)
        assert not torch.equal(_bits(optimizer)[0], saved[0])
    finally:
        torch.distributed.destroy_process_group()
