"""Routing of hand-made modules to algorithms."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_muon import Muon, Rule, param_groups
from titan_muon.optim.param_groups import assign, canonical_name


def _routes(model: nn.Module, **kwargs) -> dict[str, tuple[str, str]]:
    """Return name -> (algorithm, reason)."""
    decisions = assign(model, ("muon", {}), ("adamw", {}), **kwargs)
    return {d.name: (d.algorithm, d.reason) for d in decisions}


def _nest(path: str, module: nn.Module) -> nn.Module:
    """Return a model that holds a module under a dotted path."""
    for segment in reversed(path.split(".")):
        outer = nn.Module()
        outer.add_module(segment, module)
        module = outer
    return module


def _route_of(path: str, module: nn.Module | None = None) -> tuple[str, str]:
    model = _nest(path, module or nn.Linear(6, 4, bias=False))
    return _routes(model)[f"{path}.weight"]


MATRIX = ("muon", "hidden matrix")


@pytest.mark.parametrize(
    "path",
    [
        "lm_head",
        "model.lm_head",
        "base_model.model.lm_head",
        "mtp.layers.0.lm_head",
        "model.layers.61.shared_head.head",
        "output",
        "model.output",
        "decoder.output",
        "head",
        "heads.head",
        "transformer.head",
        "head.fc",
        "head.0",
        "classifier",
        "score",
        "model.score",
        "qa_outputs",
        "out",
        "decoder",
        "model.decoder",
        "cls_head",
        "policy_head.2",
        "fc",
        "embed_out",
        "unembed",
        "proj_out",
        "decoder.output_projection",
    ],
)
def test_output_heads(path):
    assert _route_of(path) == ("adamw", "output head")


@pytest.mark.parametrize(
    "path",
    [
        "attention.output",
        "mlp.output",
        "layers.0.attention.output",
        "layers.0.mlp.output",
        # Hugging Face BERT, whole and one layer alone.
        "bert.encoder.layer.0.attention.output.dense",
        "bert.encoder.layer.0.output.dense",
        "attention.output.dense",
        "output.dense",
        "bert.pooler.dense",
        "layers.0.attn.head",
        "fc1",
        "model.fc2",
        "layers.0.fc",
        "layers.0.attn.proj_out",
        "classifier.0",
        "moe.router.gate",
        "layers.0.moe.router.gate",
        "patch_embed",
        "embed_proj",
        "q_proj",
    ],
)
def test_names_that_look_like_heads_or_embeddings_and_are_matrices(path):
    assert _route_of(path) == MATRIX


@pytest.mark.parametrize(
    "path", ["embed", "tok_embeddings", "transformer.wte", "model.embed_tokens"]
)
def test_embeddings_by_name(path):
    assert _route_of(path) == ("adamw", "embedding")


def test_embeddings_by_type():
    for module in (nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)):
        assert _route_of("vocabulary", module) == ("adamw", "embedding")


@pytest.mark.parametrize(
    "name",
    [
        "pos_embed",
        "pos_embedding",
        "position_embeddings",
        "positional_embedding",
        "class_embedding",
        "cls_token",
        "class_token",
        "register_tokens",
        "mask_token",
        "wpe",
    ],
)
def test_learned_tokens_and_positions(name):
    encoder = nn.Module()
    encoder.register_parameter(name, nn.Parameter(torch.zeros(1, 7, 6)))
    assert _routes(_nest("encoder", encoder)) == {f"encoder.{name}": ("adamw", "embedding")}


class RMSNorm2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))


class NormalizedLinear(RMSNorm2d):
    pass


def test_norms_by_type_and_by_class_name():
    for module in (nn.LayerNorm((4, 6)), RMSNorm2d(), nn.BatchNorm2d(6), nn.GroupNorm(2, 6)):
        assert _route_of("layers.0.thing", module) == ("adamw", "norm")
    assert _route_of("layers.0.thing", NormalizedLinear()) == MATRIX


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp1_bias_EG", (8, 6)),
        ("bias", (6,)),
        ("relative_position_bias_table", (49, 4)),
        ("attention_biases", (4, 49)),
        ("q_bias", (2, 3, 4)),
    ],
)
def test_biases_of_any_shape(name, shape):
    experts = nn.Module()
    experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert _routes(_nest("layers.0.experts", experts))[f"layers.0.experts.{name}"] == (
        "adamw",
        "bias",
    )


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((), "0-D"),
        ((6,), "1-D"),
        ((6, 1), "one row or column"),
        ((1, 6), "one row or column"),
        ((3, 1, 6), "one row or column"),
        ((0, 6), "empty"),
        ((4, 6), "hidden matrix"),
        ((3, 4, 6), "hidden matrix"),
    ],
)
def test_shapes(shape, reason):
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(shape)))
    assert _routes(model)["w"][1] == reason


def test_weight_norm_gains_are_no_matrices():
    model = _nest("layers.0.wq", nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)))
    prefix = "layers.0.wq.parametrizations.weight"
    routes = _routes(model)
    assert routes[f"{prefix}.original0"] == ("adamw", "one row or column")
    assert routes[f"{prefix}.original1"] == MATRIX


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("encoder.conv1", nn.Conv1d(80, 8, 3, bias=False)),  # whisper
        ("patch_embed.proj", nn.Conv2d(3, 8, 4, bias=False)),  # timm
        ("conv_proj", nn.Conv2d(3, 8, 4, bias=False)),  # torchvision
        ("vision.embeddings.patch_embedding", nn.Conv2d(3, 8, 4, bias=False)),  # CLIP
        ("patch_embed", nn.Conv3d(3, 8, 2, bias=False)),
        ("embeddings", nn.Conv2d(3, 8, 4, bias=False)),
        ("up", nn.ConvTranspose2d(8, 4, 2, bias=False)),
        ("grouped", nn.Conv2d(8, 8, 3, groups=2, bias=False)),
    ],
)
def test_convolutions_are_flattened_matrices(path, module):
    groups = param_groups(_nest(path, module))
    assert [(g["algorithm"], g["flatten"]) for g in groups] == [("muon", True)]
    Muon(groups)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(6, 6, 3, groups=6),
        nn.Conv2d(6, 12, 3, groups=6),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
    ],
)
def test_depthwise_convolutions(module):
    groups = param_groups(_nest("layers.0.conv1d", module))
    assert [g["algorithm"] for g in groups] == ["adamw"]
    assert "flatten" not in groups[0]
    assert _route_of("layers.0.conv1d", module) == ("adamw", "depthwise convolution")


@pytest.mark.parametrize(
    "path", ["layers.0.wq.lora_a", "layers.0.q_proj.lora_A.default", "layers.0.q_proj.lora_B"]
)
def test_lora_factors(path):
    assert _route_of(path) == ("adamw", "LoRA factor")
    model = _nest(path, nn.Linear(6, 4, bias=False))
    assert _routes(model, rules=[Rule("lora_", "muon")])[f"{path}.weight"][0] == "muon"


def test_frozen_parameters_are_left_out():
    model = _nest("layers.0", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.get_submodule("layers.0.0").requires_grad_(False)
    assert set(_routes(model)) == {"layers.0.1.weight", "layers.0.1.bias"}


class Tied(nn.Module):
    def __init__(self, order: str):
        super().__init__()
        parts = {
            "e": ("vocabulary", nn.Embedding(9, 4)),
            "h": ("projection", nn.Linear(4, 9, bias=False)),
        }
        for key in order:
            self.add_module(*parts[key])
        self.projection.weight = self.vocabulary.weight
        self.w = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize("order", ["eh", "he"])
def test_tied_weight_has_one_decision_under_either_name_order(order):
    model = Tied(order)
    first = "vocabulary.weight" if order == "eh" else "projection.weight"
    assert _routes(model) == {first: ("adamw", "embedding"), "w.weight": MATRIX}
    for pattern in ("vocabulary", "projection"):
        routed = _routes(model, rules=[Rule(pattern, "normuon")])
        assert routed[first][0] == "normuon"
        assert routed["w.weight"] == MATRIX
    assert sum(len(g["params"]) for g in param_groups(model)) == 2


def _transformer() -> nn.Module:
    block = lambda: nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False), "norm": nn.RMSNorm(4)})  # noqa: E731
    return nn.ModuleDict(
        {
            "tok_embeddings": nn.Embedding(9, 4),
            "layers": nn.ModuleList([block(), block()]),
            "output": nn.Linear(4, 9, bias=False),
        }
    )


@pytest.mark.parametrize("wrapped", [(0,), (0, 1)], ids=["selective", "all"])
@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, torch.compile], ids=["ac", "compile"])
def test_wrappers_do_not_change_the_routing(wrapper, wrapped):
    rules = [Rule(r"^layers\.\d+\.wq\.weight$", "normuon"), Rule(r"^layers\.1\.norm", "adam")]
    expected = _routes(_transformer(), rules=rules)
    model = _transformer()
    for index in wrapped:
        model["layers"][index] = wrapper(model["layers"][index])
    assert any("." in n and n != canonical_name(n) for n, _ in model.named_parameters())
    assert _routes(model, rules=rules) == expected
    assert _routes(torch.compile(model), rules=rules) == expected
    assert expected["layers.0.wq.weight"] == ("normuon", f"pattern {rules[0].pattern!r}")


def test_first_rule_wins_and_carries_its_options():
    rules = [Rule("wq", "NorMuon", {"lr": 0.5}), Rule("weight", "adamw", {"weight_decay": 0.0})]
    groups = param_groups(_transformer(), rules=rules)
    by_algorithm = {g["algorithm"]: g for g in groups}
    assert by_algorithm["normuon"]["lr"] == 0.5
    assert len(by_algorithm["normuon"]["params"]) == 2
    assert by_algorithm["adamw"]["weight_decay"] == 0.0
    Muon(groups)


def test_rule_without_algorithm_leaves_the_routing():
    model = _transformer()
    rules = [Rule("wq|norm", options={"weight_decay": 0.0, "ns_steps": 3})]
    assert _routes(model, rules=rules) == _routes(model)
    groups = param_groups(model, rules=rules)
    decayed = {n: g.get("weight_decay") for g in groups for n in g["param_names"]}
    assert {n for n, d in decayed.items() if d == 0.0} == {
        n for n in decayed if "wq" in n or "norm" in n
    }
    assert {g["algorithm"] for g in groups if "ns_steps" in g} == {"muon"}
    Muon(groups)


def test_groups_are_complete_disjoint_and_named():
    model = _transformer()
    groups = param_groups(model, "normuon", rest="adam")
    assert [g["algorithm"] for g in groups] == ["adam", "normuon"]
    names = [n for g in groups for n in g["param_names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    by_name = dict(model.named_parameters())
    assert all(
        by_name[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("w[123]", "adamw")], r"pattern 'w\[123\]' decides on no trainable parameter"),
        ([Rule("wq", "adamw"), Rule(r"0\.wq", "adam")], r"pattern '0.+wq' decides on no"),
        ([Rule("wq(", "adamw")], r"pattern 'wq\(' is not a regular expression"),
        ([Rule("wq", "adamw", {"algorithm": "muon"})], r"rules\[0\]: algorithm is not an option"),
        ([Rule("wq", "adamw", {"params": []})], r"rules\[0\]: params is not an option"),
        ([Rule("wq", "muno")], "unknown algorithm 'muno', did you mean 'muon'"),
    ],
    ids=["dead", "hidden", "broken", "algorithm twice", "parameters", "algorithm"],
)
def test_bad_rules_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        param_groups(_transformer(), rules=rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rule("wq", "adamw"), "rules must be a list of titan_muon.Rule.*, got Rule"),
        ([("wq", "adamw")], r"rules\[0\] is \('wq', 'adamw'\)"),
        ([Rule("wq", "adamw"), "wq"], r"rules\[1\] is 'wq'"),
        ([Rule(3, "adamw")], r"rules\[0\] = .*pattern must be a string"),
        ([Rule("wq", "adamw", 1e-3)], r"rules\[0\] = .*options a dict"),
    ],
)
def test_rules_that_are_none(rules, message):
    with pytest.raises(TypeError, match=message):
        param_groups(_transformer(), rules=rules)


def test_routing_needs_a_module():
    with pytest.raises(TypeError, match="routing needs the nn.Module itself"):
        param_groups(list(_transformer().parameters()))


def test_rule_that_sends_a_vector_to_muon_names_it():
    groups = param_groups(_transformer(), rules=[Rule("norm", "muon")])
    with pytest.raises(ValueError, match=r"layers\.0\.norm\.weight: shape \(4,\) has no rows"):
        Muon(groups)


def test_split_reaches_matrix_groups_only():
    splits = {"layers.0.wq.weight": [1, 3], "output.weight": [4, 5]}
    decisions = {
        d.name: d for d in assign(_transformer(), ("muon", {}), ("adamw", {}), splits=splits)
    }
    assert decisions["layers.0.wq.weight"].options == {"split": [1, 3]}
    assert decisions["output.weight"].options == {}
