"""torchtitan on a CPU: the parts by themselves, then real Trainers on 4 gloo processes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("torchtitan")

from torch.distributed.tensor.experimental._context_parallel import (
    _attention as context_parallel,
)
from torch.nn.attention.flex_attention import and_masks
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts

from titan_muon.integration import cpu_collectives, cpu_modules, cpu_runtime, data
from titan_muon.integration.cpu_modules import DenseMaskAttention, FullPrecisionExperts

ROOT = Path(__file__).parents[2]


def _positions(batch: int, length: int) -> torch.Tensor:
    """Documents of other lengths in each row; the last one is cut off."""
    rows = []
    for row in range(batch):
        row_positions = [p for size in (3 + row, 1, 5, length) for p in range(size)]
        rows.append(row_positions[:length])
    return torch.tensor(rows)


def _reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention written out for each query, in the document up to the query."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            start = i - int(positions[b, i])
            for n in range(q.shape[2]):
                keys, values = k[b, start : i + 1, n // group], v[b, start : i + 1, n // group]
                out[b, i, n] = functional.softmax(keys @ q[b, i, n] * scale, dim=0) @ values
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 8), (3, 3, 12, 8)],
    ids=["all heads", "grouped", "one key head", "latent: other value width"],
)
@pytest.mark.parametrize("batch", [1, 2], ids=["one row", "two rows"])
def test_attention_equals_the_written_out_sum(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, batch: int
) -> None:
    length, scale = 20, 0.3
    generator = torch.Generator().manual_seed(0)

    def draw(n: int, width: int) -> torch.Tensor:
        return torch.randn(
            batch, length, n, width, generator=generator, dtype=torch.float64
        ).requires_grad_()

    inputs = draw(heads, head_dim), draw(kv_heads, head_dim), draw(kv_heads, value_dim)
    positions = _positions(batch, length)
    # torchtitan's own masks: another formula for one row than for several.
    mask_mod = and_masks(
        titan_attention.get_causal_mask_mod(),
        titan_attention.get_efficient_causal_mask_mod_for_packed_document(positions),
    )
    mask = cpu_modules._all_blocks_mask(mask_mod, batch, None, length, length)
    module = DenseMaskAttention.Config().build()
    out = module(*inputs, attention_masks=mask, scale=scale, enable_gqa=heads != kv_heads)
    expected = _reference_attention(*inputs, positions, scale)
    # float64 sums of 20 terms.
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_attention_refuses_what_it_cannot_compute() -> None:
    module = DenseMaskAttention.Config().build()
    x = torch.zeros(1, 4, 1, 8)
    mask = cpu_modules._all_blocks_mask(titan_attention.get_causal_mask_mod(), 1, None, 4, 4)
    with pytest.raises(TypeError, match="BlockMask as attention_masks, got NoneType"):
        module(x, x, x, attention_masks=None)
    with pytest.raises(NotImplementedError, match="score_mod"):
        module(x, x, x, attention_masks=mask, score_mod=lambda score, *_: score)
    with pytest.raises(NotImplementedError, match="out_transform"):
        module(x, x, x, attention_masks=mask, out_transform=lambda out, lse: out)


def test_experts_equal_one_product_per_token() -> None:
    generator = torch.Generator().manual_seed(0)
    config = FullPrecisionExperts.Config(dim=8, hidden_dim=6, num_experts=4)
    experts = config.build().double()
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(generator=generator)
    counts = torch.tensor([3, 0, 5, 1])
    x = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(4), counts)
    gate, up, down = experts.w1_EFD[owner], experts.w3_EFD[owner], experts.w2_EDF[owner]

    def apply(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (weight @ rows.unsqueeze(-1)).squeeze(-1)

    expected = apply(down, functional.silu(apply(gate, x)) * apply(up, x))
    # float64 sums of 8 terms.
    torch.testing.assert_close(experts(x, counts), expected, rtol=1e-12, atol=1e-12)
    # An expert without tokens gets a zero gradient, not None.
    experts(x, counts).sum().backward()
    assert experts.w1_EFD.grad is not None
    assert experts.w1_EFD.grad[1].abs().max() == 0
    assert experts.w1_EFD.grad[0].abs().max() > 0


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.protocols.model import BaseModel

    # Put back what adapt_config changes in torchtitan.
    monkeypatch.setattr(BaseModel, "init_weights", BaseModel.init_weights)
    for module in (titan_attention, context_parallel):
        name = "_compiled_create_block_mask"
        monkeypatch.setattr(module, name, getattr(module, name))
    return deepseek_v3_debugmodel()


def test_adapt_config_replaces_nodes_and_keeps_their_fields(config: Any) -> None:
    model = config.model_spec.model
    marker = object()
    for _, node, _, _ in model.traverse(FlexAttention.Config):
        node.sharding_config = marker
    initialisers = [node.param_init for _, node, _, _ in model.traverse(GroupedExperts.Config)]
    adapted = cpu_runtime.adapt_config(config)
    attentions = [node for _, node, _, _ in model.traverse(FlexAttention.Config)]
    assert len(attentions) == len(model.layers)
    for node in attentions:
        assert type(node) is DenseMaskAttention.Config
        assert node.sharding_config is marker
    experts = [node for _, node, _, _ in model.traverse(GroupedExperts.Config)]
    assert {type(node) for node in experts} == {FullPrecisionExperts.Config}
    assert [node.param_init for node in experts] == initialisers
    assert adapted.training.disable_cuda_graphs
    assert adapted.training.mixed_precision_param == "float32"
    # Once more changes nothing.
    parts = [type(node) for _, node, _, _ in model.traverse(FlexAttention.Config)]
    cpu_runtime.adapt_config(adapted)
    assert [type(node) for _, node, _, _ in model.traverse(FlexAttention.Config)] == parts


def test_adapt_config_switches_compilation_off(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config.compile.enable = True
    config.activation_checkpoint = MemoryBudgetAC.Config()
    with caplog.at_level("INFO", "titan_muon"):
        cpu_runtime.adapt_config(config)
    assert not config.compile.enable
    assert config.activation_checkpoint is None
    (record,) = caplog.records
    assert "compile.enable = false" in record.message
    assert "a memory budget needs compilation" in record.message
    assert "FlexAttention by DenseMaskAttention" in record.message


def test_adapt_config_refuses_what_only_a_gpu_has(config: Any) -> None:
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher

    for section, name, value in (
        ("profiler", "enable_memory_snapshot", True),
        ("debug", "spmd_typechecking", True),
        ("comm", "mode", "torchcomms"),
    ):
        table = getattr(config, section)
        plain = getattr(table, name)
        setattr(table, name, value)
        with pytest.raises(ValueError, match=rf"{section}\.{name} = .*leave it out"):
            cpu_runtime.adapt_config(config)
        setattr(table, name, plain)
    first_attention = config.model_spec.model.layers[0].attention
    flex = first_attention.inner_attention
    first_attention.inner_attention = VarlenAttention.Config(window_size=(64, 0))
    with pytest.raises(ValueError, match=r"layers\.0.*window_size = \(64, 0\).*GPU"):
        cpu_runtime.adapt_config(config)
    first_attention.inner_attention = flex
    experts = config.model_spec.model.layers[-1].moe.routed_experts
    kept = dataclasses.asdict(experts.token_dispatcher)
    experts.token_dispatcher = DeepEPTokenDispatcher.Config(
        num_experts=kept["num_experts"], top_k=kept["top_k"]
    )
    with pytest.raises(ValueError, match=r"token_dispatcher: DeepEPTokenDispatcher needs a GPU"):
        cpu_runtime.adapt_config(config)


def test_all_to_all_refuses_to_be_asynchronous() -> None:
    with pytest.raises(NotImplementedError, match="async_op"):
        cpu_collectives.all_to_all([], [], async_op=True)


@pytest.mark.skipif(not cpu_runtime.needs_cpu_runtime(), reason="trains on the GPU here")
def test_install_makes_torchtitan_take_the_cpu() -> None:
    """In a fresh process, with torchtitan imported before and after the call."""
    script = """
import torchtitan.components.metrics as before
from titan_muon.integration import cpu_runtime
cpu_runtime.install()
cpu_runtime.install()
import torchtitan.distributed.utils as after
for module in (before, after):
    assert module.device_type == "cpu", module
    assert module.device_module.device_count() == 1
monitor = before.build_device_memory_monitor()
assert 0 < monitor.get_peak_stats().max_active_gib < monitor.device_capacity_gib
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of cpu_meshes.py, by mesh."""
    if not cpu_runtime.needs_cpu_runtime():
        pytest.skip("trains on the GPU here")
    folder = tmp_path_factory.mktemp("meshes")
    tokenizer = data.prepare(folder / "data").tokenizer
    log = folder / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-ranks-filter=0"]
    command += [str(Path(__file__).with_name("cpu_meshes.py")), str(tokenizer)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["mesh"]: result for result in results}


MESHES = [
    "llama3 fsdp",
    "llama3 hsdp",
    "llama3 pp x fsdp",
    "llama3 cp x fsdp",
    "deepseek_v3 fsdp",
    "deepseek_v3 ddp",
    "deepseek_v3 fsdp x tp",
    "deepseek_v3 ep x fsdp",
    "deepseek_v3 ep x tp",
]


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_start_as_one_process_would_draw_them(
    meshes: dict[str, dict[str, Any]], mesh: str
) -> None:
    assert meshes[mesh]["compared"] >= 8
    assert meshes[mesh]["differing"] == 0


def test_torchtitans_own_initialisation_does_differ(meshes: dict[str, dict[str, Any]]) -> None:
    """When this fails, torchtitan's own has become mesh-independent and ours may go."""
    assert meshes["deepseek_v3 fsdp"]["differing_without_ours"] > 0


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_sees_the_same_losses(meshes: dict[str, dict[str, Any]], mesh: str) -> None:
    yardstick = meshes[mesh.split()[0] + " fsdp"]["steps"]
    losses, norms = zip(*meshes[mesh]["steps"], strict=True)
    expected_losses, expected_norms = zip(*yardstick, strict=True)
    # float32 sums of up to 2048 tokens' losses in another order; 1e-7 seen.
    assert losses == pytest.approx(expected_losses, rel=2e-6)
    # torch sums squares of up to half a million float32 elements naively; 4e-5 seen.
    assert norms == pytest.approx(expected_norms, rel=2e-4)
