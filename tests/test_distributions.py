"""Densities and sampling against scipy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from exvae import distributions
from exvae.distributions import Normal


@pytest.mark.parametrize("low, high", [(-6.0, 2.0), (-25.0, -15.0), (15.0, 25.0)])
def test_log_normal_equals_scipy(low, high):
    rng = np.random.default_rng(0)
    log_var = rng.uniform(low, high, (9, 5)).astype(np.float32)
    mean = rng.normal(size=(9, 5)).astype(np.float32)
    z = (mean + rng.normal(size=(9, 5)) * np.exp(0.5 * log_var) * 3).astype(np.float32)
    got = distributions.log_normal(z, Normal(mean, log_var))
    mean, log_var, z = (a.astype(np.float64) for a in (mean, log_var, z))
    want = stats.norm.logpdf(z, mean, np.exp(0.5 * log_var)).sum(-1)
    assert got.shape == (9,)
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_log_normal_integrates_to_one():
    grid = np.linspace(-12, 12, 241)
    z = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2).astype(np.float32)
    q = Normal(jnp.array([[0.5, -1.0]]), jnp.array([[-0.7, 1.3]]))
    total = np.exp(np.asarray(distributions.log_normal(z, q), np.float64)).sum() * 0.1**2
    assert total == pytest.approx(1.0, abs=1e-5)


def test_log_bernoulli_equals_scipy_for_any_logit():
    logits = np.array([-1e4, -200, -88.0, -17, -1, -1e-3, 0, 1e-3, 1, 17, 88, 200, 1e4], np.float32)
    for value in (0.0, 0.25, 1.0):
        got = distributions.log_bernoulli(np.full((13, 1), value, np.float32), logits[:, None])
        exact = logits.astype(np.float64)
        want = value * special.log_expit(exact) + (1 - value) * special.log_expit(-exact)
        assert np.all(np.abs(got - want) <= 2e-7 * np.abs(exact) + 1e-6 * np.abs(want))


def test_log_bernoulli_sums_over_every_event_axis():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2, (3, 4, 5, 2)).astype(np.float32)
    logits = rng.normal(scale=3, size=x.shape).astype(np.float32)
    want = stats.bernoulli.logpmf(x, special.expit(logits.astype(np.float64))).reshape(3, -1).sum(-1)
    np.testing.assert_allclose(distributions.log_bernoulli(x, logits), want, rtol=1e-5)


def test_log_bernoulli_of_many_sure_pixels_is_not_rounded_away():
    """784 pixels that are each right with probability 1 - exp(-20)."""
    logits = np.full((1, 784), -20.0, np.float32)
    got = float(distributions.log_bernoulli(np.zeros_like(logits), logits)[0])
    assert got == pytest.approx(784 * special.log_expit(20.0), rel=1e-5)
    wrong = float(distributions.log_bernoulli(np.ones_like(logits), -3 * logits)[0])
    assert wrong == pytest.approx(784 * special.log_expit(60.0), rel=1e-5)


def test_log_bernoulli_gradient_is_x_minus_probability():
    logits = np.array([[-1e4, -30.0, -2.0, 0.0, 3.0, 40.0, 1e4]], np.float32)
    for value in (0.0, 1.0):
        x = np.full_like(logits, value)
        grad = jax.grad(lambda a, x=x: distributions.log_bernoulli(x, a).sum())(logits)
        np.testing.assert_allclose(grad, value - special.expit(logits.astype(np.float64)), rtol=1e-5, atol=1e-7)


def test_sample_normal_has_the_density_it_is_scored_by():
    mean = np.tile(np.array([[1.5, -3.0, 0.0]], np.float32), (4000, 1))
    log_var = np.tile(np.array([[-6.0, 0.0, 2.0]], np.float32), (4000, 1))
    z = distributions.sample_normal(jax.random.key(0), Normal(mean, log_var))
    assert z.shape == mean.shape
    noise = (np.asarray(z, np.float64) - mean) / np.exp(0.5 * log_var)
    for d in range(3):
        assert stats.kstest(noise[:, d], "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 5 / np.sqrt(4000)


def test_sample_normal_gradient_is_that_of_the_reparametrization():
    q = Normal(jnp.array([[0.3, -2.0]]), jnp.array([[-1.0, 1.5]]))

    @jax.jit
    def run(key, q):
        z, pull = jax.vjp(lambda q: distributions.sample_normal(key, q), q)
        return z, pull(jnp.ones_like(z))[0]

    z, grad = run(jax.random.key(3), q)
    np.testing.assert_allclose(grad.mean, np.ones((1, 2)))
    np.testing.assert_allclose(grad.log_var, 0.5 * (z - q.mean), rtol=1e-5)


def test_to_unit_maps_bytes_onto_the_unit_interval():
    bytes_ = np.arange(256, dtype=np.uint8)
    got = np.asarray(distributions.to_unit(bytes_))
    assert got.dtype == np.float32
    assert got[0] == 0.0 and got[255] == 1.0
    np.testing.assert_allclose(got, np.arange(256) / 255, rtol=2e-7)


def test_binarize_draws_each_pixel_with_its_own_probability():
    levels = np.array([0, 3, 64, 128, 200, 252, 255], np.uint8)
    images = np.tile(levels, (20_000, 1))
    binarize = jax.jit(distributions.binarize)
    drawn = np.asarray(binarize(jax.random.key(0), images))
    assert set(np.unique(drawn)) == {0.0, 1.0}
    frequency, p = drawn.mean(0), levels / 255
    assert frequency[0] == 0.0 and frequency[-1] == 1.0
    assert np.all(np.abs(frequency - p) <= 4.5 * np.sqrt(p * (1 - p) / len(images)))
    assert np.abs(np.corrcoef(drawn[:, 1:-1].T) - np.eye(5)).max() < 5 / np.sqrt(len(images))
    assert np.any(drawn != np.asarray(binarize(jax.random.key(1), images)))
