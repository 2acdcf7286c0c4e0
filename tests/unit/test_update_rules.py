"""Every golden vector of the update rules, in float64 and float32."""

import json
from pathlib import Path

import pytest
import torch

from titan_muon import Muon

CASES = json.loads((Path(__file__).parents[1] / "data" / "update_rules.json").read_text())


def _options(case: dict, dtype: torch.dtype) -> dict:
    options = dict(case["options"])
    options["ns_method"] = options.pop("method")
    options["ns_dtype"] = str(dtype).removeprefix("torch.")
    return options


def _run(case: dict, dtype: torch.dtype, lr=None):
    param = torch.nn.Parameter(torch.tensor(case["param"], dtype=dtype))
    options = _options(case, dtype)
    if lr is not None:
        options["lr"] = lr
    optimizer = Muon([{"params": [param], **options}])
    # "grads" hold gradients with "grad_scale" already applied.
    for grad in case["grads"]:
        param.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
@pytest.mark.parametrize(
    # float64: rounding only. float32: five iterations amplify rounding to about 1e-5.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5)],
    ids=["f64", "f32"],
)
def test_matches_golden_vector(case, dtype, tolerance):
    param, state = _run(case, dtype)
    start = torch.tensor(case["param"], dtype=torch.float64)
    want = torch.tensor(case["result"], dtype=torch.float64)
    # Relative to the movement; the weight itself is only as exact as its own dtype.
    allowed = tolerance * (want - start).norm() + 2 * torch.finfo(dtype).eps * want.norm()
    assert (param.double() - want).norm() <= allowed, case["name"]
    for key in ("momentum_buffer", "second_moment_buffer"):
        if key in case:
            want_state = torch.tensor(case[key], dtype=torch.float64)
            got = state[key].double()
            assert got.shape == want_state.shape
            error = (got - want_state).norm() / want_state.norm().clamp_min(1e-30)
            assert error.item() <= tolerance, key


@pytest.mark.parametrize("case", CASES[:1] + CASES[20:21] + CASES[-2:-1], ids=lambda c: c["name"])
def test_tensor_lr_equals_number(case):
    lr = case["options"]["lr"]
    number, _ = _run(case, torch.float64)
    tensor, _ = _run(case, torch.float64, lr=torch.tensor(lr, dtype=torch.float64))
    assert torch.equal(number, tensor)
