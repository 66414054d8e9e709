"""The gradient with optim.estimator=stl: unbiased, without variance at the exact posterior, otherwise complete."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from exvae import models, objectives
from exvae.algorithm import Batch, Problem, algorithm_1
from exvae.config import get_config
from exvae.distributions import Normal, binarize, log_normal, log_posterior, sample_normal
from exvae.models.hvae import HVAE
from exvae.priors.gaussian import gaussian_log_prob
from exvae.retrieval.draw import draw_exemplars
from exvae.scale import sharding
from exvae.state import TrainState, step_key

X, W, NOISE = np.array([1.5, -0.7]), np.array([0.8, 2.0]), 0.5  # p(z) = N(0, I), p(x|z) = N(W z, NOISE), per dimension
SHAPE, N, M, B = (4, 4, 1), 12, 6, 4
ENCODERS = ("encoder", "q_z", "z2_from_x", "q_z2", "z1_from_x", "z1_from_z2", "q_z1_joint", "q_z1")


def toy_gradients(q: Normal, num_samples: int, stl: bool, paired: bool = False) -> np.ndarray:
    """The ELBO's gradient in mean and log_var of q, for each sample or pair: (num_samples, 2, D)."""

    def elbo(q, key):
        rows = jax.tree.map(lambda a: jnp.stack([a] * (2 if paired else 1)), q)
        z = sample_normal(key, rows, paired=paired)
        log_px = log_normal(z * W, Normal(X, jnp.full(2, jnp.log(NOISE))))
        return jnp.mean(log_px + gaussian_log_prob(z) - log_posterior(z, rows, stl=stl))

    q = jax.tree.map(jnp.float32, q)
    keys = jax.random.split(jax.random.key(0), num_samples)
    grads = jax.jit(jax.vmap(jax.grad(elbo), (None, 0)))(q, keys)
    return np.stack(grads, axis=1).astype(np.float64)


@pytest.mark.parametrize("paired", [True, False], ids=["pairs", "single"])
@pytest.mark.parametrize("stl", [True, False], ids=["stl", "plain"])
def test_toy_gradient_is_unbiased(stl, paired):
    """It is W (X - W mean) / NOISE - mean for mean, and 1/2 - exp(log_var) (W^2 / NOISE + 1) / 2 for log_var."""
    q = Normal(np.array([0.3, -1.0]), np.array([-0.5, 0.4]))
    want = W * (X - W * q.mean) / NOISE - q.mean, 0.5 - 0.5 * np.exp(q.log_var) * (W**2 / NOISE + 1)
    grads = toy_gradients(q, 200_000, stl, paired)
    error = grads.std(axis=0) / np.sqrt(len(grads)) + 1e-6
    assert np.all(error < 0.03)
    assert np.all(np.abs(grads.mean(axis=0) - want) < 5 * error)


def test_opposite_pairs_remove_the_noise_from_the_gradient_of_the_mean():
    """This is true for quadratic log densities. In the gradient of log_var, the terms linear in eps cancel."""
    q = Normal(np.array([0.3, -1.0]), np.array([-0.5, 0.4]))
    single, pairs = (toy_gradients(q, 10_000, True, paired) for paired in (False, True))
    assert np.all(pairs[:, 0].std(axis=0) < 1e-5 * single[:, 0].std(axis=0))
    assert np.all(pairs[:, 1].var(axis=0) < 0.9 * single[:, 1].var(axis=0))


def test_toy_gradient_at_the_exact_posterior_vanishes_in_every_sample():
    """The plain gradient is the score there, with variance 1 / var(z) for mean and 1/2 for log_var."""
    variance = 1 / (1 + W**2 / NOISE)
    q = Normal(variance * W * X / NOISE, np.log(variance))
    stl, plain = (toy_gradients(q, 200_000, stl) for stl in (True, False))
    assert np.abs(stl).max() < 1e-5 * np.abs(plain).max()
    np.testing.assert_allclose(plain.var(axis=0), [1 / variance, [0.5, 0.5]], rtol=0.02)


def test_two_latents_at_the_exact_posterior_have_no_gradient_in_any_sample():
    """The density of x is replaced so that p(z1, z2 | x) = q(z1, z2 | x), with the parameters of q held fixed."""
    model, params, images = small_model("hvae")
    fixed, x = params["model"], binarize(jax.random.key(1), images[:B])

    class ExactPosterior(HVAE):
        def log_px(self, x, z2, z1):
            seen = model.apply({"params": fixed}, x, method="observe")
            q_z1, p_z1 = (
                model.apply({"params": fixed}, seen.features, z2, method="posterior_z1"),
                model.apply({"params": fixed}, z2, method="prior_z1"),
            )
            return log_normal(z2, seen.q) + log_normal(z1, q_z1) - log_normal(z1, p_z1) - gaussian_log_prob(z2)

    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(HVAE)}
    exact_model = ExactPosterior(**(fields | {"parent": None}))

    def elbo(network, key, stl):
        terms, _ = models.training_terms(key, key, exact_model, {"model": network}, x, stl=stl)
        return jnp.sum(objectives.elbo_of(terms, gaussian_log_prob(terms.z)).elbo)

    def run(key):
        return elbo(fixed, key, True), *(jax.grad(elbo)(fixed, key, stl) for stl in (True, False))

    keys = jax.random.split(jax.random.key(2), 10)
    values, stl, plain = jax.device_get(jax.jit(jax.vmap(run))(keys))
    np.testing.assert_allclose(values, 0, atol=1e-4)
    stl, plain = by_layer({"model": stl}), by_layer({"model": plain})
    for name in ENCODERS[2:]:
        assert np.abs(stl[name]).max() < 1e-4 * np.abs(plain[name]).max(), name


def make_config(architecture: str, estimator: str = "plain"):
    config = get_config()
    config.model.architecture, config.optim.estimator = architecture, estimator
    config.model.latent_dim, config.model.lower_latent_dim, config.model.hidden_dim = 2, 3, 8
    config.prior.num_exemplars, config.optim.kl_warmup_epochs = M, 0
    return config


@functools.cache
def small_model(architecture: str):
    """A model, random parameters and training images."""
    rng = np.random.default_rng(0)
    model = models.build(make_config(architecture).model, SHAPE)
    shapes = jax.eval_shape(lambda: models.init(jax.random.key(0), model)[0])
    network = jax.tree.map(lambda s: rng.normal(scale=s.shape[0] ** -0.5, size=s.shape), shapes)
    params = jax.tree.map(jnp.float32, {"model": network, "prior": {"log_var": np.float64(-0.5)}})
    return model, params, jnp.asarray(rng.integers(0, 256, (N, *SHAPE), dtype=np.uint8))


def by_layer(tree: dict) -> dict[str, np.ndarray]:
    """{layer: all its values in one array, flat after the first axis}."""
    layers = tree["model"]
    return {
        name: np.concatenate([np.asarray(a, np.float64).reshape(len(a), -1) for a in jax.tree.leaves(layer)], axis=1)
        for name, layer in layers.items()
    }


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_model_gradient_has_the_same_mean_and_the_elbo_the_same_value(architecture):
    model, params, images = small_model(architecture)
    x = binarize(jax.random.key(1), images[:B])

    def elbo(params, key, stl):
        terms, _ = models.training_terms(key, key, model, params, x, stl=stl)
        return objectives.elbo_of(terms, gaussian_log_prob(terms.z)).elbo

    def run(params, key):
        grads = [jax.grad(lambda params: jnp.sum(elbo(params, key, stl)))(params) for stl in (True, False)]  # noqa: B023
        return grads, [elbo(params, key, stl) for stl in (True, False)]

    keys = jax.random.split(jax.random.key(2), 4000)
    (stl, plain), values = jax.device_get(jax.jit(jax.vmap(run, (None, 0)))(params, keys))
    np.testing.assert_array_equal(*values)
    stl, plain = by_layer(stl), by_layer(plain)
    assert len([name for name in stl if name in ENCODERS]) == (2 if architecture == "vae" else 6)
    for name in stl:
        difference = stl[name] - plain[name]
        error = difference.std(axis=0) / np.sqrt(len(keys))
        assert np.all(np.abs(difference.mean(axis=0)) <= 5 * error + 1e-5), name
        if name in ENCODERS:
            assert difference.std() > 0.02 * plain[name].std(), name
        else:
            np.testing.assert_allclose(difference, 0, atol=1e-4 * np.abs(plain[name]).max(), err_msg=name)


def left_out(params, model, key, images):
    """Minus log q of all latents, with the samples held fixed. Its gradient is the term that stl leaves out."""
    key_x, key_z, _ = jax.random.split(key, 3)
    apply = functools.partial(model.apply, {"params": params["model"]})
    seen = apply(binarize(key_x, images), method="observe")
    key_z2, key_z1 = (key_z, None) if seen.features is None else jax.random.split(key_z)
    z2 = sample_normal(key_z2, seen.q)
    total = -log_normal(jax.lax.stop_gradient(z2), seen.q)
    if seen.features is not None:
        q_z1 = apply(seen.features, jax.lax.stop_gradient(z2), method="posterior_z1")
        total -= log_normal(jax.lax.stop_gradient(sample_normal(key_z1, q_z1)), q_z1)
    return jnp.sum(total)


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_gradients_differ_by_the_score_alone_with_the_exemplar_prior(architecture):
    """So the means of the exemplars, which come from the same encoder, keep their whole gradient."""
    model, params, images = small_model(architecture)
    key, index = jax.random.key(3), np.array([0, 3, 7, 11])
    draw = draw_exemplars(np.asarray(jax.random.key_data(key)), 0, N, M)
    batch = Batch(jnp.asarray(index), draw.members(), store=images)
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        average=None,
        opt_state=optax.EmptyState(),
        key=jax.random.key_data(key),
        table=None,
        indexed=None,
        sums={},
        stopping=None,
    )

    def grads(params, estimator):
        """The gradient of the sum of the ELBOs. The loss is minus their mean."""
        problem = Problem(make_config(architecture, estimator), model, sharding.make_mesh(), optax.identity(), N, 1)
        _, info = algorithm_1(problem, state.replace(params=params), batch)
        return jax.tree.map(lambda g: -len(index) * g, info.grads)

    def run(params):
        both = [grads(params, estimator) for estimator in ("plain", "stl")]
        return *both, jax.grad(left_out)(params, model, step_key(state), images[index])

    plain, stl, want = jax.device_get(jax.jit(run)(params))
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain))
    for (path, a), b, score in zip(
        jax.tree.leaves_with_path(plain), jax.tree.leaves(stl), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a - b, score, rtol=1e-3, atol=1e-5 * scale, err_msg=name)
        assert (np.abs(score).max() > 1e-3 * scale) == any(f"'{layer}'" in name for layer in ENCODERS), name


class Noise(HVAE):
    """Returns the noise of z1, summed over its dimensions, as log p(x|z)."""

    def log_px(self, x, z2, z1):
        q_z1 = self.posterior_z1(self.observe(x).features, z2)
        return jnp.sum((z1 - q_z1.mean) * jnp.exp(-0.5 * q_z1.log_var), axis=-1)


def test_both_latents_of_a_pair_have_opposite_noise():
    model, params, images = small_model("hvae")
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(HVAE)}
    noise = Noise(**(fields | {"parent": None}))
    x, key = binarize(jax.random.key(1), images[:B]), jax.random.key(2)
    for samples, is_paired in ((4, True), (3, False)):
        terms, _ = models.training_terms(key, key, noise, params, x, samples=samples)
        for drawn in ((terms.z - terms.q.mean).sum(-1), terms.log_px):  # noise of z2, noise of z1
            first, second = np.asarray(drawn[: 2 * B]).reshape(-1, 2).T
            assert np.abs(first).min() > 1e-3
            assert np.allclose(first, -second, atol=1e-4) == is_paired
