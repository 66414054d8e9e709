"""Encoding in blocks equals encoding all at once, in values and gradients, whatever the backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae import encoding, models
from exvae.config import get_config
from exvae.models import convhvae
from exvae.retrieval import NOBODY

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower
BLOCK = 64
LIMITS = {"nothing": 0, "some": 30_000, "all": float("inf")}  # a block of the small model below keeps 12,288 bytes


@pytest.fixture(scope="module")
def parts():
    config = get_config().model
    config.latent_dim, config.hidden_dim = 3, 16
    model = models.build(config, (4, 5, 1))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(scale=s.shape[0] ** -0.5, size=s.shape).astype(np.float32), shapes)
    images = rng.integers(0, 256, (40, 4, 5, 1), dtype=np.uint8)
    return model, params, jnp.asarray(images)


def direct(model, params, images, index, pull):
    """All means at once, indexed on the host, and the gradient of <means, pull>."""
    pulls = np.zeros((len(images), 3), np.float32)
    np.add.at(pulls, index, pull)
    means, grads = encode_all(model, params, np.asarray(images).astype(np.float32) / 255, pulls)
    return np.asarray(means)[index], grads


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def encode_all(model, params, x, pull):
    means, back = jax.vjp(lambda p: model.apply({"params": p}, x, method="encode").mean, params)
    return means, back(pull)[0]


@pytest.mark.parametrize(
    "size, limit",
    [(BLOCK - 1, "all"), (BLOCK, "nothing"), (BLOCK + 1, "all"), (2 * BLOCK, "nothing")]
    + [(4 * BLOCK + 3, limit) for limit in LIMITS],
)
def test_encode_means_equals_encoding_at_once(monkeypatch, parts, size, limit):
    monkeypatch.setattr(encoding, "BLOCK", BLOCK)
    model, params, images = parts
    rng = np.random.default_rng(size)
    index = rng.integers(0, 40, size)  # some images occur twice
    pull = rng.normal(size=(size, 3)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(params, index):
        means, back = jax.vjp(
            lambda p: encoding.encode_means(model, {"model": p}, images, index, activation_bytes=LIMITS[limit]), params
        )
        return means, back(pull)[0]

    (means, grads), (want, wanted) = run(params, index), direct(model, params, images, index, pull)
    assert means.shape == (size, 3)
    np.testing.assert_allclose(means, want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max() + 1e-6)


def conv_results():
    """The number of results of the convolutions that read an image."""
    size, total = 28, 0
    for features, _, stride in convhvae.Z2_STACK:
        size //= stride
        total += size * size * 2 * features  # value and gate
    return total


# Two gated layers of 300 units, two products each.
RESULTS = {"vae": 4 * 300, "hvae": 4 * 300, "convhvae": conv_results()}


@pytest.mark.parametrize("architecture, num_images", [("vae", 20_000), ("hvae", 100), ("convhvae", 100)])
def test_encode_means_keeps_the_blocks_that_fit(architecture, num_images):
    config = get_config().model
    config.architecture = architecture
    model = models.build(config, (28, 28, 1))
    params = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    images = jax.ShapeDtypeStruct((num_images, 28, 28, 1), jnp.uint8)
    index = jax.ShapeDtypeStruct((5 * encoding.BLOCK,), jnp.int32)
    block = encoding.BLOCK * RESULTS[architecture] * 4  # float32

    def kept(limit):
        """Bytes that the forward pass keeps for the backward pass."""

        def forward(params, images, index):
            return jax.vjp(
                lambda p: encoding.encode_means(model, {"model": p}, images, index, activation_bytes=limit), params
            )

        _, back = jax.eval_shape(forward, params, images, index)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(back))

    nothing, weights = kept(0), 4 * 2 * (784 + 2) * 300  # kept blocks do not need first kernels and biases
    assert kept(float("inf")) - nothing >= 5 * block - weights
    for blocks in (1, 3):
        limit = (blocks + 0.5) * block
        assert (blocks - 0.5) * block <= kept(limit) - nothing <= limit


def test_encode_means_of_an_empty_slot_is_finite(monkeypatch, parts):
    # The mean of an empty slot has weight 0, but NaN * 0 is NaN.
    monkeypatch.setattr(encoding, "BLOCK", BLOCK)
    model, params, images = parts
    index = jnp.full(BLOCK + 3, NOBODY).at[1].set(2)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(params):
        means, back = jax.vjp(lambda p: encoding.encode_means(model, {"model": p}, images, index), params)
        return means, back(jnp.zeros_like(means).at[1].set(1.0))[0]

    means, grads = run(params)
    assert np.all(np.isfinite(means))
    pull = np.ones((1, 3), np.float32)
    want, wanted = direct(model, params, images, np.array([2]), pull)
    np.testing.assert_allclose(means[1:2], want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
