"""QK-clip on torchtitan's models in one process: refusals, rows of real weights, compilation."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from titan_muon.integration import cpu_runtime

if not cpu_runtime.needs_cpu_runtime():
    pytest.skip("trains on the GPU here", allow_module_level=True)
cpu_runtime.install()

from torch._dynamo.utils import counters  # noqa: E402
from torch.nn.attention.flex_attention import AuxOutput  # noqa: E402
from torchtitan.config import apply_overrides  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel  # noqa: E402

from tests.helpers.torchtitan_runs import MODELS, SEQ_LEN, run_config  # noqa: E402
from titan_muon.integration.cpu_modules import DenseMaskAttention, replace_modules  # noqa: E402
from titan_muon.integration.manager import TrainConfigManager  # noqa: E402
from titan_muon.integration.max_logits import (  # noqa: E402
    MaxLogitFlexAttention,
    reporting,
    with_max_logits,
)
from titan_muon.integration.override import qk_clip_attention  # noqa: E402
from titan_muon.integration.qk_clip import attach_qk_clip  # noqa: E402
from titan_muon.integration.toml_place import ConfigError  # noqa: E402

# float32 logits of up to 40 terms, against float64.
LOGIT = 1e-5
# Two documents in each sample.
DOCUMENT = 40
WHERE = "[optimizer] qk_clip_threshold = 100.0"


def small_llama3(n_kv_heads: int, *, is_fused: bool = True) -> Any:
    config = run_config("llama3 small", {}, "Muon")
    layers = llama3._build_llama3_layers(
        n_layers=1,
        dim=64,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        hidden_dim=96,
        rope=ComplexRoPE.Config(dim=16, max_seq_len=SEQ_LEN, theta=500000, scaling="llama"),
        attn_backend="flex",
        fuse_qkv=is_fused,
    )
    return with_layers(config, layers)


def small_deepseek_v3(q_lora_rank: int) -> Any:
    config = run_config("deepseek_v3 small", {}, "Muon")
    rope = config.model_spec.model.layers[0].attention.rope
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=1,
        n_dense_layers=1,
        dim=64,
        n_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=22,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        mscale=0.7,
        dense_hidden_dim=96,
        moe_hidden_dim=48,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="softmax",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope,
    )
    return with_layers(config, layers)


def with_layers(config: Any, layers: list[Any]) -> Any:
    config.model_spec.model.layers = layers
    replace_modules(config.model_spec.model)
    return config


def gpt_oss_small() -> Any:
    config = gpt_oss_debugmodel_flex()
    config.training.seq_len = SEQ_LEN
    del config.model_spec.model.layers[1:]
    return with_layers(config, config.model_spec.model.layers)


REAL = {
    "multi-head, fused": functools.partial(small_llama3, 4),
    "multi-head, separate": functools.partial(small_llama3, 4, is_fused=False),
    "grouped, fused": functools.partial(small_llama3, 2),
    "grouped, separate": functools.partial(small_llama3, 2, is_fused=False),
    "latent": functools.partial(small_deepseek_v3, 0),
    "latent, q_lora": functools.partial(small_deepseek_v3, 20),
    "gpt_oss": gpt_oss_small,
}


def built(config: Any) -> Any:
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model


def run(model: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (2, SEQ_LEN), generator=generator)
    positions = torch.arange(SEQ_LEN).remainder(DOCUMENT).expand(2, SEQ_LEN).contiguous()
    masks = model.get_attention_masks(positions=positions)
    return model(tokens, positions=positions, attention_masks=masks)


def attend(model: Any, seed: int = 0) -> torch.Tensor:
    """Return what the first layer's attention makes of random activations."""
    layer = next(iter(model.layers.values()))
    positions = torch.arange(SEQ_LEN).remainder(DOCUMENT).expand(2, SEQ_LEN).contiguous()
    masks = model.get_attention_masks(positions=positions)
    if isinstance(masks, dict):
        masks = masks[layer.attn_mask_key]
    dim = layer.attention.wo.weight.shape[0]
    x = torch.randn(2, SEQ_LEN, dim, generator=torch.Generator().manual_seed(seed))
    return layer.attention(x, masks, positions)


def logits_of(model: Any, seed: int = 0) -> torch.Tensor:
    """Return the largest logit of each head of layer 0, in float64 from its queries and keys."""
    found = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        q, k = (x.detach().double().transpose(1, 2) for x in args[:2])
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scale = kwargs["scale"] if kwargs.get("scale") is not None else q.shape[-1] ** -0.5
        positions = torch.arange(SEQ_LEN)
        same = positions[:, None] // DOCUMENT == positions // DOCUMENT
        mask = same & (positions[:, None] >= positions)
        found.append((scale * q @ k.mT).masked_fill(~mask, -torch.inf).amax((0, 2, 3)))

    inner = next(iter(model.layers.values())).attention.inner_attention
    handle = inner.register_forward_pre_hook(note, with_kwargs=True)
    try:
        attend(model, seed)
    finally:
        handle.remove()
    return found[0]


@pytest.mark.parametrize("name", REAL)
def test_rows_are_those_of_the_heads(name):
    """The clip brings exactly the heads above the threshold down to it, whatever the projection."""
    model = built(REAL[name]())
    attention = next(iter(model.layers.values())).attention
    # The sinks of gpt_oss come after its attention; on a CPU there are none.
    attention._apply_sinks = None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # At the start all logits are alike, and zero where keys start at zero.
        for name_, parameter in attention.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "bias" in name_:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    before = logits_of(model)
    threshold = before.sort().values[1:3].mean().item()
    clip = attach_qk_clip([model], threshold)
    attend(model).square().mean().backward()
    attend(model)
    values = {key: p.detach().clone() for key, p in model.named_parameters()}
    clip.step()
    assert clip.metrics()["max_logit"].item() == pytest.approx(before.max().item(), rel=LOGIT)
    clipped = int((before > threshold).sum())
    assert clip.metrics()["clipped_heads"].item() == clipped > 0
    expected = before.clamp(max=threshold)
    torch.testing.assert_close(logits_of(model), expected, rtol=LOGIT, atol=0)
    moved = {key for key, p in model.named_parameters() if not torch.equal(p, values[key])}
    assert all(".attention.w" in key or ".attention.qkv_linear.w" in key for key in moved)


@pytest.mark.parametrize("name", ["grouped, fused", "latent"])
def test_only_training_counts(name):
    model = built(REAL[name]())
    clip = attach_qk_clip([model], 1e-6)
    with torch.no_grad():
        run(model)
    model.eval()
    run(model)
    clip.step()
    assert clip.metrics()["max_logit"].item() == -torch.inf
    assert clip.metrics()["clipped_heads"].item() == 0
    model.train()
    run(model)
    clip.step()
    assert clip.metrics()["clipped_heads"].item() == 4


def test_maxima_are_no_state():
    """torch's pipelining restores buffers after its trial passes; a checkpoint must not have it."""
    model = built(REAL["grouped, fused"]())
    keys = list(model.state_dict())
    attach_qk_clip([model], 1.0)
    (name,) = (key for key, _ in model.named_buffers() if key.endswith("max_logits"))
    assert name == "layers.0.attention.inner_attention.max_logits"
    assert list(model.state_dict()) == keys


def test_attention_that_is_observed_computes_the_same():
    """Outputs and gradients of the attention with largest logits are those of torch's kernel."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 32, 4, 8), (2, 32, 2, 8), (2, 32, 2, 8)]
    mask_of = built(REAL["grouped, fused"]()).get_attention_masks
    mask = mask_of(positions=torch.arange(32).remainder(20).expand(2, 32).contiguous())
    results = []
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    for is_observed in (False, True):
        attention = DenseMaskAttention.Config().build()
        attention.max_logits = torch.full((4,), -torch.inf) if is_observed else None
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attention(q, k, v, attention_masks=mask, scale=0.3, enable_gqa=True)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for plain, observed in zip(*results, strict=True):
        # float32 sums of 32 terms in another order.
        torch.testing.assert_close(plain, observed, rtol=1e-4, atol=1e-5)


def written_out(q: Any, k: Any, v: Any, *, scale: float, return_aux: Any, **options: Any) -> Any:
    """What FlexAttention's compiled kernel computes, which only a GPU runs; without a mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = scale * q @ k.mT
    lse = logits.logsumexp(-1) if return_aux.lse else None
    maxima = logits.amax(-1) if return_aux.max_scores else None
    return logits.softmax(-1) @ v, AuxOutput(lse=lse, max_scores=maxima)


@pytest.mark.parametrize("transform", [None, lambda out, lse: out * lse.unsqueeze(-1)])
def test_flex_attention_asks_its_kernel_for_the_maxima(monkeypatch, transform):
    monkeypatch.setattr(FlexAttention, "compiled_flex_attn", staticmethod(written_out))
    config = FlexAttention.Config()
    stock, own = config.build(), reporting(config).build()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, n, 8, generator=generator) for n in (4, 2, 2))
    mask = built(REAL["grouped, fused"]()).get_attention_masks(
        positions=torch.arange(32).expand(2, 32).contiguous()
    )
    options = {"attention_masks": mask, "scale": 0.3, "enable_gqa": True}
    expected = stock(q, k, v, out_transform=transform, **options)
    # Nothing watches yet: torchtitan's own forward.
    assert torch.equal(own(q, k, v, out_transform=transform, **options), expected)
    own.max_logits = torch.full((4,), -torch.inf)
    with torch.no_grad():
        own(q, k, v, out_transform=transform, **options)
    assert own.max_logits.eq(-torch.inf).all()
    assert torch.equal(own(q, k, v, out_transform=transform, **options), expected)
    keys = k.repeat_interleave(2, dim=2).transpose(1, 2)
    logits = 0.3 * q.transpose(1, 2) @ keys.mT
    assert torch.equal(own.max_logits, logits.amax((0, 2, 3)))


@pytest.mark.parametrize(
    "policy",
    [
        SelectiveAC,
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(FullAC, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_observe_the_same_without_another_graph(policy):
    """One graph serves all layers, fullgraph holds, and three steps compile nothing again."""
    start = built(run_config("llama3 small", {}, "Muon"))
    found = {}
    for is_compiled, is_clipped in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        counters.clear()
        model = copy.deepcopy(start)
        clip = attach_qk_clip([model], 0.05) if is_clipped else None
        if policy is not None:
            policy.Config().build(dump_folder="").apply(model)
        if is_compiled:
            # As apply_compile does, with a backend that needs no C++ compiler.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            for block in model.layers.children():
                block.compile(backend="aot_eager", fullgraph=True)
        seen = []
        for step in range(3):
            run(model, step).float().square().mean().backward()
            if clip is not None:
                clip.step()
                seen.append(clip.metrics()["max_logit"].item())
        graphs = dict(counters["stats"]).get("unique_graphs", 0)
        found[is_compiled, is_clipped] = (seen, graphs, dict(counters["graph_break"]))
    assert found[True, True][0] == pytest.approx(found[False, True][0], rel=LOGIT)
    # Each step saw its own logits, those of weights that the step before had shrunk.
    assert found[True, True][0][1] < 0.7 * found[True, True][0][0]
    assert found[True, True][1] == found[True, False][1] > 0
    assert found[True, True][2] == {}


def refused(config: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        with_max_logits(config.model_spec.model, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: layers.0.attention ")


def test_attention_without_largest_logits_is_refused_by_name():
    config = MODELS["llama3 debug"]()
    layers = config.model_spec.model.layers
    layers[0].attention.inner_attention = VarlenAttention.Config()
    refused(config, "uses VarlenAttention, which does not report its logits; build the model")
    layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    refused(config, "uses ScaledDotProductAttention, which does not report its logits")
    layers[0].attention.inner_attention = FlexAttention.Config(kernel_options={"BACKEND": "FLASH"})
    refused(config, "uses FlexAttention's FLASH backend")


def test_query_and_key_norm_are_refused_with_the_reason():
    refused(qwen3_debugmodel(), "normalizes queries and keys, which undoes any scale")


def test_lora_and_unknown_attention_are_refused():
    config = MODELS["llama3 debug"]()
    attention = config.model_spec.model.layers[0].attention

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Other(type(attention)):
        pass

    fields = {f.name: getattr(attention, f.name) for f in dataclasses.fields(attention)}
    config.model_spec.model.layers[0].attention = Other(**fields)
    refused(config, "is of an unknown kind, .*Other")

    config = MODELS["llama3 debug"]()
    qkv = config.model_spec.model.layers[0].attention.qkv_linear

    @dataclasses.dataclass(kw_only=True, slots=True)
    class LoRA(type(qkv.wqkv)):
        rank: int = 4
        alpha: float = 1.0

    qkv.wqkv = LoRA(**{f.name: getattr(qkv.wqkv, f.name) for f in dataclasses.fields(qkv.wqkv)})
    refused(config, "has LoRA factors beside wqkv")


def test_a_model_whose_attention_was_not_prepared_is_refused():
    """Behind a stock command one override alone is a mistake; the message names the other one."""
    config = MODELS["llama3 debug"]()
    del config.model_spec.model.layers[1:]
    config.training.seq_len = SEQ_LEN
    model = built(config)
    with pytest.raises(ValueError, match=r"layers\.0\.attention uses FlexAttention.*qk_clip_att"):
        attach_qk_clip([model], 100.0)
    config = MODELS["llama3 debug"]()
    config.override.imports = ["titan_muon.integration.override.qk_clip_attention"]
    apply_overrides(config.override, config)
    inners = [layer.attention.inner_attention for layer in config.model_spec.model.layers]
    assert {type(inner) for inner in inners} == {MaxLogitFlexAttention.Config}
    prepared = DenseMaskAttention.Config()
    assert qk_clip_attention(prepared) is prepared


def parse(*args: str) -> Any:
    return TrainConfigManager(cuda_graphs=False).parse_args(list(args))


@pytest.mark.parametrize(
    "flag",
    [
        "--optimizer.qk_clip_threshold=50",
        '--override.imports=titan_muon.integration.override.muon={"qk_clip_threshold": 50}',
    ],
)
def test_every_door_prepares_the_model(flag):
    where = ["--module=titan_muon.integration", "--config=llama3_debug_muon"]
    config = parse(*where, flag)
    inners = {type(x.attention.inner_attention) for x in config.model_spec.model.layers}
    assert inners == {MaxLogitFlexAttention.Config}
    # And without it nothing is touched.
    inners = {type(x.attention.inner_attention) for x in parse(*where).model_spec.model.layers}
    assert inners == {FlexAttention.Config}


@pytest.mark.parametrize(
    ("module", "flags", "match"),
    [
        ("llama3", ["--optimizer.qk_clip_threshold=0"], "qk_clip_threshold = 0.0 must be a number"),
        ("llama3", ["--optimizer.qk_clip_threshold=-3"], "must be a number above 0"),
        ("qwen3", ["--optimizer.qk_clip_threshold=100"], r"= 100\.0: layers\.0\.attention norm"),
    ],
)
def test_mistakes_end_before_anything_is_built(module, flags, match):
    config = f"--config={module}_debugmodel"
    with pytest.raises(ConfigError, match=match):
        parse(f"--module={module}", config, "--optimizer.name=Muon", *flags)
