"""The host index against brute force."""

import jax
import numpy as np
import pytest
from scipy import stats

from exvae.retrieval import scann, select
from exvae.retrieval.draw import draw_exemplars

pytest.importorskip("scann")


def clusters(n, dim=10, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(scale=2.0, size=(60, dim))
    return (centres[rng.integers(60, size=n)] + 0.7 * rng.normal(size=(n, dim))).astype(np.float32)


def brute(table, index, k):
    table = table.astype(np.float64)
    squares = (table[index] ** 2).sum(-1)[:, None] - 2 * table[index] @ table.T + (table**2).sum(-1)
    return np.argsort(squares, axis=1, kind="stable")[:, :k]


@pytest.fixture(scope="module")
def large():
    table = clusters(12_000)
    index = np.random.default_rng(1).integers(len(table), size=200)
    return table, index


def test_tree_index_finds_nearly_all_neighbours(large):
    table, index = large
    assert len(table) >= scann.BRUTE_FORCE_BELOW
    found = scann.ScannIndex(table, 41).search(index)
    assert found.shape == (200, 41) and found.dtype == np.int32
    np.testing.assert_array_equal(found[:, 0], index)  # the row itself comes first
    shared = [len(set(a[:10]) & set(b)) for a, b in zip(found, brute(table, index, 10), strict=True)]
    assert np.mean(shared) / 10 >= 0.9
    assert all(len(set(row)) == 41 for row in found)
    squares = ((table[index][:, None] - table[found]) ** 2).sum(-1)
    assert np.all(np.diff(squares, axis=1) >= -1e-3)  # nearest first


def test_tree_index_is_the_same_when_built_again(large):
    table, index = large
    first, second = (scann.ScannIndex(table.copy(), 41).search(index) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("n, num_results", [(500, 20), (30, 30)])
def test_small_index_is_exact(n, num_results):
    table = clusters(n, seed=2)
    index = np.arange(0, n, 3)
    assert n < scann.BRUTE_FORCE_BELOW
    np.testing.assert_array_equal(scann.ScannIndex(table, num_results).search(index), brute(table, index, num_results))


SETTINGS = [(10, 25_000, 50_000), (10, 500, 1000), (1, 100, 10_000), (5, 5000, 100_000), (50, 1000, 2000), (3, 20, 24)]


@pytest.mark.parametrize("k, m, n", SETTINGS)
def test_num_candidates_leaves_k_with_high_probability(k, m, n):
    c = scann.num_candidates(k, m, n)
    assert k < c <= n
    # Of the C - 1 candidates that are not the query, those drawn are hypergeometric (worst case: so is the query).
    fewer = stats.hypergeom(n - 1, m - 1, c - 1).cdf(k - 1)
    assert fewer < 0.003
    if c < n and k >= 10:  # and no wasteful number of them: a third would often not do
        assert stats.hypergeom(n - 1, m - 1, c // 3).cdf(k - 1) > 0.01


@pytest.mark.parametrize("k, n", [(10, 10), (5, 7)])
def test_num_candidates_of_a_full_draw_is_at_most_the_training_set(k, n):
    assert scann.num_candidates(k, n, n) <= n


def test_candidates_cut_to_the_draw_leave_k():
    n, m, k, batch = 2000, 400, 5, 20
    table, rng = clusters(n, seed=3), np.random.default_rng(4)
    index = scann.ScannIndex(table, scann.num_candidates(k, m, n))

    @jax.jit
    def run(key, candidates, own):
        return select.cut(candidates, k, allowed=draw_exemplars(key, n, m), leave_out=own)

    full = []
    for step in range(30):
        own = rng.permutation(n)[:batch]
        neighbours = np.asarray(run(jax.random.key(step), index.search(own), own))
        full += list((neighbours >= 0).all(1))
    assert np.mean(full) > 0.99


def test_tree_index_returns_no_false_neighbours_when_many_are_asked_for(large):
    # K = 10 of M = 100 drawn: 3,000 candidates, more than the searched leaves hold.
    table, index = large
    num_results = scann.num_candidates(10, 100, len(table))
    found = scann.ScannIndex(table, num_results).search(index)
    assert found.shape == (len(index), num_results)  # one shape, one compilation of the step
    for row in found:
        kept = row[row >= 0]
        assert len(set(kept)) == len(kept)  # each row of the table at most once
