"""Densities and sampling, compared with SciPy in float64."""

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


def test_log_bernoulli_of_many_certain_pixels_is_accurate():
    """Each of 784 pixels is right with probability 1 - exp(-20)."""
    logits = np.full((1, 784), -20.0, np.float32)
    got = float(distributions.log_bernoulli(np.zeros_like(logits), logits)[0])
    assert got == pytest.approx(784 * special.log_expit(20.0), rel=1e-5)
    wrong = float(distributions.log_bernoulli(np.ones_like(logits), -3 * logits)[0])
    assert wrong == pytest.approx(784 * special.log_expit(60.0), rel=1e-5)


def test_log_bernoulli_gradient_is_x_minus_probability():
    logits = np.array([[-1e4, -30.0, -2.0, 0.0, 3.0, 40.0, 1e4]], np.float32)
    for value in (0.0, 1.0):
        x = np.full_like(logits, value)
        grad = jax.jit(jax.grad(lambda a, x=x: distributions.log_bernoulli(x, a).sum()))(logits)
        np.testing.assert_allclose(grad, value - special.expit(logits.astype(np.float64)), rtol=1e-5, atol=1e-7)


EXTREMES = [
    (mean, log_scale) for mean in (0.0, 1e-6, 0.3, 0.5, 1.0) for log_scale in (-12.0, -7.0, -3.0, 0.0, 5.0, 12.0)
]


LOG_LOGISTIC, LEVEL = jax.jit(distributions.log_discretized_logistic), jax.jit(distributions.logistic_level)


def scipy_levels(mean, log_scale):
    """log P(level) for the 256 levels in float64, computed from the more accurate tail."""
    scale = np.exp(np.clip(log_scale, -10, 10))
    edges = np.arange(1, 256) / 256
    cdf, survival = stats.logistic.cdf(edges, mean, scale), stats.logistic.sf(edges, mean, scale)
    cdf, survival = np.r_[0, cdf, 1], np.r_[1, survival, 0]
    return np.log(np.maximum(np.where(survival[:-1] > 0.5, np.diff(cdf), -np.diff(survival)), 1e-320))


@pytest.mark.parametrize("mean, log_scale", EXTREMES)
def test_discretized_logistic_equals_scipy_and_sums_to_one(mean, log_scale):
    x = (np.arange(256, dtype=np.float32) / 255)[:, None]
    got = LOG_LOGISTIC(x, np.full_like(x, mean), np.float32([log_scale]))
    got, want = np.asarray(got, np.float64), scipy_levels(np.float64(np.float32(mean)), log_scale)
    assert np.isfinite(got).all()
    assert np.exp(got).sum() == pytest.approx(1.0, abs=2e-5)
    there = want > -600  # smaller probabilities underflow in float64
    np.testing.assert_allclose(got[there], want[there], rtol=1e-4, atol=2e-4)


def test_discretized_logistic_has_finite_gradients_everywhere():
    """Also at the lowest and highest pixel values, for means outside of 0..1, and for scales beyond the range."""
    x, mean, log_scale = (
        a.reshape(-1, 1).astype(np.float32)
        for a in np.meshgrid([0, 1 / 255, 0.5, 254 / 255, 1], [-1, 0, 0.5, 1, 2], [-50, -10, -3, 0, 10, 50])
    )
    each = jax.vmap(lambda x, m, s: distributions.log_discretized_logistic(x[None], m[None], s)[0])

    @jax.jit
    def run(mean, log_scale):
        values, pull = jax.vjp(lambda m, s: each(x, m, s), mean, log_scale)
        return values, *pull(jnp.ones_like(values))

    assert all(np.isfinite(found).all() for found in run(mean, log_scale))


def test_discretized_logistic_gradient_equals_finite_differences():
    x, mean, log_scale = np.float32([[[3, 130, 255]]]) / 255, np.float32([[[0.2, 0.4, 0.6]]]), np.float32([-2, -4, -1])
    score = lambda m, s: distributions.log_discretized_logistic(x, m, s).sum()  # noqa: E731
    grads = jax.jit(jax.grad(score, (0, 1)))(mean, log_scale)

    def mass(m, s):  # float64
        low = np.array([stats.logistic.cdf(n / 256, a, np.exp(b)) for n, a, b in zip((3, 130, 255), m, s, strict=True)])
        high = np.array(
            [stats.logistic.cdf(n / 256, a, np.exp(b)) for n, a, b in zip((4, 131, 1e9), m, s, strict=True)]
        )
        return np.log(high - low).sum()

    m, s, step = mean.ravel().astype(np.float64), log_scale.astype(np.float64), 1e-6
    for grad, place in zip(grads, (0, 1), strict=True):
        for channel in range(3):
            ends = []
            for sign in (1, -1):
                at = [m.copy(), s.copy()]
                at[place][channel] += sign * step
                ends.append(mass(*at))
            assert grad.ravel()[channel] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3)


def test_logistic_levels_are_drawn_with_their_probability():
    u = ((np.arange(200_000) + 0.5) / 200_000).astype(np.float32)[:, None]
    for mean, log_scale in ((0.3, -3.0), (0.0, -1.0), (0.9, -6.0)):
        x = LEVEL(u, np.full_like(u, mean), np.float32([log_scale]))
        level = np.asarray(x * 255)
        np.testing.assert_allclose(level, level.round(), atol=1e-4)
        frequency = np.bincount(level.round().astype(int).ravel(), minlength=256) / len(u)
        np.testing.assert_allclose(frequency, np.exp(scipy_levels(mean, log_scale)), atol=3e-5)
    edge = LEVEL(np.float32([[0.0], [1.0]]), np.float32([[0.5], [0.5]]), np.float32([0.0]))
    np.testing.assert_array_equal(edge, [[0.0], [1.0]])


def test_sample_normal_has_the_given_mean_and_variance():
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
