"""The optimizer's own kernels and a whole step on a GPU."""

import sys
from pathlib import Path

import pytest
import torch

from titan_muon import Muon
from titan_muon.optim.stopwatch import Stopwatch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(256, 512), (512, 256), (384, 384), (4, 96, 128), (65, 33)]


def _weights(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]


def _step(optimizer, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)
    optimizer.step()


def test_kernels_equal_reference():
    import test_pieces

    from titan_muon.kernels import triton_pieces

    test_pieces.check_operations(triton_pieces, "cuda")


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_steps_equal_the_cpu_within_float16(algorithm):
    runs = []
    for device in ("cpu", "cuda"):
        params = _weights(device)
        start = [p.detach().clone() for p in params]
        optimizer = Muon([{"params": params, "algorithm": algorithm}], lr=0.02)
        for seed in range(3):
            _step(optimizer, params, seed)
        runs.append([(p.detach() - s).cpu() for p, s in zip(params, start, strict=True)])
    for cpu, cuda in zip(*runs, strict=True):
        # float16 against float32 iteration; a square gaussian matrix has singular values near 0,
        # whose directions the rounding of 1e-3 turns.
        assert ((cpu - cuda).norm() / cpu.norm()).item() < 3e-2


def test_same_bits_run_to_run():
    results = []
    for _ in range(2):
        params = _weights("cuda")
        optimizer = Muon([{"params": params, "algorithm": "normuon"}], lr=0.02)
        for seed in range(3):
            _step(optimizer, params, seed)
        results.append([p.detach().clone() for p in params])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_steps_on_a_gpu_that_is_not_the_current_one(state_dtype):
    if state_dtype == "int8":
        pytest.importorskip("torchao", reason="the extra lp is not installed")
    results = []
    for device in ("cuda:0", "cuda:1"):
        params = _weights(device)
        groups = [
            {"params": params[::2], "algorithm": "normuon", "cautious_weight_decay": True},
            {"params": params[1::2], "algorithm": "muon"},
        ]
        options = {"lr": 0.02, "weight_decay": 0.1, "nonfinite": "skip"}
        optimizer = Muon(groups, state_dtype=state_dtype, **options)
        assert torch.cuda.current_device() == 0
        for seed in range(3):
            clock = Stopwatch(torch.device(device))
            with clock.part("step"):
                _step(optimizer, params, seed)
            assert clock.seconds()["step"] > 0
        results.append([p.detach().cpu() for p in params])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_captured_step_follows_the_lr_tensor():
    def run(captured):
        params = _weights("cuda")
        lr = torch.tensor(0.02, device="cuda")
        optimizer = Muon([{"params": params}], lr=lr)
        for param in params:
            param.grad = torch.randn(
                param.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
            )
        optimizer.step()
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            saved = [
                t.clone()
                for t in (*params, *(optimizer.state[p]["momentum_buffer"] for p in params))
            ]
            with torch.cuda.stream(stream):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            live = (*params, *(optimizer.state[p]["momentum_buffer"] for p in params))
            with torch.no_grad():
                for target, value in zip(live, saved, strict=True):
                    target.copy_(value)
        for rate in (0.02, 0.005, 0.04):
            lr.fill_(rate)
            graph.replay() if captured else optimizer.step()
        torch.cuda.synchronize()
        return [p.detach().clone() for p in params]

    for eager, replayed in zip(run(False), run(True), strict=True):
        assert torch.equal(eager, replayed)


def test_graph_of_backward_and_step_outlives_other_optimizers():
    """Gradients lie in the graph's own memory, at addresses that no table has yet."""

    def run(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
        model = model.cuda()
        x = torch.randn(64, 256, device="cuda")
        optimizer = Muon(model.parameters(), lr=torch.tensor(0.02, device="cuda"))

        def train() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                train()
            # Loads of what is there already, and more lists of addresses than are remembered.
            optimizer.load_state_dict(optimizer.state_dict())
            other = Muon([torch.nn.Parameter(torch.randn(64, 64, device="cuda"))])
            kept = []
            for _ in range(150):
                other.param_groups[0]["params"][0].grad = torch.randn(64, 64, device="cuda")
                kept.append(other.param_groups[0]["params"][0].grad)
                other.step()
        for _ in range(3):
            graph.replay() if captured else train()
        torch.cuda.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    for eager, replayed in zip(run(False), run(True), strict=True):
        assert torch.equal(eager, replayed)


def test_no_host_sync_in_a_step():
    params = _weights("cuda")
    optimizer = Muon(
        [{"params": params, "algorithm": "normuon"}], lr=torch.tensor(0.02, device="cuda")
    )
    _step(optimizer, params, 0)
    _step(optimizer, params, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_flat_over_many_steps():
    params = _weights("cuda")
    optimizer = Muon([{"params": params}], lr=0.02)
    # Gradients move, so the bounded cache of their addresses has to fill first.
    for seed in range(100):
        _step(optimizer, params, seed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(200):
        _step(optimizer, params, seed)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
