"""Orthogonalization on the CPU against the singular values themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.spectra import SPECTRA, exact, matrix, relative_error
from titan_muon.kernels import select_operations
from titan_muon.orthogonalization import (
    SCHEDULES,
    choose_evaluation,
    cost,
    explain,
    orthogonalize_batch,
    orthogonalize_normalized,
    polar_factor,
    resolve_dtype,
    resolve_schedule,
    schedule_names,
    starting_norm,
)
from titan_muon.orthogonalization.gram_newton_schulz import segments

CPU = torch.device("cpu")
DEFAULT = resolve_schedule("polar_express")
SHAPES = [(32, 32), (24, 96), (96, 24), (1, 1), (1, 9), (9, 1), (33, 50)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("evaluation", ["standard", "gram"])
@pytest.mark.parametrize("name", schedule_names())
def test_equals_the_polynomial_of_the_singular_values(name, evaluation, shape):
    schedule = resolve_schedule(name)
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = orthogonalize_batch(x, schedule, dtype=torch.float64, evaluation=evaluation)
    # Rounding of float64, 1e-16, grown by five steps of slope up to 8 on a condition below 1e3.
    assert relative_error(result, exact(x, schedule)) < 1e-11


@pytest.mark.parametrize("name", schedule_names())
def test_every_step_count(name):
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for steps in range(1, SCHEDULES[name].max_steps + 1):
        schedule = resolve_schedule(name, steps)
        assert len(schedule.triples) == steps
        for evaluation in ("standard", "gram"):
            result = orthogonalize_batch(x, schedule, dtype=torch.float64, evaluation=evaluation)
            assert relative_error(result, exact(x, schedule)) < 1e-10


# Error of the Gram evaluation in float16 over that of the standard one in bfloat16. Measured on the
# CPU, where 16-bit sums round more often than on a GPU: 0.12 to 0.27, 0.09 to 0.12, 0.14 to 0.44.
# Without restarts the last two are above 1 (see test_restarts_are_needed).
@pytest.mark.parametrize(("kind", "bound"), list(zip(SPECTRA, (0.4, 0.2, 0.6), strict=True)))
@pytest.mark.parametrize("name", schedule_names())
def test_float16_gram_is_more_accurate_than_bfloat16(name, kind, bound):
    schedule = resolve_schedule(name)
    x = matrix(kind, 256, 640).float()
    truth = exact(x, schedule)
    gram = orthogonalize_batch(x, schedule, dtype=torch.float16, evaluation="gram")
    dense = orthogonalize_batch(x, schedule, dtype=torch.bfloat16, evaluation="standard")
    assert relative_error(gram, truth) < bound * relative_error(dense, truth)


@pytest.mark.parametrize("name", schedule_names())
def test_restarts_are_needed(name):
    """On a power-law spectrum, dropping the restarts costs more than the bound above allows."""
    schedule = resolve_schedule(name)
    whole = type(schedule)(schedule.name, schedule.triples, schedule.safety, ())
    x = matrix("power law", 256, 640).float()
    truth = exact(x, schedule)
    errors = [
        relative_error(orthogonalize_batch(x, s, dtype=torch.float16, evaluation="gram"), truth)
        for s in (schedule, whole)
    ]
    assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("name", schedule_names())
def test_singular_values_land_in_the_stated_band(name):
    family = SCHEDULES[name]
    # From 0.002 of the normalised matrix up, as the band is stated.
    s = torch.logspace(-2.69, 0, 4000, dtype=torch.float64) / family.safety
    for a, b, c in resolve_schedule(name).triples:
        s = a * s + b * s**3 + c * s**5
    low, high = family.band
    assert low <= s.min()
    assert s.max() <= high
    # The band is tight: no schedule makes singular values exactly 1.
    assert s.min() < low + 0.02
    assert s.max() > high - 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("evaluation", ["standard", "auto"])
def test_scale_of_the_input_does_not_matter(dtype, evaluation):
    x = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(3))
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    want = orthogonalize_batch(x, DEFAULT, dtype=torch.float32, evaluation=evaluation)
    for scale in (1e-12, 1e-10, 1e-7, 1.0, 1e7, 1e12):
        # Outside float16's range the input itself would be lost, not the scale of the result.
        if dtype == torch.float16 and not 1e-7 < scale < 1e5:
            continue
        source = (x * scale).to(dtype)
        result = orthogonalize_batch(source, DEFAULT, dtype=torch.float32, evaluation=evaluation)
        reference = orthogonalize_batch(
            source.double(), DEFAULT, dtype=torch.float64, evaluation="standard"
        )
        assert relative_error(result, reference) < 1e-5
        if dtype in (torch.float32, torch.float64):
            assert relative_error(result, want) < 1e-5


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(8, 24), (16, 48), (24, 64), (48, 128), (64, 192)])
def test_small_matrices_in_float16_stay_in_the_band(shape, kind):
    """The Gram evaluation leaves it below 64 rows, up to a norm of 11 at (8, 24)."""
    x = torch.stack([matrix(kind, *shape, seed=seed) for seed in range(24)]).float()
    result = orthogonalize_batch(x, resolve_schedule("polar_express", 5), dtype=torch.float16)
    # 1.14 is the top of the band, a hundredth is rounding.
    assert torch.linalg.matrix_norm(result.float(), 2).max() < 1.16


def test_small_numbers_in_float16_keep_their_direction():
    # Subnormal float16: a norm taken in float16 would underflow to 0.
    x = (torch.randn(16, 16, generator=torch.Generator().manual_seed(4)) * 1e-6).half()
    result = orthogonalize_batch(x, DEFAULT, dtype=torch.float32)
    assert relative_error(result, exact(x, DEFAULT)) < 1e-4


@pytest.mark.parametrize("evaluation", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_and_nonfinite_matrices_stay_apart(evaluation, dtype):
    x = torch.randn(4, 12, 20, generator=torch.Generator().manual_seed(5))
    alone = orthogonalize_batch(x[:1], DEFAULT, dtype=dtype, evaluation=evaluation)
    x[1] = 0
    x[2, 3, 4] = float("nan")
    x[3, 0, 0] = float("inf")
    result = orthogonalize_batch(x, DEFAULT, dtype=dtype, evaluation=evaluation)
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    assert result[2].isnan().any()
    assert result[3].isnan().any()
    # The order of sums may depend on the batch, hence not bitwise.
    assert relative_error(result[0], alone[0]) < (1e-6 if dtype == torch.float32 else 2e-3)


@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    layout=st.sampled_from(["dense", "transposed", "sliced", "expanded"]),
    evaluation=st.sampled_from(["standard", "gram", "auto"]),
    limit=st.sampled_from([None, 1, 2]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_and_strides(batch, rows, columns, layout, evaluation, limit):
    x = torch.randn(*batch, rows, columns, dtype=torch.float64)
    if layout == "transposed":
        x = x.mT.contiguous().mT
    elif layout == "sliced":
        x = torch.randn(*batch, rows * 2, columns + 3, dtype=torch.float64)[..., ::2, 1:-2]
    elif layout == "expanded":
        x = x[..., :1, :].expand(*batch, rows, columns)
    before = x.clone()
    result = orthogonalize_batch(
        x, DEFAULT, dtype=torch.float64, evaluation=evaluation, batch_size=limit
    )
    assert torch.equal(x, before)
    assert result.shape == x.shape
    assert result.is_contiguous()
    # Random square matrices can be badly conditioned; the polynomial is then steep.
    assert relative_error(result, exact(x, DEFAULT)) < 1e-7


def test_batch_size_changes_nothing_but_rounding():
    x = torch.randn(5, 16, 32, generator=torch.Generator().manual_seed(6))
    whole = orthogonalize_batch(x, DEFAULT, dtype=torch.float32)
    for batch_size in (1, 2, 9):
        part = orthogonalize_batch(x, DEFAULT, dtype=torch.float32, batch_size=batch_size)
        # Batched products may sum in another order than single ones.
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)


def test_empty_inputs():
    for shape in ((0, 4, 5), (3, 0, 5), (3, 4, 0)):
        result = orthogonalize_batch(torch.zeros(shape), DEFAULT, dtype=torch.float32)
        assert result.shape == shape


def test_no_gradient_is_recorded():
    x = torch.randn(4, 6, requires_grad=True)
    assert not orthogonalize_batch(x, DEFAULT, dtype=torch.float32).requires_grad


def test_polar_factor_is_semi_orthogonal():
    x = torch.randn(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    q = polar_factor(x)
    eye = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    torch.testing.assert_close(q @ q.mT, eye, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "steps", "kind", "message"),
    [
        ("polar", 5, ValueError, "'polar' is unknown. Use one of polar_express, newton_schulz"),
        ("polar_express", 6, ValueError, "1..5 for ns_method 'polar_express', got 6"),
        ("newton_schulz", 11, ValueError, "1..10"),
        ("newton_schulz", 0, ValueError, "got 0"),
        ("newton_schulz", 2.5, TypeError, "integer, got 2.5"),
        ("newton_schulz", True, TypeError, "got True"),
        (3, 5, TypeError, "a name"),
        ([], 5, ValueError, "empty list"),
        ([[1.0, 2.0]], 5, ValueError, r"ns_method\[0\] must be three finite numbers"),
        ([[1, 2, 3], [1, 2, float("nan")]], 5, ValueError, r"ns_method\[1\]"),
        ([[1, 2, "3"]], 5, ValueError, r"ns_method\[0\]"),
        ([[1, 2, True]], 5, ValueError, r"ns_method\[0\]"),
        (["abc"], 5, ValueError, r"ns_method\[0\]"),
        ([[2.0, -1.5, 0.5]] * 3, 5, ValueError, r"ns_steps = 5, but ns_method has 3 triples"),
    ],
)
def test_bad_schedules(method, steps, kind, message):
    with pytest.raises(kind, match=message):
        resolve_schedule(method, steps)


def test_own_triples():
    schedule = resolve_schedule([[1.5, -0.5, 0], [2, -1, 0.25]], 2)
    assert schedule.triples == ((1.5, -0.5, 0.0), (2.0, -1.0, 0.25))
    assert hash(schedule) == hash(resolve_schedule([(1.5, -0.5, 0), (2, -1, 0.25)]))
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for evaluation in ("standard", "gram"):
        result = orthogonalize_batch(x, schedule, dtype=torch.float64, evaluation=evaluation)
        assert relative_error(result, exact(x, schedule)) < 1e-12
    assert resolve_schedule("polar_express", None) == DEFAULT


@pytest.mark.parametrize(
    ("x", "kwargs", "kind", "message"),
    [
        (torch.zeros(3), {}, ValueError, r"\(\.\.\., M, N\), got \(3,\)"),
        (torch.zeros(3, 3, dtype=torch.int32), {}, TypeError, "float tensor"),
        (torch.zeros(3, 3), {"evaluation": "fast"}, ValueError, "'fast' is unknown"),
        (torch.zeros(3, 3), {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        (
            torch.ones(3, 3),
            {"evaluation": "gram", "dtype": torch.bfloat16},
            ValueError,
            "not usable in bfloat16",
        ),
    ],
)
def test_bad_arguments(x, kwargs, kind, message):
    with pytest.raises(kind, match=message):
        orthogonalize_batch(x, DEFAULT, **{"dtype": torch.float32, **kwargs})


def test_dtypes():
    cuda = torch.device("cuda")
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", CPU, torch.float64) == torch.float64
    assert resolve_dtype("auto", cuda, torch.float32) == torch.float16
    assert resolve_dtype("bfloat16", cuda, torch.float32) == torch.bfloat16
    with pytest.raises(ValueError, match="'fp16' is unknown. Use one of auto, float16"):
        resolve_dtype("fp16", CPU, torch.float32)


def test_the_cheaper_evaluation_is_chosen_and_explained():
    ops = select_operations(256, torch.float32, CPU)
    assert choose_evaluation(256, 1024, torch.float32, DEFAULT, ops)[0] == "gram"
    assert choose_evaluation(256, 256, torch.float32, DEFAULT, ops)[0] == "standard"
    assert choose_evaluation(256, 1024, torch.bfloat16, DEFAULT, ops)[0] == "standard"
    text = explain((256, 1024), torch.float32, CPU, DEFAULT)
    assert "gram evaluation, restarts before steps [3]" in text
    assert "no Triton kernels on cpu" in text


@pytest.mark.parametrize("half", [True, False])
def test_costs_count_what_runs(half):
    """The cost model equals the operations an iteration really asks for."""
    rows, columns = 8, 24
    for name in schedule_names():
        for steps in range(1, SCHEDULES[name].max_steps + 1):
            schedule = resolve_schedule(name, steps)
            products = sum(4 * len(part) - 3 for part in segments(schedule))
            long = len(segments(schedule))
            factor = 0.5 if half else 1.0
            want = long * (factor + 1) * 2 * rows**2 * columns + factor * products * 2 * rows**3
            assert cost(rows, columns, schedule, "gram", half) == pytest.approx(want)
            assert cost(columns, rows, schedule, "gram", half) == pytest.approx(want)


@pytest.mark.parametrize("evaluation", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("shape", [(2, 12, 40), (3, 40, 12)], ids=["wide", "tall"])
def test_matrices_at_their_starting_norm_give_the_same_result(shape, dtype, evaluation):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    schedule = resolve_schedule("polar_express", 5)
    norm = starting_norm(*shape[1:], dtype, x.device, schedule, evaluation)
    started = (x * (norm / x.norm(dim=(1, 2), keepdim=True))).to(dtype)
    got = orthogonalize_normalized(started, schedule, evaluation=evaluation)
    want = orthogonalize_batch(x, schedule, dtype=dtype, evaluation=evaluation)
    # The start is rounded differently by one unit in the last place, which the steps amplify.
    tolerance = 2e-2 if dtype == torch.float16 else 1e-5
    assert ((got.float() - want.float()).norm() / want.float().norm()).item() <= tolerance
