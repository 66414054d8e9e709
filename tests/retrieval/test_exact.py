"""Two-stage top-k and nearest neighbours against a sort in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae.retrieval import NOBODY, exact

QUICKLY = {"xla_backend_optimization_level": 0}  # compile fast, run slow


@pytest.mark.parametrize("columns, k", [(1, 10), (2, 64), (9, 1), (40, 10)])
def test_smallest_k_equals_a_sort(columns, k):
    n = columns * exact.SEGMENT
    rng = np.random.default_rng(columns)
    smooth = rng.normal(size=(6, n))
    ties = rng.integers(0, 4, (6, n))  # far more than k values are equal
    gaps = np.where(rng.random((6, n)) < 0.9, np.inf, smooth)  # often fewer than k are finite
    run = jax.jit(functools.partial(exact.smallest_k, k=k))
    for values in (smooth, ties, gaps):
        values = values.astype(np.float32)
        got, position = (np.asarray(a) for a in run(values))
        np.testing.assert_array_equal(got, np.sort(values, axis=1)[:, :k])
        np.testing.assert_array_equal(np.take_along_axis(values, position, axis=1), got)
        assert all(len(set(row)) == k for row in position)


def test_smallest_k_finds_them_when_they_share_a_segment():
    # All of the k smallest stand in one segment, whichever way segments are cut.
    run = jax.jit(functools.partial(exact.smallest_k, k=5))
    for stride in (1, 10):
        values = np.full((1, 10 * exact.SEGMENT), 100.0, np.float32)
        wanted = np.arange(5) * stride + 7
        values[0, wanted] = np.arange(5)
        _, position = run(values)
        np.testing.assert_array_equal(position[0], wanted)


def brute(queries, table, k, allowed, leave_out):
    out = np.full((len(queries), k), NOBODY)
    for b, query in enumerate(queries.astype(np.float64)):
        rows = [j for j in range(len(table)) if allowed[j] and (leave_out is None or j != leave_out[b])]
        rows.sort(key=lambda j: np.sum((query - table[j]) ** 2))
        out[b, : len(rows)] = rows[:k]
    return out


def searcher(k, leave_out=True):
    def run(queries, table, allowed, own):
        return exact.nearest(queries, table, k, allowed=allowed, leave_out=own if leave_out else None)

    return jax.jit(run, compiler_options=QUICKLY)


@pytest.mark.parametrize(
    "block, rows, leave_out", [(64, 200, True), (64, 128, True), (64, 200, False), (16384, 200, True), (16384, 7, True)]
)
def test_nearest_equals_a_sort(monkeypatch, block, rows, leave_out):
    monkeypatch.setattr(exact, "BLOCK", block)
    rng = np.random.default_rng(rows)
    table = rng.normal(size=(rows, 5)).astype(np.float32)
    own = rng.permutation(rows)[:6]
    queries = table[own] + rng.normal(scale=0.05, size=(6, 5)).astype(np.float32)  # own row nearest, if it may be seen
    run = searcher(6, leave_out)
    for share in (1.0, 0.5, 0.02, 0.0):
        allowed = rng.random(rows) < share
        got = np.asarray(run(queries, table, allowed, own))
        np.testing.assert_array_equal(got, brute(queries, table, 6, allowed, own if leave_out else None))


@pytest.mark.parametrize("num_allowed", [70, 3])
def test_nearest_scores_only_the_allowed_when_their_number_is_known(monkeypatch, num_allowed):
    monkeypatch.setattr(exact, "BLOCK", 32)
    rng = np.random.default_rng(num_allowed)
    table = rng.normal(size=(150, 4)).astype(np.float32)
    own = np.array([0, 149, 20, 75])
    allowed = np.zeros(150, bool)
    allowed[rng.permutation(150)[:num_allowed]] = True
    allowed[np.flatnonzero(allowed)[0]], allowed[0] = allowed[0], True  # the first row is in it, as is its query

    def run(queries, table, allowed):
        return exact.nearest(queries, table, 6, allowed=allowed, leave_out=jnp.asarray(own), num_allowed=num_allowed)

    got = jax.jit(run, compiler_options=QUICKLY)(table[own], table, allowed)
    np.testing.assert_array_equal(got, brute(table[own], table, 6, allowed, own))


def test_nearest_leaves_out_the_row_in_every_block(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK", 32)
    table = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    got = np.asarray(searcher(1)(table, table, np.ones(100, bool), np.arange(100)))
    np.testing.assert_array_equal(got, brute(table, table, 1, np.ones(100, bool), np.arange(100)))
    without = np.asarray(searcher(1, leave_out=False)(table, table, np.ones(100, bool), np.arange(100)))
    np.testing.assert_array_equal(without[:, 0], np.arange(100))


def test_nearest_of_equal_rows_returns_each_once():
    table = np.zeros((50, 2), np.float32)
    allowed = np.arange(50) < 20
    got = np.asarray(searcher(25)(table[:2], table, allowed, np.array([3, 40])))
    assert set(got[0]) == set(range(20)) - {3} | {NOBODY} and list(got[0]).count(NOBODY) == 6
    assert set(got[1]) == set(range(20)) | {NOBODY} and list(got[1]).count(NOBODY) == 5
    assert np.all(got[:, -5:] == NOBODY)


def test_nearest_at_the_shape_of_a_training_step():
    rng = np.random.default_rng(3)
    rows, batch, k = 3 * exact.BLOCK + 5, 16, 10
    table = rng.normal(size=(rows, 40)).astype(np.float32)
    own = rng.permutation(rows)[:batch]
    own[0] = rows - 1
    queries = table[own] + np.float32(0.1)
    allowed = rng.random(rows) < 0.5
    got = np.asarray(searcher(k)(queries, table, allowed, own))
    exact_squares = (table.astype(np.float64) ** 2).sum(-1) - 2 * queries.astype(np.float64) @ table.T.astype(
        np.float64
    )
    exact_squares[:, ~allowed] = np.inf
    exact_squares[np.arange(batch), own] = np.inf
    want = np.sort(np.partition(exact_squares, k, axis=1)[:, :k], axis=1)
    # By distance: neighbours closer together than float32 can tell may change places.
    np.testing.assert_allclose(np.take_along_axis(exact_squares, got, axis=1), want, atol=1e-4)
    assert all(len(set(row)) == k for row in got)
