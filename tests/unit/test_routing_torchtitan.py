"""Routing of torchtitan's debug models, and the rows of its fused weights."""

import importlib
import re

import pytest
import torch
from torch import nn

from titan_muon import Muon, param_groups
from titan_muon.optim.param_groups import assign

# torchtitan's debug models on the meta device: every kind of parameter of two dims or more.
ATTENTION = {"layers.*.attention.qkv_linear.wqkv.weight", "layers.*.attention.wo.weight"}
FEED_FORWARD = {f"layers.*.feed_forward.w{i}.weight" for i in (1, 2, 3)}
EXPERTS = {
    f"layers.*.moe.routed_experts.inner_experts.{w}" for w in ("w1_EFD", "w2_EDF", "w3_EFD")
} | {"layers.*.moe.router.gate.weight"}
LATENT = {f"layers.*.attention.{w}.weight" for w in ("wq", "wkv_a", "wkv_b", "wo")}
SHARED = {f"layers.*.moe.shared_experts.w{i}.weight" for i in (1, 2, 3)}
OSS = "layers.*.moe.routed_experts.inner_experts."
TORCHTITAN = {
    ("llama3", "debugmodel"): (ATTENTION | FEED_FORWARD, {"lm_head.weight"}),
    ("deepseek_v3", "debugmodel"): (
        LATENT | FEED_FORWARD | EXPERTS | SHARED,
        {"lm_head.weight"},
    ),
    ("qwen3", "debugmodel"): (ATTENTION | FEED_FORWARD, set()),  # tied
    ("qwen3", "debugmodel_moe"): (ATTENTION | EXPERTS, {"lm_head.weight"}),
    ("gpt_oss", "debugmodel"): (
        ATTENTION
        | {OSS + "mlp1_weight_EGD", OSS + "mlp2_weight_EDF", "layers.*.moe.router.gate.weight"},
        {"lm_head.weight", OSS + "mlp1_bias_EG", OSS + "mlp2_bias_ED"},
    ),
}


def _debug_model(family: str, flavor: str) -> nn.Module:
    pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    with torch.device("meta"):
        return registry(flavor).model.build()


@pytest.mark.parametrize(("family", "flavor"), TORCHTITAN)
def test_torchtitan_models(family, flavor):
    model = _debug_model(family, flavor)
    matrices, others = TORCHTITAN[family, flavor]
    decisions = assign(model, ("muon", {}), ("adamw", {}))
    found: dict[str, set[str]] = {"muon": set(), "adamw": set()}
    for item in decisions:
        if item.param.ndim > 1:
            found[item.algorithm].add(re.sub(r"\.\d+\.", ".*.", item.name))
        else:
            assert item.algorithm == "adamw"
    assert found == {"muon": matrices, "adamw": others | {"tok_embeddings.weight"}}
    assert [d.name for d in decisions] == [n for n, _ in model.named_parameters()]
    Muon(param_groups(model))


def test_torchtitan_fused_weights_know_their_rows():
    model = _debug_model("gpt_oss", "debugmodel")
    from titan_muon.integration.fused_weights import fused_splits

    splits = fused_splits(model)
    attention = model.layers["0"].attention
    split = splits["layers.0.attention.qkv_linear.wqkv.weight"]
    rows = attention.qkv_linear.wqkv.weight.shape[0]
    assert split["n_kv_heads"] * (split["heads_per_kv"] + 2) * split["head_dim"] == rows
    # q is what wo reads.
    heads = split["n_kv_heads"] * split["heads_per_kv"]
    assert heads * split["head_dim"] == attention.wo.weight.shape[1]
    assert splits[OSS.replace("*", "0") + "mlp1_weight_EGD"] == {"kind": "strided", "count": 2}
    routed = assign(model, ("muon", {}), ("adamw", {}), splits=splits)
    assert {d.name for d in routed if "split" in d.options} == set(splits)
    Muon([{"params": [d.param], "algorithm": d.algorithm, **d.options} for d in routed])


@pytest.mark.parametrize("experts", [False, True])
def test_gate_and_up_of_the_fused_override_are_two_matrices(experts):
    pytest.importorskip("triton", reason="torchtitan's fused_swiglu override needs it")
    fused_swiglu = pytest.importorskip("torchtitan.overrides.fused_swiglu")
    from titan_muon.integration.fused_weights import fused_splits

    kind = fused_swiglu.FusedGroupedExperts if experts else fused_swiglu.FusedSwiGLU
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    shape = (3, 12, 2, 8) if experts else (12, 2, 8)
    module.w13 = nn.Parameter(torch.randn(shape))
    model = nn.ModuleDict({"feed_forward": module})
    splits = fused_splits(model)
    assert splits == {"feed_forward.w13": {"kind": "fused_dim"}}
    (routed,) = assign(model, ("muon", {}), ("adamw", {}), splits=splits)
    optimizer = Muon([{"params": [routed.param], "algorithm": "muon", **routed.options}])
    (work,) = optimizer._matrix_works()
    assert [(u.rows, u.columns) for u in work.plan.units] == [(12, 8)] * (6 if experts else 2)
