"""FSDP2 with CPU offload, state dtypes and stochastic rounding on a GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.test_rounding import check_kernel
from titan_muon import Muon, param_groups
from titan_muon.distributed.tensors import local_of
from titan_muon.optim.rounding import Rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (512, 768, 1024)


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def _model(mesh, offload: bool, dtype=torch.float32) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.manual_seed(0)
    layers = [nn.Linear(n, n, bias=False) for n in SIZES for _ in range(3)]
    model = nn.Sequential(*layers).to(dtype=dtype)
    model = model if offload else model.cuda()
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def _train(model: nn.Module, optimizer: Muon, steps: int) -> None:
    from torch.distributed.tensor import DTensor

    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float32)
            local = local_of(param)
            moved = grad.to(local.dtype).to(local.device)
            param.grad = DTensor.from_local(
                moved, param.device_mesh, param.placements, run_check=False
            ).to(local.device)
        optimizer.step()


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamuon", "aurora"])
@pytest.mark.parametrize(
    "options",
    [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}, {"max_stage_bytes": 1 << 24}],
    ids=str,
)
def test_offloaded_update_is_that_of_the_gpu(mesh, algorithm, options):
    if options.get("state_dtype") == "int8":
        pytest.importorskip("torchao")
    results = []
    for offload in (False, True):
        model = _model(mesh, offload)
        start = [local_of(p.detach()).clone() for p in model.parameters()]
        optimizer = Muon(param_groups(model, algorithm), lr=0.02, **options)
        _train(model, optimizer, 3)
        for param in model.parameters():
            momentum = local_of(optimizer.state[param]["momentum_buffer"])
            assert momentum.device.type == ("cpu" if offload else "cuda")
            if offload and options.get("state_dtype") != "int8":
                assert momentum.is_pinned()
        results.append(
            [
                (local_of(p.detach()) - s).cpu()
                for p, s in zip(model.parameters(), start, strict=True)
            ]
        )
    for resident, offloaded in zip(*results, strict=True):
        # The same kernels on the same numbers; float16 iterations batch alike.
        assert ((resident - offloaded).norm() / resident.norm()).item() < 1e-6


def test_training_step_with_offload(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = Muon(param_groups(model), lr=0.02, adjust_lr_fn="match_rms_adamw")
    x = torch.randn(64, 256, device="cuda")
    losses = []
    for _ in range(8):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_offloaded_step_holds_a_bounded_part_on_the_gpu(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    # 256 MiB of weights, as much momentum and gradient; a stage of about four matrices.
    optimizer = Muon(param_groups(model), lr=0.02, max_stage_bytes=1 << 26)
    _train(model, optimizer, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _train(model, optimizer, 1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * (1 << 26), f"{peak / 2**20:.0f} MiB"
    assert torch.cuda.memory_allocated() - before < 1 << 22


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "float8"])
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamuon", "adamw"])
def test_quantised_state_agrees_with_the_cpu(algorithm, state_dtype):
    pytest.importorskip("torchao")
    runs = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        shapes = [(128, 256), (256, 128), (2, 64, 128)]
        params = [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]
        start = [p.detach().clone() for p in params]
        optimizer = Muon(
            [{"params": params, "algorithm": algorithm}],
            lr=0.02, state_dtype=state_dtype, ns_dtype="float32",
        )  # fmt: skip
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(device)
            optimizer.step()
        runs.append([(p.detach() - s).cpu() for p, s in zip(params, start, strict=True)])
    for cpu, cuda in zip(*runs, strict=True):
        # A value that falls between two codes may go either way, one rounding of the format apart.
        assert ((cpu - cuda).norm() / cpu.norm()).item() < 0.02


def test_rounding_kernel_equals_reference():
    pytest.importorskip("triton", reason="the kernels need triton")
    from titan_muon.kernels import triton_rounding

    check_kernel(triton_rounding.round_to_bfloat16, "cuda")


def test_noise_is_that_of_the_cpu_wherever_the_step_lies():
    rounding = Rounding(nn.Parameter(torch.zeros(3, 2, 500)), "layers.0.weight", 3)
    values = torch.linspace(-1.9, 1.9, 3000)
    for start in (0, 7, 1250):
        want = rounding(values[start:], torch.tensor(9.0), start)
        for step in (torch.tensor(9.0), torch.tensor(9.0, device="cuda")):
            assert torch.equal(rounding(values[start:].cuda(), step, start).cpu(), want)


def test_a_chunk_is_rounded_by_one_kernel():
    rounding = Rounding(nn.Parameter(torch.zeros(64, 512)), "layers.0.weight", 3)
    values, step = torch.randn(1 << 15, device="cuda"), torch.tensor(9.0, device="cuda")
    rounding(values, step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rounding(values, step)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [kernel.name for kernel in kernels]


def test_stochastic_rounding_agrees_with_the_cpu():
    runs = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device))
            for s in [(128, 256), (100,), (64, 64)]
        ]
        groups = [{"params": params[::2]}, {"params": params[1:2], "algorithm": "adamw"}]
        optimizer = Muon(groups, lr=0.02, stochastic_rounding=True, ns_dtype="float32")
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(device)
            optimizer.step()
        runs.append([p.detach().cpu() for p in params])
    for cpu, cuda in zip(*runs, strict=True):
        # float32 sums in another order move a value across its noise in few places; other noise
        # would differ in half of them.
        assert (cpu != cuda).float().mean().item() < 0.05


def test_elementwise_weights_of_one_group_may_lie_on_two_devices():
    runs = []
    for devices in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu")):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(40, generator=generator).bfloat16().to(d)) for d in devices
        ]
        optimizer = Muon([{"params": params, "algorithm": "adamw"}], lr=0.1)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(40, generator=generator).bfloat16().to(param.device)
            optimizer.step()
        runs.append([p.detach().cpu().float() for p in params])
    for one, two in zip(*runs, strict=True):
        # The fused kernel of a GPU may round float32 otherwise, so a weight by one bfloat16.
        torch.testing.assert_close(two, one, rtol=2**-7, atol=1e-6)


def test_no_host_sync_with_quantised_state_and_rounding():
    pytest.importorskip("torchao")
    params = [nn.Parameter(torch.randn(256, 512, device="cuda").bfloat16()) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}]
    optimizer = Muon(groups, lr=0.02, stochastic_rounding=True, state_dtype="int8")
    for step in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
