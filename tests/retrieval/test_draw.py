"""The draw of M out of N: size, uniformity, ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from exvae.retrieval.draw import draw_exemplars


def draws(n, m, times, seed=0):
    keys = jax.random.split(jax.random.key(seed), times)
    return np.asarray(jax.jit(jax.vmap(lambda key: draw_exemplars(key, n, m)))(keys))


@pytest.mark.parametrize("n, m", [(37, 1), (1000, 999)])
def test_draw_has_exactly_m(n, m):
    drawn = draws(n, m, 50)
    assert drawn.dtype == bool and drawn.shape == (50, n)
    np.testing.assert_array_equal(drawn.sum(1), m)


def test_draw_of_everything_is_everything():
    np.testing.assert_array_equal(draw_exemplars(jax.random.key(0), 9, 9), np.ones(9, bool))


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


def test_draw_takes_every_subset_equally_often():
    times = 6000
    subsets, counts = np.unique(draws(5, 2, times, seed=1), axis=0, return_counts=True)
    assert len(subsets) == 10
    assert stats.chisquare(counts).pvalue > 1e-3


def test_draws_of_different_keys_are_independent():
    drawn = draws(400, 200, 100, seed=2).astype(np.float64)
    shared = (drawn @ drawn.T)[np.triu_indices(100, 1)]
    law = stats.hypergeom(400, 200, 200)
    assert shared.mean() == pytest.approx(law.mean(), abs=4 * law.std() / np.sqrt(len(shared)))
    assert shared.std() == pytest.approx(law.std(), rel=0.1)


@pytest.mark.parametrize("m", [1, 2, 7, 19])
def test_draw_has_exactly_m_when_two_keys_tie(monkeypatch, m):
    # Ten values, each of them twice, 0 and the largest possible key among them: every odd M cuts a pair.
    rng = np.random.default_rng(m)
    values = np.append(np.arange(9), 2**32 - 1).repeat(2).astype(np.uint32)
    tied = rng.permutation(values)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(tied, dtype).reshape(shape))
    drawn = np.asarray(jax.jit(lambda key: draw_exemplars(key, 20, m))(jax.random.key(0)))
    assert drawn.sum() == m
    np.testing.assert_array_equal(np.sort(tied[drawn]), np.sort(values)[:m])  # the M smallest, not any others
