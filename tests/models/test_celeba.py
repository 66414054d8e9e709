"""The CelebA architecture: it has the layers of the supplement; batch norm in training and in evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from exvae import encoding, models
from exvae.config import get_config
from exvae.distributions import log_discretized_logistic, to_unit

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


def build(image_shape, **fields):
    config = get_config().model
    config.update({"architecture": "celeba", "likelihood": "discretized_logistic", "latent_dim": 3, "channels": 2})
    config.update(fields)
    return models.build(config, image_shape)


def shapes_of(model):
    return jax.eval_shape(lambda key: models.init(key, model), jax.random.key(0))


def test_parameters_are_those_of_the_paper():
    params, statistics = shapes_of(build((64, 64, 3), latent_dim=128, channels=64))
    kernels = [leaf.shape for path, leaf in jax.tree.leaves_with_path(params) if path[-1].key == "kernel"]
    want = [(5, 5, 3, 64), (5, 5, 64, 128), (5, 5, 128, 256), (5, 5, 256, 512)]  # encoder
    want += [(5, 5, 512, 512), (5, 5, 512, 256), (5, 5, 256, 128), (5, 5, 128, 64), (5, 5, 64, 3)]  # decoder
    want += [(4 * 4 * 512, 128)] * 2 + [(128, 4 * 4 * 512)]
    assert sorted(kernels) == sorted(want)
    assert params["family"]["log_scale"].shape == (3,)
    features = [leaf.shape for leaf in jax.tree.leaves(statistics)]
    # Mean and variance, in encoder and decoder.
    assert sorted(features) == sorted([(f,) for f in (64, 128, 256, 512) for _ in range(4)])


@pytest.fixture(scope="module")
def case():
    """A small model for images whose size is no multiple of 16, with random running statistics."""
    model = build((20, 36, 3))
    rng = np.random.default_rng(0)
    params, statistics = shapes_of(model)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype(np.float32), params)
    statistics = jax.tree.map(lambda s: rng.uniform(0.5, 2.0, size=s.shape).astype(np.float32), statistics)
    x = rng.integers(0, 256, (5, 20, 36, 3), dtype=np.uint8)
    return model, {"model": params, **statistics}, x


@functools.partial(jax.jit, static_argnames="stride", compiler_options=QUICKLY)
def conv(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), [(2, 2)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@functools.partial(jax.jit, compiler_options=QUICKLY)
def normed(params, statistics, y):
    p, s = params["BatchNorm_0"], statistics["BatchNorm_0"]
    return jax.nn.elu((y - s["mean"]) / jnp.sqrt(s["var"] + 1e-5) * p["scale"] + p["bias"])


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def outputs(model, params, x, z):
    return models.apply(model, params, x, method="encode"), models.apply(model, params, z, method="logits")


def test_networks_equal_a_forward_pass_with_running_statistics(case):
    model, params, x = case
    p, s = params["model"], params["batch_stats"]
    z = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    q, logits = outputs(model, params, np.asarray(to_unit(x)), z)
    h = np.asarray(to_unit(x))
    for name in (f"layers_{i}" for i in range(4)):
        h = normed(p["encoder"][name], s["encoder"][name], conv(h, p["encoder"][name]["Conv_0"]["kernel"], stride=2))
    assert h.shape == (5, 2, 3, 16)
    h = np.asarray(h).reshape(5, -1)
    np.testing.assert_allclose(q.mean, h @ p["q_z"]["mean"]["kernel"] + p["q_z"]["mean"]["bias"], rtol=1e-3, atol=1e-3)
    d = p["decoder"]
    h = (z @ d["layers_0"]["kernel"] + d["layers_0"]["bias"]).reshape(5, 2, 3, 16)
    for name in (f"layers_{i}" for i in range(2, 6)):
        h = np.asarray(h).repeat(2, axis=1).repeat(2, axis=2)
        h = normed(d[name], s["decoder"][name], conv(h, d[name]["Conv_0"]["kernel"]))
    want = np.asarray(conv(h, d["layers_6"]["kernel"])) + d["layers_6"]["bias"]
    assert want.shape == (5, 32, 48, 3)
    np.testing.assert_allclose(logits, want[:, :20, :36], rtol=1e-3, atol=1e-3)


def test_training_uses_the_batch_and_updates_running_statistics(case):
    model, params, x = case
    x = np.asarray(to_unit(x))
    keys = jax.random.split(jax.random.key(0))
    train = jax.jit(functools.partial(models.training_terms, *keys, model), compiler_options=QUICKLY)
    terms, new = train(params, x)
    first = np.asarray(conv(x, params["model"]["encoder"]["layers_0"]["Conv_0"]["kernel"], stride=2))
    old = params["batch_stats"]["encoder"]["layers_0"]["BatchNorm_0"]
    now = new["batch_stats"]["encoder"]["layers_0"]["BatchNorm_0"]
    for name, value in (("mean", first.mean((0, 1, 2))), ("var", first.var((0, 1, 2)))):
        np.testing.assert_allclose(now[name], 0.9 * old[name] + 0.1 * value, rtol=1e-3, atol=1e-4)
    # Training normalises by the statistics of the batch and ignores the running statistics.
    forgotten = {**params, "batch_stats": jax.tree.map(np.ones_like, params["batch_stats"])}
    np.testing.assert_allclose(train(forgotten, x)[0].log_px, terms.log_px, rtol=1e-5)
    q, logits = outputs(model, params, x, np.asarray(terms.z))
    assert np.abs(q.mean - terms.q.mean).max() > 1e-2

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def log_px(params, z, logits):
        want = log_discretized_logistic(x, jax.nn.sigmoid(logits), params["model"]["family"]["log_scale"])
        return models.apply(model, params, x, z, method="log_px"), want

    np.testing.assert_allclose(*log_px(params, terms.z, logits), rtol=1e-4)


def test_exemplars_are_encoded_with_running_statistics(case):
    """An exemplar has the same mean alone and in a batch."""
    model, params, x = case
    means_of = jax.jit(
        lambda index: encoding.encode_means(model, params, jnp.asarray(x), index), compiler_options=QUICKLY
    )
    alone, among = (means_of(np.array(index)) for index in ([2], [0, 1, 2, 3, 4]))
    np.testing.assert_allclose(alone[0], among[2], rtol=1e-4, atol=1e-5)
    q, _ = outputs(model, params, np.asarray(to_unit(x)), np.zeros((5, 3), np.float32))
    np.testing.assert_allclose(among, q.mean, rtol=1e-4, atol=1e-5)
