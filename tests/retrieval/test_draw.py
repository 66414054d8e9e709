"""The draw of M out of N exemplars: its size, its uniformity, and that host and device agree."""

import math

import jax
import numpy as np
import pytest
from scipy import stats

from exvae.retrieval.draw import Draw, draw_exemplars


def draws(n, m, times, seed=0):
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    keys = np.stack([draw_exemplars(key, step, n, m).keys for step in range(times)], axis=1)
    return Draw(keys[:, :, None], n, m).contains(np.arange(n))  # (times, n)


@pytest.mark.parametrize("n, m", [(1, 1), (2, 1), (37, 1), (1000, 999), (1009, 500), (65_537, 3), (9, 9)])
def test_draw_contains_exactly_m_and_lists_them(n, m):
    key = np.array([5, 2**32 - 1], np.uint32)
    for step in (0, 1, 2**31 - 1):
        draw = draw_exemplars(key, step, n, m)
        drawn = draw.contains(np.arange(n))
        assert drawn.dtype == bool and drawn.sum() == m
        members = draw.members()
        assert members.dtype == np.int32
        np.testing.assert_array_equal(np.sort(members), np.flatnonzero(drawn))


@pytest.mark.parametrize("n", [7, 1000, 1009])
def test_device_and_host_draw_the_same(n):
    run = jax.jit(lambda draw, index: draw.contains(index))
    for step in (0, 77):
        draw = draw_exemplars(np.array([1, 2], np.uint32), step, n, n // 2)
        np.testing.assert_array_equal(run(draw, np.arange(n)), draw.contains(np.arange(n)))


def test_draw_is_uniform_over_images_and_pairs():
    n, m, times = 30, 11, 6000
    drawn = draws(n, m, times).astype(np.float64)
    np.testing.assert_array_equal(drawn.sum(1), m)
    p = m / n
    # Without replacement the counts are negatively correlated: the factor (n - 1) / n makes the sum chi-square.
    statistic = ((drawn.sum(0) - times * p) ** 2).sum() / (times * p * (1 - p)) * (n - 1) / n
    low, high = stats.chi2(n - 1).ppf([0.001, 0.999])
    assert low < statistic < high
    pairs = (drawn.T @ drawn)[np.triu_indices(n, 1)]
    p2 = p * (m - 1) / (n - 1)
    assert np.abs(pairs - times * p2).max() < 4.5 * np.sqrt(times * p2 * (1 - p2))


@pytest.mark.parametrize("n, m", [(5, 2), (6, 3), (7, 3)])
def test_draw_takes_every_subset_equally_often(n, m):
    times = 6000
    subsets, counts = np.unique(draws(n, m, times, seed=1), axis=0, return_counts=True)
    assert len(subsets) == math.comb(n, m)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_draws_of_different_keys_are_independent():
    drawn = draws(400, 200, 100, seed=2).astype(np.float64)
    shared = (drawn @ drawn.T)[np.triu_indices(100, 1)]
    law = stats.hypergeom(400, 200, 200)
    assert shared.mean() == pytest.approx(law.mean(), abs=4 * law.std() / np.sqrt(len(shared)))
    assert shared.std() == pytest.approx(law.std(), rel=0.1)
