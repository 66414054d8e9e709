"""The ELBO of the evaluation, compared with quadrature over a two-dimensional latent space."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from exvae import objectives
from exvae.distributions import to_unit
from exvae.priors import PRIORS, vamp
from tests.test_objectives import DIM, SHAPE, N, World

pytestmark = pytest.mark.xdist_group("objectives")  # one process compiles for all these tests


@pytest.fixture(scope="module")
def world():
    return World()


def quadrature(points, half_width):
    grid = np.linspace(-half_width, half_width, points)
    z = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
    return z, (grid[1] - grid[0]) ** 2


def log_mixture(z, mean, log_var):
    """log 1/P sum_p N(z | mean_p, diag exp(log_var_p))."""
    parts = -0.5 * (np.log(2 * np.pi) + log_var + (z[:, None] - mean) ** 2 / np.exp(log_var)).sum(-1)
    return special.logsumexp(parts, axis=1) - np.log(len(mean))


@pytest.mark.parametrize("prior", ["exemplar", "gaussian", "vamp"])
def test_elbo_is_below_the_log_likelihood(world, prior):
    samples, num_images = 4000, 4
    rng = np.random.default_rng(5)
    images = (255 * rng.integers(0, 2, (num_images, *SHAPE))).astype(np.uint8)
    grid, area = quadrature(241, 18.0)
    pseudo = np.clip(np.asarray(world.params["prior"]["pseudo_inputs"]), 0, 1)

    @jax.jit
    def outputs(z):
        q = world.apply(to_unit(images), method="encode")
        return world.apply(z, method="logits"), q, world.apply(pseudo, method="encode")

    logits, q, components = jax.tree.map(lambda a: np.asarray(a, np.float64), outputs(np.asarray(grid, np.float32)))
    logits = logits.reshape(len(grid), -1)
    if prior == "exemplar":
        log_pz = log_mixture(grid, world.means, np.full((N, DIM), np.log(world.sigma_square)))
    elif prior == "vamp":
        log_pz = log_mixture(grid, *components)
    else:
        log_pz = log_mixture(grid, np.zeros((1, DIM)), np.zeros((1, DIM)))
    assert np.exp(log_pz).sum() * area == pytest.approx(1.0, abs=1e-3)

    means = jnp.asarray(world.means, jnp.float32) if prior == "exemplar" else None
    encode = objectives.encoder(world.model, world.params)
    parts = PRIORS[prior].components(world.params["prior"], encode, means)
    elbo = functools.partial(
        objectives.evaluation_elbo,
        model=world.model,
        params=world.params,
        images=images,
        components=parts,
        prior=PRIORS[prior],
    )
    run = jax.jit(jax.vmap(lambda key: elbo(key).elbo))
    drawn = np.asarray(run(jax.random.split(jax.random.key(7), samples)), np.float64)  # (samples, images)
    for b in range(num_images):
        signs = np.where(images[b].ravel() == 255, 1.0, -1.0)
        log_joint = special.log_expit(signs * logits).sum(-1) + log_pz
        log_likelihood = special.logsumexp(log_joint) + np.log(area)
        log_q = log_mixture(grid, q.mean[b : b + 1], q.log_var[b : b + 1])
        mass = np.exp(log_q) * area
        assert mass.sum() == pytest.approx(1.0, abs=2e-2)
        mass /= mass.sum()
        exact_elbo = (mass * (log_joint - log_q)).sum()
        error = drawn[:, b].std() / np.sqrt(samples)
        assert abs(drawn[:, b].mean() - exact_elbo) < 4.5 * error + 1e-3
        # log p(x) = ELBO + KL(q || p(z|x)), and the last term is positive.
        gap = (mass * (log_q - (log_joint - log_likelihood))).sum()
        assert gap > 0.01
        assert drawn[:, b].mean() <= log_likelihood + 4.5 * error


def test_pseudo_inputs_are_encoded_as_images_in_the_unit_interval(world):
    pseudo = np.asarray(world.params["prior"]["pseudo_inputs"])
    assert pseudo.min() < 0 and pseudo.max() > 1
    encode = objectives.encoder(world.model, world.params)
    got = jax.jit(lambda params: vamp.pseudo_posteriors(params, encode))(world.params["prior"])
    want = world.encode(np.minimum(np.maximum(pseudo, 0), 1))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
