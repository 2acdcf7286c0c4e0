"""QKClip on plain tensors, against attention written out in float64."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.attention_references import (
    DIM,
    KINDS,
    add,
    gammas,
    inputs,
    largest,
    weights_of,
)
from titan_muon import Muon
from titan_muon.optim.qk_clip import HeadRows, QKClip, head_rows, observe

# The maxima and the factors are float32: one rounding of each, 2 * 2**-24.
ROUNDING = 2e-7
THRESHOLD = 4.0


def clipped(kind, weights, xs, threshold=THRESHOLD):
    clip = QKClip(threshold)
    maxima = add(clip, kind, weights)
    for x in xs:
        observe(maxima, kind.logits(weights, x))
    clip.step()
    return clip


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_the_reference(name):
    kind, xs = KINDS[name], [inputs(0), inputs(1)]
    before = weights_of(kind)
    weights = {key: value.clone() for key, value in before.items()}
    clip = clipped(kind, weights, xs)
    maxima = largest(kind, before, xs)
    gamma = gammas(maxima, THRESHOLD)
    # The case is worth its name: heads are scaled, and at least one is not.
    assert 1 < sum(value < 1 for value in gamma) < kind.n_heads
    expected = kind.scaled(before, gamma)
    for key in weights:
        torch.testing.assert_close(weights[key], expected[key], rtol=ROUNDING, atol=0)
    metrics = clip.metrics()
    assert metrics["max_logit"].item() == pytest.approx(max(maxima), rel=ROUNDING)
    assert metrics["clipped_heads"].item() == sum(value < 1 for value in gamma)


@pytest.mark.parametrize("name", KINDS)
def test_logits_come_down_to_the_threshold(name):
    """The scaled rows are the right ones: the same inputs now give min(maximum, threshold)."""
    kind, xs = KINDS[name], [inputs(0), inputs(1)]
    weights = weights_of(kind)
    before = largest(kind, weights, xs)
    clipped(kind, weights, xs)
    after = largest(kind, weights, xs)
    assert after == pytest.approx([min(value, THRESHOLD) for value in before], rel=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_other_heads_and_shared_keys_stay_bitwise(name):
    kind, xs = KINDS[name], [inputs(0)]
    before = weights_of(kind)
    weights = {key: value.clone() for key, value in before.items()}
    clipped(kind, weights, xs)
    moved = {key: (weights[key] != before[key]).view(len(weights[key]), -1) for key in weights}
    gamma = gammas(largest(kind, before, xs), THRESHOLD)
    for key, value in moved.items():
        scaled = torch.zeros(len(value), dtype=torch.bool)
        for row in kind.rows.get(key, []):
            scaled[row.start : row.start + row.count] = row.power > 0 and gamma[row.head] < 1
        assert torch.equal(value.any(1), scaled), key


def test_micro_batches_and_recomputation_count_once():
    kind, xs = KINDS["grouped"], [inputs(0), inputs(1), inputs(2)]
    weights, other = weights_of(kind), weights_of(kind)
    clipped(kind, weights, xs)
    clipped(kind, other, [xs[2], xs[0], xs[0], xs[1], xs[2]])
    for key in weights:
        assert torch.equal(weights[key], other[key])


def test_maxima_are_of_one_step():
    kind = KINDS["grouped"]
    weights = weights_of(kind)
    clip = QKClip(THRESHOLD)
    maxima = add(clip, kind, weights)
    observe(maxima, kind.logits(weights, inputs(0)))
    clip.step()
    after = {key: value.clone() for key, value in weights.items()}
    assert maxima.eq(-math.inf).all()
    clip.step()
    assert all(torch.equal(weights[key], after[key]) for key in weights)
    assert clip.metrics()["clipped_heads"].item() == 0


@pytest.mark.parametrize("fault", [math.inf, math.nan, -math.inf])
def test_a_logit_that_is_not_finite_scales_nothing(fault):
    kind = KINDS["multi-head"]
    weights = weights_of(kind)
    before = {key: value.clone() for key, value in weights.items()}
    clip = QKClip(THRESHOLD)
    maxima = add(clip, kind, weights)
    logits = kind.logits(weights, inputs(0))
    logits[:, 1] = fault
    observe(maxima, logits)
    clip.step()
    head = slice(3, 6)
    assert torch.equal(weights["wq"][head], before["wq"][head])
    assert not torch.equal(weights["wq"][:3], before["wq"][:3])
    # A NaN of one step does not reach the next.
    observe(maxima, kind.logits(before, inputs(0)))
    clip.step()
    assert not torch.equal(weights["wq"][head], before["wq"][head])


def test_a_skipped_step_of_the_optimizer_scales_nothing():
    kind = KINDS["multi-head"]
    weights = weights_of(kind)
    before = {key: value.clone() for key, value in weights.items()}
    params = [torch.nn.Parameter(torch.ones(2, 3))]
    optimizer = Muon(params, nonfinite="skip")
    clip = QKClip(THRESHOLD)
    maxima = add(clip, kind, weights)
    for value in (math.nan, 1.0):
        params[0].grad = torch.full((2, 3), value)
        optimizer.step()
        observe(maxima, kind.logits(before, inputs(0)))
        clip.step(optimizer.taken)
        same = all(torch.equal(weights[key], before[key]) for key in weights)
        assert same == math.isnan(value)
        # What was observed is forgotten in either case.
        assert maxima.eq(-math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_weights_are_rounded_once(dtype):
    kind = KINDS["multi-head"]
    weights = {key: value.to(dtype) for key, value in weights_of(kind).items()}
    before = {key: value.clone() for key, value in weights.items()}
    clip = QKClip(THRESHOLD)
    maxima = add(clip, kind, weights)
    observe(maxima, torch.tensor([[16.0, 4.0, 6.25, -1.0]]).view(1, 4, 1))
    clip.step()
    roots = torch.tensor([0.5, 1.0, 0.8, 1.0]).repeat_interleave(3)
    for key in weights:
        factors = roots.view(-1, *[1] * (weights[key].ndim - 1))
        assert torch.equal(weights[key], (before[key].float() * factors).to(dtype))


def test_follows_the_update_and_leaves_momentum_alone():
    kind = KINDS["latent"]
    start = {key: value.float() for key, value in weights_of(kind).items()}
    results = []
    for is_clipped in (False, True):
        params = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
        optimizer = Muon(list(params.values()), lr=2e-2)
        clip = QKClip(THRESHOLD)
        maxima = add(clip, kind, params)
        logits = kind.logits(params, inputs(0).float())
        logits.square().mean().backward()
        observe(maxima, logits)
        optimizer.step()
        if is_clipped:
            clip.step()
        results.append((params, optimizer))
    (plain, optimizer), (params, other) = results
    gamma = gammas(largest(kind, start, [inputs(0).float()]), THRESHOLD)
    expected = kind.scaled({key: value.detach() for key, value in plain.items()}, gamma)
    for key in params:
        # float32 weights times float32 factors.
        torch.testing.assert_close(params[key].detach(), expected[key], rtol=3e-7, atol=0)
        momentum = other.state[params[key]]["momentum_buffer"]
        assert torch.equal(momentum, optimizer.state[plain[key]]["momentum_buffer"])


def test_step_reads_nothing_on_the_host():
    """Fake tensors have no values: whatever asks for one fails."""
    kind = KINDS["latent"]
    with FakeTensorMode():
        weights = {key: torch.randn(shape) for key, shape in kind.shapes.items()}
        clip = QKClip(THRESHOLD)
        maxima = add(clip, kind, weights)
        observe(maxima, torch.randn(2, kind.n_heads, 5))
        clip.step()
        assert clip.metrics()["max_logit"].shape == ()


def test_several_layers_keep_their_heads_apart():
    clip, layers = QKClip(THRESHOLD), []
    for seed, kind in enumerate(KINDS.values()):
        weights = weights_of(kind, seed)
        layers.append((kind, weights, weights_of(kind, seed), add(clip, kind, weights), seed))
    for kind, weights, _, maxima, seed in reversed(layers):
        observe(maxima, kind.logits(weights, inputs(seed)))
    clip.step()
    for kind, weights, before, _, seed in layers:
        expected = kind.scaled(before, gammas(largest(kind, before, [inputs(seed)]), THRESHOLD))
        for key in weights:
            torch.testing.assert_close(weights[key], expected[key], rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("threshold", [0, -1.0, math.nan, math.inf, "100", None, True])
def test_threshold_is_a_positive_number(threshold):
    with pytest.raises(ValueError, match="must be a number above 0"):
        QKClip(threshold)


@pytest.mark.parametrize(
    ("n_heads", "weights", "match"),
    [
        (2, [], "give at least one weight"),
        (2, [(torch.zeros(6, DIM), head_rows(2, (4, 1.0)))], "does not fit a weight of shape"),
        (1, [(torch.zeros(8, DIM), head_rows(2, (4, 1.0)))], "does not fit a weight"),
        (2, [(torch.zeros(8, DIM), [HeadRows(0, 0, 4, 0.25)])], "power is one of"),
        (2, [(torch.zeros(2, 4, DIM), head_rows(2, (4, 1.0)))], "must be a float matrix or bias"),
        (2, [(torch.zeros(8, DIM, dtype=torch.int64), [])], "must be a float matrix or bias"),
        (2, [(torch.zeros(8, DIM, device="meta"), [])], "with storage"),
    ],
)
def test_layers_that_do_not_fit_are_refused(n_heads, weights, match):
    with pytest.raises(ValueError, match=match):
        QKClip(THRESHOLD).add_layer(n_heads, weights, name="layers.0.attention")


def test_a_weight_is_a_tensor():
    with pytest.raises(TypeError, match=r"a weight of layers\.0\.attention is a str, no tensor"):
        QKClip(THRESHOLD).add_layer(2, [("wq", [])], name="layers.0.attention")


@pytest.mark.parametrize("shape", [(4,), (3, 8, 5), (3, 1, 5)])
def test_logits_of_other_heads_are_refused(shape):
    weight = torch.zeros(16, DIM)
    maxima = QKClip(THRESHOLD).add_layer(4, [(weight, head_rows(4, (4, 1.0)))])
    with pytest.raises(ValueError, match=r"logits of shape .* for 4 heads"):
        observe(maxima, torch.zeros(shape))
    assert (maxima == -math.inf).all()


def test_a_weight_belongs_to_one_layer():
    kind = KINDS["grouped"]
    clip, weights = QKClip(THRESHOLD), weights_of(kind)
    add(clip, kind, weights)
    with pytest.raises(ValueError, match=r"of layers\.1\.attention belongs to another layer"):
        add(clip, kind, weights, name="layers.1.attention")
