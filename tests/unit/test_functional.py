"""The public ``orthogonalize`` and ``HybridMuonAdamW``."""

import pytest
import torch

from titan_muon import HybridMuonAdamW, orthogonalize


def _matrix(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 6, 5), (2, 3, 4, 9), (1, 7)])
def test_singular_values_land_in_the_promised_band(shape):
    values = torch.linalg.svdvals(orthogonalize(_matrix(*shape)))
    # Gaussian matrices of these shapes have singular values above 0.01 of their norm; the band
    # [0.86, 1.14] is rounded to two digits.
    assert values.min().item() >= 0.855
    assert values.max().item() <= 1.145


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_input_is_not_modified(dtype):
    x = _matrix(6, 9, dtype=dtype)
    before = x.clone()
    assert orthogonalize(x).dtype == dtype
    assert torch.equal(x, before)


def test_list_gives_list_of_the_same_results():
    items = [_matrix(4, 6), _matrix(9, 3, seed=1)]
    for got, item in zip(orthogonalize(items), items, strict=True):
        assert torch.equal(got, orthogonalize(item))


def test_batch_equals_loop():
    batch = _matrix(3, 5, 8)
    # Batched products may sum in another order.
    torch.testing.assert_close(
        orthogonalize(batch), torch.stack(orthogonalize(list(batch))), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ("abc", TypeError, "orthogonalize: x is a str; give a tensor"),
        (None, TypeError, "orthogonalize: x is a NoneType"),
        ([[1.0, 2.0], [3.0, 4.0]], TypeError, r"orthogonalize: x\[0\] is a list"),
        ([_matrix(3, 3), _matrix(4)], ValueError, r"orthogonalize: x\[1\] has shape \(4,\)"),
        (_matrix(3, 3).to(torch.float8_e4m3fn), TypeError, "x has dtype torch.float8_e4m3fn"),
        (_matrix(3, 3).to(torch.complex64), TypeError, "x has dtype torch.complex64"),
        (_matrix(3, 3).to_sparse(), TypeError, "layout torch.sparse_coo; use a dense tensor"),
    ],
    ids=["string", "none", "numbers", "vector", "float8", "complex", "sparse"],
)
def test_what_is_no_matrix_is_refused_by_name(x, error, message):
    with pytest.raises(error, match=message):
        orthogonalize(x)


def test_unknown_method_lists_what_exists():
    with pytest.raises(ValueError, match="polar_express"):
        orthogonalize(_matrix(3, 3), ns_method="polar")


def test_hybrid_gives_each_kind_its_lr():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
    optimizer = HybridMuonAdamW(model, muon_lr=0.03, adamw_lr=1e-3, weight_decay=0.2)
    lrs = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
    assert lrs == {"muon": 0.03, "adamw": 1e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 1e-3}, "lr = 0.001 would reach no parameter; give muon_lr .* and adamw_lr"),
        ({"algorithm": "adamw"}, "algorithm = 'adamw' does not work on matrices; use one of"),
        ({"algorithm": "Adam"}, "algorithm = 'Adam' does not work on matrices"),
        ({"adam_lr": 1e-3}, "adam_lr is not an option of Muon"),
    ],
)
def test_hybrid_refuses_what_it_would_not_use(arguments, message):
    with pytest.raises(ValueError, match=message):
        HybridMuonAdamW(torch.nn.Linear(8, 8), **arguments)
