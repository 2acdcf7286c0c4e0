"""Every option: what it takes, what it refuses, and which of two values wins."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from titan_muon import Muon, NorMuon
from titan_muon.optim.algorithms import algorithm_names, check_options, get_algorithm
from titan_muon.optim.options import MATRIX_OPTIONS, from_saved, nearest, to_saved
from titan_muon.orthogonalization.coefficients import schedule_names

OWN = ("muon", "normuon", "adamw", "adam")
BOOLEAN = ([True, False], [1, None, "true"])

LR_INVALID = [-1e-3, float("nan"), float("inf"), "1e-3", None]
LR_INVALID += [torch.tensor(-1e-3), torch.tensor(float("nan")), torch.tensor([1e-3])]

# name: (valid values, invalid values); a 4 x 6 parameter, so splits must sum to 4 rows.
CASES = {
    "lr": ([0, 1e-3, 2.0, torch.tensor(1e-3)], LR_INVALID),
    "weight_decay": ([0, 0.1, 3], [-0.1, float("nan"), "0.1", None, True]),
    "maximize": BOOLEAN,
    "stochastic_rounding": ([True, False], [1, "yes", None]),
    "rounding_seed": ([0, 7], [-1, True, 0.5, None]),
    "state_dtype": (
        ["auto", "float32", "bfloat16", "int8", "int4", "float8"],
        ["fp32", torch.float32, None],
    ),
    "cautious_weight_decay": BOOLEAN,
    "momentum": ([0.0, 0, 0.95], [1.0, -0.1, "0.9", None]),
    "nesterov": BOOLEAN,
    "ns_method": (
        ["polar_express", "newton_schulz", [[2.0, -1.5, 0.5]], ((3.0, -3, 1), (2, -1.5, 0.5))],
        ["polar", "", [], [[1.0, 2.0]], [[1.0, 2.0, float("nan")]], 5, None],
    ),
    "ns_steps": ([1, 5], [0, 6, -1, 2.0, True, "5"]),
    "ns_dtype": (["auto", "float16", "bfloat16", "float32", "float64"], ["fp8", None]),
    "adjust_lr_fn": (
        ["original", "match_rms_adamw", "spectral_unclamped", "match_param_rms", "none"],
        ["rms", None, ""],
    ),
    "flatten": BOOLEAN,
    "split": (
        [None, [1, 3], {"kind": "blocks", "rows": 2}, {"kind": "strided", "count": 2}],
        [[], [1.0, 3.0], [0, 4], [1, 2], 4, {"rows": 2}, {"kind": "rings"}, {"kind": "blocks"}],
    ),
    "batch_size": ([None, 1, 64], [0, -1, 1.5, True]),
    "beta2": ([0.0, 0.95], [1.0, -0.1, None]),
    "betas": ([(0.9, 0.95), [0, 0.5]], [(0.9,), (0.9, 1.0), 0.9, {0.9, 0.95}, (0.9, None)]),
    "eps": ([0, 1e-8], [-1e-8, None, "1e-8"]),
    "fused": ([True, False, None], ["yes", 1]),
    "foreach": ([True, False, None], ["yes", 1]),
    # Options of the exchange.
    "wire_dtype": (["float16", "bfloat16", "float32"], ["auto", None]),
    "max_stage_bytes": ([1 << 20], [0, -1, 1.5, "1GB", None]),
    "nonfinite": (["propagate", "skip", "error"], ["ignore", None, True]),
}
TABLE = [(name, key) for name in OWN for key in get_algorithm(name).options]


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))


def _build(algorithm: str, **options) -> dict:
    group = {"params": [_parameter()], "algorithm": algorithm, **options}
    return Muon([group]).param_groups[0]


@pytest.mark.parametrize(("algorithm", "key"), TABLE)
def test_option_takes_its_valid_values(algorithm, key):
    for value in CASES[key][0]:
        stored = _build(algorithm, **{key: value})[key]
        if key == "betas":
            assert stored == tuple(value)
        else:
            assert stored is value or stored == value


@pytest.mark.parametrize(("algorithm", "key"), TABLE)
def test_option_refuses_invalid_values_by_name(algorithm, key):
    for value in CASES[key][1]:
        with pytest.raises((ValueError, TypeError), match=key) as caught:
            _build(algorithm, **{key: value})
        assert str(caught.value).startswith("Muon: param group 0"), value


@pytest.mark.parametrize(("algorithm", "key"), TABLE)
def test_constructor_refuses_what_a_group_refuses(algorithm, key):
    for value in CASES[key][1]:
        with pytest.raises((ValueError, TypeError), match=key):
            Muon([{"params": [_parameter()], "algorithm": algorithm}], **{key: value})


@pytest.mark.parametrize(("algorithm", "key"), TABLE)
def test_default_is_allowed_and_documented(algorithm, key):
    option = get_algorithm(algorithm).options[key]
    assert option.check(option.default)
    assert option.meaning
    assert option.allowed


def test_defaults_are_those_of_the_update_rules():
    muon = {k: v for k, v in _build("muon").items() if k != "params"}
    expected = {
        "algorithm": "muon",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "cautious_weight_decay": True,
        "momentum": 0.95,
        "nesterov": True,
        "ns_method": "polar_express",
        "ns_steps": 5,
        "ns_dtype": "auto",
        "adjust_lr_fn": "original",
        "flatten": False,
        "split": None,
        "maximize": False,
        "state_dtype": "auto",
        "batch_size": None,
    }
    assert {k: muon[k] for k in expected} == expected
    assert _build("normuon")["beta2"] == 0.95
    for name in ("adamw", "adam"):
        group = _build(name)
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.1)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("weight_decy", "weight_decay"),
        ("ns_step", "ns_steps"),
        ("momentun", "momentum"),
        ("LR", "lr"),
        ("adjust_lr", "adjust_lr_fn"),
        ("beta", "betas"),
    ],
)
def test_unknown_option_names_the_nearest(typed, meant):
    message = f"Muon: {typed} is not an option of Muon, did you mean '{meant}'"
    with pytest.raises(ValueError, match=message):
        Muon([_parameter()], **{typed: 0.9})
    with pytest.raises(ValueError, match=f"param group 0: {typed} .* did you mean '{meant}'"):
        Muon([{"params": [_parameter()], typed: 0.9}])


def test_unknown_option_lists_all_options():
    with pytest.raises(ValueError, match="qqqqqq is not an option of AdamW. Options: betas, eps"):
        check_options("adamw", {"qqqqqq": 1}, where="here")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("muno", "unknown algorithm 'muno', did you mean 'muon'"),
        ("qqqq", r"unknown algorithm 'qqqq'\. Known: Muon, NorMuon, AdaMuon, Aurora, AdamW, Adam"),
        (3, "unknown algorithm 3"),
    ],
)
def test_unknown_algorithm_lists_all(typed, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [_parameter()], "algorithm": typed}])


@pytest.mark.parametrize("spelling", ["NorMuon", "normuon", "NORMUON"])
def test_algorithm_in_any_letter_case(spelling):
    assert _build(spelling)["algorithm"] == "normuon"


def test_option_of_another_algorithm_is_accepted_and_dropped():
    groups = Muon([_parameter()], betas=(0.8, 0.9), beta2=0.5, eps=1e-6).param_groups
    assert not {"betas", "beta2", "eps"} & set(groups[0])
    assert "fused" not in _build("muon", fused=True, foreach=False)


def test_value_of_another_algorithms_option_is_checked_too():
    with pytest.raises(ValueError, match="betas = 3 is not allowed"):
        Muon([_parameter()], betas=3)


def test_lr_tensor_without_a_value_is_taken():
    with FakeTensorMode():
        assert _build("muon", lr=torch.tensor(1e-3))["lr"].ndim == 0


def test_group_wins_over_constructor_wins_over_default():
    optimizer = Muon(
        [
            {"params": [_parameter()], "lr": 1.0, "momentum": 0.1},
            {"params": [_parameter()]},
            {"params": [_parameter()], "algorithm": "adamw", "weight_decay": 0.0},
        ],
        lr=2.0,
        momentum=0.2,
        weight_decay=0.3,
        betas=(0.5, 0.6),
    )
    first, second, third = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (1.0, 0.1, 0.3)
    assert (second["lr"], second["momentum"], second["nesterov"]) == (2.0, 0.2, True)
    assert (third["lr"], third["betas"], third["weight_decay"]) == (2.0, (0.5, 0.6), 0.0)
    # The same holds for a group that comes later, also in a copy.
    for later in (optimizer, copy.deepcopy(optimizer)):
        later.add_param_group({"params": [_parameter()], "lr": 4.0})
        added = later.param_groups[3]
        assert (added["lr"], added["momentum"]) == (4.0, 0.2)


def test_arguments_are_not_modified():
    group = {"params": [_parameter()], "split": [1, 3]}
    before = dict(group)
    Muon([group])
    assert group == before


def test_triples_decide_on_the_number_of_steps():
    assert _build("muon", ns_method=[[2.0, -1.5, 0.5]] * 3)["ns_steps"] == 3
    assert _build("muon", ns_steps=None)["ns_steps"] == 5
    with pytest.raises(ValueError, match=r"ns_steps = 5, but ns_method has 3 triples"):
        _build("muon", ns_method=[[2.0, -1.5, 0.5]] * 3, ns_steps=5)
    with pytest.raises(ValueError, match=r"ns_steps must be in 1\.\.10 for ns_method 'newton_schu"):
        _build("muon", ns_method="newton_schulz", ns_steps=11)
    assert _build("muon", ns_method="newton_schulz", ns_steps=10)["ns_steps"] == 10


def test_fused_and_foreach_exclude_each_other():
    with pytest.raises(ValueError, match="fused and foreach exclude each other"):
        _build("adamw", fused=True, foreach=True)


def test_normuon_class_is_muon_with_another_default():
    optimizer = NorMuon(
        [{"params": [_parameter()]}, {"params": [_parameter()], "algorithm": "muon"}], beta2=0.5
    )
    assert [g["algorithm"] for g in optimizer.param_groups] == ["normuon", "muon"]
    assert optimizer.param_groups[0]["beta2"] == 0.5


SAVED_OPTIONS = {
    "muon": "adjust_lr_fn cautious_weight_decay flatten lr maximize momentum nesterov ns_method "
    "ns_steps split weight_decay",
    "normuon": "adjust_lr_fn beta2 cautious_weight_decay flatten lr maximize momentum nesterov "
    "ns_method ns_steps split weight_decay",
    "adamw": "betas eps lr maximize weight_decay",
    "adam": "betas eps lr maximize weight_decay",
}


@pytest.mark.parametrize("algorithm", OWN)
def test_checkpoint_keys_are_frozen(algorithm):
    optimizer = Muon([{"params": [("w", _parameter())], "algorithm": algorithm}])
    saved = optimizer.state_dict()["param_groups"][0]
    assert set(saved) == {"params", "param_names", "algorithm", *SAVED_OPTIONS[algorithm].split()}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0.1,
        "polar_express",
        "[not json",
        "{",
        '"quoted"',
        [1, 3],
        [[2.0, -1.5, 0.5]],
        {"kind": "interleaved_qkv", "n_kv_heads": 2, "heads_per_kv": 4, "head_dim": 8},
    ],
)
def test_saved_form_is_plain_and_comes_back(value):
    saved = to_saved(value)
    assert saved is None or isinstance(saved, bool | float | str)
    assert from_saved(saved) == value


def test_floats_stay_a_sequence():
    assert to_saved((0.9, 0.95)) == (0.9, 0.95)
    assert list(from_saved(to_saved((0, 0.95)))) == [0, 0.95]


def test_nearest_says_nothing_where_nothing_is_near():
    assert nearest("zzzz", ["momentum"]) == "."


def test_own_algorithms_are_registered():
    assert set(OWN) <= set(algorithm_names())


def test_every_schedule_is_among_the_allowed_values():
    allowed = MATRIX_OPTIONS["ns_method"].allowed
    assert all(f"'{name}'" in allowed for name in schedule_names())
