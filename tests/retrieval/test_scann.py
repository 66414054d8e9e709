"""The ScaNN index on the host, compared with brute force."""

import time

import numpy as np
import pytest
from scipy import stats

from exvae.config import get_config
from exvae.retrieval import index as indexes
from exvae.retrieval import scann, slots
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


def shape(num_results, leaves=0, searched=0, reorder=0):
    return scann.Shape(num_results, leaves, searched, reorder)


@pytest.fixture(scope="module")
def large():
    table = clusters(12_000)
    index = np.random.default_rng(1).integers(len(table), size=200)
    return table, index


def test_tree_index_finds_nearly_all_neighbours(large):
    table, index = large
    found = scann.ScannIndex(table, shape(41, leaves=109, searched=25)).search(index)
    assert found.shape == (200, 41) and found.dtype == np.int32
    np.testing.assert_array_equal(found[:, 0], index)  # the row itself comes first
    shared = [len(set(a[:10]) & set(b)) for a, b in zip(found, brute(table, index, 10), strict=True)]
    assert np.mean(shared) / 10 >= 0.9
    assert all(len(set(row)) == 41 for row in found)
    squares = ((table[index][:, None] - table[found]) ** 2).sum(-1)
    assert np.all(np.diff(squares, axis=1) >= -1e-3)  # nearest first


@pytest.mark.parametrize("reorder", [0, 200])
def test_tree_index_is_the_same_when_built_again(large, reorder):
    table, index = large
    wanted = shape(41, leaves=109, searched=25, reorder=reorder)
    first, second = (scann.ScannIndex(table.copy(), wanted).search(index) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("n, num_results", [(500, 20), (30, 30)])
def test_small_index_is_exact(n, num_results):
    table = clusters(n, seed=2)
    index = np.arange(0, n, 3)
    found = scann.ScannIndex(table, shape(num_results)).search(index)
    np.testing.assert_array_equal(found, brute(table, index, num_results))


SETTINGS = [(10, 25_000, 50_000), (10, 500, 1000), (1, 100, 10_000), (5, 5000, 100_000), (50, 1000, 2000), (3, 20, 24)]


@pytest.mark.parametrize("k, m, n", SETTINGS)
def test_num_candidates_leaves_k_with_high_probability(k, m, n):
    c = slots.num_candidates(k, m, n)
    assert k < c <= n
    # Of the C - 1 candidates other than the query, the number drawn is hypergeometric (worst case: the query is drawn).
    fewer = stats.hypergeom(n - 1, m - 1, c - 1).cdf(k - 1)
    assert fewer < 0.003
    if c < n and k >= 10:  # the number is not wasteful: a third of it is often too small
        assert stats.hypergeom(n - 1, m - 1, c // 3).cdf(k - 1) > 0.01


@pytest.mark.parametrize("k, n", [(10, 10), (5, 7)])
def test_num_candidates_of_a_full_draw_is_at_most_the_training_set(k, n):
    assert slots.num_candidates(k, n, n) <= n


def test_candidates_cut_to_the_draw_contain_k_neighbours():
    n, m, k, batch = 2000, 400, 5, 20
    table, rng = clusters(n, seed=3), np.random.default_rng(4)
    index = scann.ScannIndex(table, shape(slots.num_candidates(k, m, n)))

    full = []
    for step in range(30):
        own = rng.permutation(n)[:batch]
        draw = draw_exemplars(np.array([1, 2], np.uint32), step, n, m)
        neighbours = slots.cut(index.search(own), k, draw=draw, leave_out=own)
        full += list((neighbours >= 0).all(1))
    assert np.mean(full) > 0.99


def test_tree_index_returns_no_duplicates_for_many_results(large):
    # K = 10 of M = 100 drawn exemplars need 3,000 candidates, more than the searched leaves hold.
    table, index = large
    num_results = slots.num_candidates(10, 100, len(table))
    found = scann.ScannIndex(table, shape(num_results, leaves=109, searched=25)).search(index)
    assert found.shape == (len(index), num_results)  # a fixed shape, so that the step compiles once
    for row in found:
        kept = row[row >= 0]
        assert len(set(kept)) == len(kept)  # each row of the table at most once


def make_config(**retrieval):
    config = get_config()
    config.prior.num_exemplars = 1000
    config.retrieval.update(retrieval)
    return config


def test_shape_follows_the_rule_unless_options_override_it():
    assert scann.choose_shape(make_config(), 2000) == shape(slots.num_candidates(10, 1000, 2000))
    config = make_config()
    config.prior.num_exemplars = 500_000
    candidates = slots.num_candidates(10, 500_000, 1_000_000)
    assert scann.choose_shape(config, 1_000_000) == shape(candidates, 1000, 25, 5 * candidates)
    config.prior.num_exemplars = 25_000
    assert scann.choose_shape(config, 50_000) == shape(slots.num_candidates(10, 25_000, 50_000), 223, 25, 0)
    config.prior.num_exemplars = 100  # 12,000 candidates, more than 25 leaves hold
    few = scann.choose_shape(config, 50_000)
    assert few.searched * 50_000 / few.leaves >= 3 * few.num_results or few.searched == few.leaves
    assert scann.choose_shape(make_config(leaves=10, leaves_searched=3, reorder=1), 2000)[1:3] == (10, 3)
    assert scann.choose_shape(make_config(leaves=10, leaves_searched=99), 2000).searched == 10
    config = make_config(reorder=-1)
    assert scann.choose_shape(config, 1_000_000).reorder == 0


def test_recall_equals_brute_force(large):
    """With few searched leaves, the index finds a part of the neighbours. The recall is this part."""
    table, _ = large
    index = scann.ScannIndex(table, shape(41, leaves=109, searched=1))
    queries = np.random.default_rng(0).integers(len(table), size=indexes.RECALL_QUERIES)
    found, want = index.search(queries), brute(table, queries, 11)
    shared = [len(set(f[f != q][:10]) & set(w[w != q][:10])) for f, w, q in zip(found, want, queries, strict=True)]
    assert indexes.recall(index, table, 10) == pytest.approx(np.mean(shared) / 10, abs=0.003)
    assert 0.2 < indexes.recall(index, table, 10) < 0.9
    assert indexes.recall(scann.ScannIndex(table[:500], shape(41)), table[:500], 10) == 1.0


def test_indices_are_swapped_at_their_step(monkeypatch, capsys):
    """The current index answers while the next one is built. A swap waits until the next one is finished."""
    tables = [clusters(300, seed=seed) for seed in range(3)]
    real = scann.ScannIndex

    def slow(table, wanted):
        time.sleep(0.0 if table is tables[0] else 1.1)
        return real(table, wanted)

    monkeypatch.setattr(scann, "ScannIndex", slow)
    indices, own = indexes.Indices(shape(5), 3, min_recall=0.5), np.arange(4)
    indices.start(tables[0], None)
    np.testing.assert_array_equal(indices.search(own), brute(tables[0], own, 5))
    indices.swap(tables[1])  # the build of the next index only starts here
    np.testing.assert_array_equal(indices.search(own), brute(tables[0], own, 5))
    indices.swap(tables[2])
    np.testing.assert_array_equal(indices.search(own), brute(tables[1], own, 5))
    assert indices.recall == 1.0
    assert "waited 1 s for the index" in capsys.readouterr().out


def test_low_recall_prints_a_warning(large, capsys):
    table, _ = large
    indices = indexes.Indices(shape(41, leaves=109, searched=1), 10, min_recall=0.9)
    indices.start(table, None)
    assert indices.recall < 0.9
    output = capsys.readouterr().out
    assert "config.retrieval.min_recall=0.9" in output and "leaves_searched (now 1 of 109)" in output


def test_search_raises_the_exception_of_the_build():
    indices = indexes.Indices(shape(5), 3, min_recall=0.0)
    indices.start(np.zeros((0, 3), np.float32), None)
    with pytest.raises(Exception):  # noqa: B017  (ScaNN's own)
        indices.search(np.arange(2))


def test_builds_print_nothing_on_standard_error(large, capfd):
    builds = [indexes.in_background(scann.ScannIndex, large[0], shape(41, leaves=20, searched=5)) for _ in range(2)]
    for build in builds:
        build.result()
    assert capfd.readouterr().err == ""


def test_index_works_if_the_log_level_cannot_be_set(large, monkeypatch):
    monkeypatch.setattr(scann, "SET_MIN_LOG_LEVEL", "of_another_version")
    table, index = large
    assert scann.ScannIndex(table, shape(41, leaves=20, searched=5)).search(index).shape == (200, 41)
