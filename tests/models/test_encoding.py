"""Means in blocks = means at once, value and gradient, whatever is kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae import models
from exvae.config import get_config
from exvae.models import encoding
from exvae.priors import NOBODY

BLOCK = 8
LIMITS = {"nothing": 0, "some": 3000, "all": float("inf")}


@pytest.fixture(scope="module")
def parts():
    config = get_config().model
    config.latent_dim, config.hidden_dim = 3, 16
    model = models.build(config, (4, 5, 1))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: models.init(key, model), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(scale=s.shape[0] ** -0.5, size=s.shape).astype(np.float32), shapes)
    images = rng.integers(0, 256, (40, 4, 5, 1), dtype=np.uint8)
    return model, params, jnp.asarray(images)


def direct(model, params, images, index, pull):
    """All means at once, by indexing on the host, and the gradient of <means, pull>."""
    x = np.asarray(images)[index].astype(np.float32) / 255

    @jax.jit
    def run(params):
        means, back = jax.vjp(lambda p: model.apply({"params": p}, x, method="encode").mean, params)
        return means, back(pull)[0]

    return run(params)


@pytest.mark.parametrize(
    "size, limit",
    [(1, "all"), (BLOCK, "all"), (BLOCK + 1, "all"), (2 * BLOCK, "all"), (2 * BLOCK, "nothing"), (BLOCK - 1, "nothing")]
    + [(4 * BLOCK + 3, limit) for limit in LIMITS],
)
def test_encode_means_equals_encoding_at_once(monkeypatch, parts, size, limit):
    monkeypatch.setattr(encoding, "BLOCK", BLOCK)
    model, params, images = parts
    rng = np.random.default_rng(size)
    index = rng.integers(0, 40, size)  # some of them twice
    pull = rng.normal(size=(size, 3)).astype(np.float32)

    @jax.jit
    def run(params, index):
        means, back = jax.vjp(
            lambda p: encoding.encode_means(model, p, images, index, activation_bytes=LIMITS[limit]), params
        )
        return means, back(pull)[0]

    (means, grads), (want, wanted) = run(params, index), direct(model, params, images, index, pull)
    assert means.shape == (size, 3)
    np.testing.assert_allclose(means, want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max() + 1e-6)


def test_encode_means_keeps_no_more_than_it_may(monkeypatch, parts):
    monkeypatch.setattr(encoding, "BLOCK", BLOCK)
    model, params, images = parts
    index = jnp.arange(40)

    def kept(limit):
        """Bytes that the forward pass leaves for the backward pass."""
        forward = lambda p: jax.vjp(  # noqa: E731
            lambda p: encoding.encode_means(model, p, images, index, activation_bytes=limit), p
        )
        _, back = jax.eval_shape(forward, params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(back))

    nothing, some, everything = (kept(limit) for limit in LIMITS.values())
    print(nothing, some, everything)
    assert nothing < some < everything
    slack = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert some - nothing <= LIMITS["some"] + slack
    hidden_layers = 4 * 16 * 40 * 4  # two gated layers, two products each, 40 images, float32
    assert everything - nothing >= hidden_layers


@pytest.mark.parametrize("size", [3, 11])
def test_encode_means_of_an_empty_slot_is_finite(monkeypatch, parts, size):
    # Its exemplar is never seen, but NaN * 0 would be.
    monkeypatch.setattr(encoding, "BLOCK", BLOCK)
    model, params, images = parts
    index = jnp.full(size, NOBODY).at[1].set(2)

    @jax.jit
    def run(params):
        means, back = jax.vjp(lambda p: encoding.encode_means(model, p, images, index), params)
        return means, back(jnp.zeros_like(means).at[1].set(1.0))[0]

    means, grads = run(params)
    assert np.all(np.isfinite(means))
    pull = np.ones((1, 3), np.float32)
    want, wanted = direct(model, params, images, np.array([2]), pull)
    np.testing.assert_allclose(means[1:2], want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
