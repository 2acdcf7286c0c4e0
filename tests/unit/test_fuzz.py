"""Random groups, options, shapes and tables: they work, or one message of this package says why."""

import copy
import math
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import titan_muon  # noqa: E402
from titan_muon import Muon, orthogonalize  # noqa: E402
from titan_muon.optim.algorithms import algorithm_names, all_option_names  # noqa: E402

PACKAGE = str(Path(titan_muon.__file__).parent)
QUICK = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
NAMES = sorted(all_option_names())
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHER_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.uint8]

numbers = st.one_of(
    st.integers(-3, 12),
    st.floats(-2, 2),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e-30, 1e30, 0.95, 10**30]),
)
values = st.recursive(
    st.one_of(
        numbers,
        st.none(),
        st.booleans(),
        st.sampled_from(["", "auto", "float32", "bfloat16", "polar_express", "skip", "none", "x"]),
        st.just(torch.tensor(0.1)),
        st.just(torch.tensor([0.1])),
        st.just(object),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["kind", "rows", "count", "x"]), inner, max_size=3),
    ),
    max_leaves=4,
)
shapes = st.lists(st.integers(0, 6), max_size=4)
options = st.dictionaries(
    st.one_of(st.sampled_from(NAMES), st.sampled_from(["momentun", "lrr", "algorithm", ""])),
    values,
    max_size=3,
)
groups = st.lists(
    st.tuples(
        st.lists(st.tuples(shapes, st.sampled_from(DTYPES + OTHER_DTYPES)), max_size=2),
        st.sampled_from([*algorithm_names(), "Muon", "NORMUON", "muom", "", None]),
        options,
    ),
    min_size=1,
    max_size=2,
)


def check_message(error: BaseException) -> None:
    """Demand that the package raised it itself, or torch.optim.Optimizer about groups."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = last.filename.startswith(PACKAGE) or last.filename.endswith("torch/optim/optimizer.py")
    if not own or len(str(error)) < 20:
        raise AssertionError(f"not a message of this package: {error}") from error


def _param(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.ones(shape).to(dtype)
    return nn.Parameter(tensor) if dtype in DTYPES else tensor


@QUICK
@given(groups, options)
def test_groups_and_options(described: Any, given_options: Any) -> None:
    torch_groups = [
        {
            "params": [_param(*p) for p in params],
            **({} if algorithm is None else {"algorithm": algorithm}),
            **extra,
        }
        for params, algorithm, extra in described
    ]
    given_options = {k: v for k, v in given_options.items() if k.isidentifier()}
    try:
        optimizer = Muon(torch_groups, **given_options)
    except (ValueError, TypeError, ImportError) as error:
        check_message(error)
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p) * 0.5
    optimizer.step()
    for group in optimizer.param_groups:
        # What was accepted can be saved and taken back.
        assert all(p.shape == p.grad.shape for p in group["params"])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


@QUICK
@given(
    shapes,
    st.sampled_from(DTYPES + OTHER_DTYPES),
    st.fixed_dictionaries({}, optional={k: values for k in ("ns_method", "ns_steps", "ns_dtype")}),
)
def test_orthogonalize(shape: list[int], dtype: torch.dtype, chosen: dict[str, Any]) -> None:
    x = _param(shape, dtype).detach()
    try:
        y = orthogonalize(x, **chosen)
    except (ValueError, TypeError) as error:
        check_message(error)
        return
    assert y.shape == x.shape


@st.composite
def state_dicts(draw: Any) -> Any:
    """A state dict of which something was changed."""
    change = draw(st.sampled_from(["group key", "state key", "shape", "drop", "group", "params"]))
    return change, draw(st.sampled_from(NAMES)), draw(values), draw(shapes)


@QUICK
@given(st.sampled_from(algorithm_names()), state_dicts())
def test_state_dicts(algorithm: str, described: Any) -> None:
    change, key, value, shape = described
    optimizer = Muon([{"params": [_param([4, 6], torch.float32)], "algorithm": algorithm}])
    state_dict = copy.deepcopy(optimizer.state_dict())
    group, state = state_dict["param_groups"][0], state_dict["state"][0]
    if change == "group key":
        group[key] = value
    elif change == "state key":
        state["unknown"] = torch.zeros(3)
    elif change == "shape":
        state[sorted(state)[0]] = torch.zeros(shape)
    elif change == "drop":
        del state[sorted(state)[0]]
    elif change == "group":
        state_dict["param_groups"].append({**group, "params": []})
    else:
        group["params"] = [0, 1]
    before = [v.clone() for v in optimizer.state[optimizer.param_groups[0]["params"][0]].values()]
    try:
        optimizer.load_state_dict(state_dict)
    except (ValueError, TypeError) as error:
        check_message(error)
        (param,) = optimizer.param_groups[0]["params"]
        after = list(optimizer.state[param].values())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    else:
        assert change in ("group key", "shape")
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
