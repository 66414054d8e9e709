"""PixelSNAIL as a whole: p(x|z) sums to one, samples follow it, and every pixel depends on all of z."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from exvae import models
from exvae.config import get_config
from exvae.models import pixelsnail
from tests.conftest import Patch

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


@pytest.fixture(scope="module", autouse=True)
def two_blocks():
    """Two blocks compile faster than four. test_causal.py tests four."""
    with Patch.context() as patch:
        patch.setattr(pixelsnail, "BLOCKS", 2)
        yield


def build(image_shape, likelihood="bernoulli", **fields):
    """A small model, its parameters and a jitted `apply`. Large weights make pixels depend on each other and on z."""
    config = get_config().model
    config.update({"architecture": "pixelsnail", "latent_dim": 3, "lower_latent_dim": 2, "hidden_dim": 6})
    config.update({"channels": 4, "likelihood": likelihood, **fields})
    model = models.build(config, image_shape)
    rng = np.random.default_rng(0)
    shapes, _ = jax.eval_shape(lambda key: models.init(key, model), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.7).astype(np.float32), shapes)
    params = {
        "model": {
            **params,
            "p_x": {
                **params["p_x"],
                "output": {**params["p_x"]["output"], "gain": np.full(image_shape[-1:], 2.0, np.float32)},
            },
        }
    }

    @functools.partial(jax.jit, static_argnames=("method", "draw"), compiler_options=QUICKLY)
    def apply(*args, method, draw=None):
        return models.apply(model, params, *args, *([] if draw is None else [draw]), method=method)

    return model, params, apply


def latents(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.normal(size=(count, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def tiny():
    """All 64 binary images of 2x3, and log p(x|z) of each at one z."""
    _, _, apply = build((2, 3, 1))
    images = np.array(list(itertools.product([0.0, 1.0], repeat=6)), np.float32).reshape(64, 2, 3, 1)
    z2, z1 = latents(1)
    log_p = apply(images, np.repeat(z2, 64, axis=0), np.repeat(z1, 64, axis=0), method="log_px")
    return apply, images, (z2, z1), np.exp(np.asarray(log_p, np.float64))


def test_likelihood_sums_to_one_over_all_images(tiny):
    _, _, _, p = tiny
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    assert p.max() > 3 * p.min()


def test_likelihood_does_not_factor_over_pixels(tiny):
    """Otherwise the test above would also pass with wrong masks."""
    _, images, _, p = tiny
    flat = images.reshape(64, 6)
    marginal = p @ flat
    product = np.prod(np.where(flat == 1, marginal, 1 - marginal), axis=1)
    assert np.abs(np.log(product / p)).max() > 0.2


def test_sampling_agrees_with_the_likelihood(tiny):
    apply, _, (z2, z1), p = tiny
    count = 20_000
    u = np.random.default_rng(1).uniform(size=(count, 2, 3, 1)).astype(np.float32)
    drawn = apply((np.repeat(z2, count, axis=0), np.repeat(z1, count, axis=0)), u, method="render", draw=True)
    numbers = np.asarray(drawn).reshape(count, 6) @ (2 ** np.arange(5, -1, -1))
    observed = np.bincount(numbers.astype(int), minlength=64)
    assert stats.chisquare(observed, count * p / p.sum()).pvalue > 1e-3


@pytest.mark.parametrize("likelihood, shape", [("bernoulli", (5, 4, 1)), ("discretized_logistic", (3, 5, 3))])
def test_drawing_pixel_by_pixel_equals_one_pass(likelihood, shape):
    """Drawing gives the same means as one pass over the drawn image, and a pixel is 1 if u is below its mean."""
    _, _, apply = build(shape, likelihood)
    z = latents(6)
    u = np.random.default_rng(1).uniform(size=(6, *shape)).astype(np.float32)
    drawn, mean = (np.asarray(apply(z, u, method="render", draw=draw)) for draw in (True, False))
    at_once = jax.nn.sigmoid(apply(drawn, *z, method="logits"))
    np.testing.assert_allclose(mean, at_once, atol=2e-5)
    assert len(np.unique(drawn.reshape(6, -1), axis=0)) == 6
    if likelihood == "bernoulli":
        np.testing.assert_array_equal(drawn, u < mean)
    shared = np.asarray(apply(z, u[:1], method="render", draw=True))  # the same random numbers for all
    np.testing.assert_array_equal(shared[0], drawn[0])


def test_every_logit_depends_on_every_part_of_z():
    shape = (4, 5, 1)
    model, params, _ = build(shape)
    x = np.random.default_rng(1).integers(0, 2, (1, *shape)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def jacobian(z2, z1):
        return jax.jacrev(lambda *z: models.apply(model, params, x, *z, method="logits").reshape(-1), (0, 1))(z2, z1)

    grads = jacobian(*latents(1))
    for grad, size in zip(grads, (3, 2), strict=True):
        assert grad.shape == (20, 1, size)
        assert np.abs(grad).min() > 1e-6


def test_terms_are_those_of_the_hierarchical_model():
    """`terms` returns log p(x|z1,z2) of the drawn latents. All other terms come from ConvHVAE."""
    _, _, apply = build((6, 6, 1))
    x = np.random.default_rng(1).integers(0, 2, (4, 6, 6, 1)).astype(np.float32)
    key = jax.random.key(3)
    terms = apply(key, x, method="terms")
    q_z1 = apply(apply(x, method="observe").features, terms.z, method="posterior_z1")
    z1 = q_z1.mean + jnp.exp(0.5 * q_z1.log_var) * jax.random.normal(jax.random.split(key)[1], (4, 2))
    np.testing.assert_allclose(terms.log_px, apply(x, terms.z, z1, method="log_px"), rtol=1e-4)
