"""Split rules against tensors that carry their own indices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_muon.distributed.matrices import MatrixRule, block_rows, by_row, matrix_rule, row_shape


def _matrices(x: Tensor, rule: MatrixRule) -> list[Tensor]:
    """Cut a tensor by the ranges of its rule; one (S, M, N) stack a matrix."""
    stacks = x.reshape(rule.stack)
    return [
        torch.cat([stacks[:, r.start :: r.step][:, : r.count] for r in ranges], dim=1)
        for ranges in block_rows(rule)
    ]


def _assemble(matrices: list[Tensor], rule: MatrixRule) -> Tensor:
    """Invert :func:`_matrices`; rows that no matrix holds stay at -1."""
    out = torch.full(rule.stack, -1, dtype=matrices[0].dtype)
    for matrix, ranges in zip(matrices, block_rows(rule), strict=True):
        position = 0
        for r in ranges:
            out[:, r.start :: r.step][:, : r.count] = matrix[:, position : position + r.count]
            position += r.count
    return out.reshape(rule.shape)


def _numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _assert_matrices(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_two_dims_are_one_matrix():
    x = _numbered(4, 6)
    _assert_matrices(_matrices(x, matrix_rule(x.shape)), [x[None]])


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 3, 4, 6)])
def test_leading_dims_are_a_batch(shape):
    x = _numbered(*shape)
    rule = matrix_rule(shape)
    assert rule.stack == (x.numel() // 24, 4, 6)
    _assert_matrices(_matrices(x, rule), [x.view(-1, 4, 6)])


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 2, 2), (4, 3, 1, 1), (1, 3, 2), (4, 6)])
def test_flatten_is_one_matrix(shape):
    x = _numbered(*shape)
    rule = matrix_rule(shape, flatten=True)
    _assert_matrices(_matrices(x, rule), [x.flatten(1)[None]])
    assert row_shape(rule) == (shape[0], 1)


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (1, 4, 6), (1, 1, 6), (2, 3, 4, 6)])
def test_one_value_a_row(shape):
    rule = matrix_rule(shape)
    assert row_shape(rule) == (*shape[:-1], 1)
    rows = by_row(rule)
    assert rows.stack == (*rule.stack[:2], 1)
    assert rows.shape == row_shape(rule)
    assert block_rows(rows) == block_rows(rule)


def test_row_counts_are_contiguous_blocks():
    x = _numbered(2, 7, 3)
    rule = matrix_rule(x.shape, split=[4, 1, 2])
    _assert_matrices(_matrices(x, rule), [x[:, :4], x[:, 4:5], x[:, 5:]])


def test_blocks_are_heads():
    x = _numbered(6, 5)
    rule = matrix_rule(x.shape, split={"kind": "blocks", "rows": 2})
    _assert_matrices(_matrices(x, rule), list(x.view(3, 1, 2, 5)))


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5)])
def test_strided_is_every_nth_row(shape):
    x = _numbered(*shape)
    rule = matrix_rule(shape, split={"kind": "strided", "count": 2})
    stacks = x.view(-1, 6, 5)
    # As gpt_oss reads its gate and up rows.
    _assert_matrices(_matrices(x, rule), [stacks[:, ::2], stacks[:, 1::2]])


def test_interleaved_qkv_gathers_over_the_kv_groups():
    n_kv, per_kv, head_dim, columns = 3, 2, 4, 5
    x = _numbered(n_kv * (per_kv + 2) * head_dim, columns)
    split = {
        "kind": "interleaved_qkv",
        "n_kv_heads": n_kv,
        "heads_per_kv": per_kv,
        "head_dim": head_dim,
    }
    # As torchtitan splits the activations of its fused projection.
    groups = x.view(n_kv, per_kv + 2, head_dim, columns)
    q, k, v = groups.split([per_kv, 1, 1], dim=1)
    expected = [part.reshape(1, -1, columns) for part in (q, k, v)]
    rule = matrix_rule(x.shape, split=split)
    _assert_matrices(_matrices(x, rule), expected)
    contiguous = matrix_rule(x.shape, split=[24, 12, 12])
    assert not torch.equal(_matrices(x, contiguous)[0], expected[0])


@st.composite
def _rules(draw) -> MatrixRule:
    small = st.integers(1, 4)
    numbers = [draw(small) for _ in range(3)]
    kind = draw(st.sampled_from(["whole", "rows", "blocks", "strided", "interleaved_qkv"]))
    tables = {
        "whole": (numbers[0], None),
        "rows": (sum(numbers), numbers),
        "blocks": (numbers[0] * numbers[1], {"kind": kind, "rows": numbers[0]}),
        "strided": (numbers[0] * numbers[1], {"kind": kind, "count": numbers[0]}),
        "interleaved_qkv": (
            numbers[0] * (numbers[1] + 2) * numbers[2],
            {"kind": kind}
            | dict(zip(("n_kv_heads", "heads_per_kv", "head_dim"), numbers, strict=True)),
        ),
    }
    rows, split = tables[kind]
    flatten = draw(st.booleans())
    others = draw(st.lists(small, min_size=1, max_size=2))
    shape = (rows, *others) if flatten else (*others[1:], rows, others[0])
    return matrix_rule(shape, flatten=flatten, split=split)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(_rules())
def test_matrices_hold_every_element_once(rule):
    x = _numbered(*rule.shape)
    matrices = _matrices(x, rule)
    assert torch.equal(_assemble(matrices, rule), x)
    assert sum(m.numel() for m in matrices) == x.numel()
    assert all(m.shape[0] == rule.stack[0] and m.shape[2] == rule.stack[2] for m in matrices)


@pytest.mark.parametrize(
    ("shape", "split", "message"),
    [
        ((), None, r"wq: shape \(\) has no rows and columns"),
        ((6,), None, r"wq: shape \(6,\) has no rows .* algorithm = 'adamw'"),
        ((6, 4), [2, 3], r"wq: split \[2, 3\] sums to 5, but the matrix has 6 rows"),
        ((2, 6, 4), [1, 1], "sums to 2, but the matrix has 6 rows"),
        ((6, 4), [7, -1], "must list positive row counts"),
        ((6, 4), [2.0, 4.0], "must list positive row counts"),
        ((6, 4), {"kind": "blocks", "rows": 4}, "rows = 4 does not divide the matrix's 6 rows"),
        ((6, 4), {"kind": "strided", "count": 4}, "count = 4 does not divide"),
        ((6, 4), {"kind": "ring", "count": 4}, "wq: split kind 'ring' is unknown; use one of"),
        ((6, 4), {"count": 2}, "split kind None is unknown"),
        ((6, 4), {"kind": "blocks"}, "needs the positive integer rows; got {}"),
        ((6, 4), {"kind": "blocks", "rows": 2, "n": 1}, "needs the positive integer rows"),
        ((6, 4), {"kind": "blocks", "rows": 0}, "needs the positive integer rows"),
        ((6, 4), {"kind": "blocks", "rows": True}, "needs the positive integer rows"),
        (
            (6, 4),
            {"kind": "interleaved_qkv", "n_kv_heads": 1, "heads_per_kv": 2, "head_dim": 2},
            "= 8 rows, but the matrix has 6",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(shape, split, message):
    with pytest.raises(ValueError, match=message):
        matrix_rule(shape, split=split, name="wq")


def test_rules_are_keys():
    split = {"kind": "blocks", "rows": 2}
    left, right = (matrix_rule(torch.Size([6, 4]), split=split) for _ in range(2))
    assert left == right
    assert hash(left) == hash(right)
