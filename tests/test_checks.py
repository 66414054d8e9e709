"""Wrong shapes are detected: in signatures while tests run, and in results of architectures, priors and searches."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from exvae.algorithm import Batch, training_terms
from exvae.distributions import Normal
from exvae.models.terms import Observed, Terms, check, check_observed
from exvae.models.vae import VAE
from exvae.objectives import elbo_of
from exvae.priors.parzen import exemplar_log_prob
from exvae.retrieval.draw import draw_exemplars
from exvae.retrieval.slots import choose_on_host
from exvae.state import init_params

ROWS, DIM, SHAPE = 6, 4, (3, 3, 1)
Q = Normal(jnp.zeros((ROWS, DIM)), jnp.zeros((ROWS, DIM)))
TERMS = Terms(jnp.zeros((ROWS, DIM)), Q, jnp.zeros(ROWS), 0.0, jnp.zeros(ROWS))
SEEN = Observed(jnp.zeros((ROWS, *SHAPE)), Q, jnp.zeros((ROWS, 7)))


def test_signatures_are_checked_while_tests_run():
    with pytest.raises(jaxtyping.TypeCheckError, match="means"):
        exemplar_log_prob(jnp.zeros((3, 2)), jnp.zeros((5, 4)), jnp.zeros(()), count=5)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("z", jnp.zeros((ROWS, DIM + 1)), r"Terms.z of shape \(6, 5\), it must be \(6, 4\)"),
        ("log_px", jnp.zeros((ROWS, 1)), r"Terms.log_px of shape \(6, 1\), it must be \(6,\)"),
        ("log_q", jnp.zeros(ROWS - 1), r"Terms.log_q of shape \(5,\), it must be \(6,\)"),
        ("log_ratio", jnp.zeros(()), r"Terms.log_ratio of shape \(\), it must be \(6,\)"),
        ("log_px", jnp.zeros(ROWS, jnp.int32), "Terms.log_px of dtype int32, it must be a float"),
        ("q", Q._replace(log_var=jnp.zeros(DIM)), r"Terms.q.log_var of shape \(4,\), it must be \(6, 4\)"),
    ],
)
def test_wrong_terms_are_named(field, value, message):
    check(TERMS, num_rows=ROWS, latent_dim=DIM)
    with pytest.raises(AssertionError, match=message):
        check(TERMS._replace(**{field: value}), num_rows=ROWS, latent_dim=DIM)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("x", jnp.zeros((ROWS, 9)), r"Observed.x of shape \(6, 9\), it must be \(6, 3, 3, 1\)"),
        ("q", Q._replace(mean=jnp.zeros((1, DIM))), r"Observed.q.mean of shape \(1, 4\), it must be \(6, 4\)"),
        ("features", jnp.zeros((1, 7)), r"Observed.features of shape \(1, 7\), it must be \(6, 7\)"),
    ],
)
def test_wrong_observed_is_named(field, value, message):
    sizes = {"image_shape": SHAPE, "num_images": ROWS, "latent_dim": DIM}
    check_observed(SEEN, **sizes)
    check_observed(SEEN._replace(features=None), **sizes)
    with pytest.raises(AssertionError, match=message):
        check_observed(SEEN._replace(**{field: value}), **sizes)


class OneColumn(VAE):
    """An architecture whose log p(x|z) has one axis too many."""

    def draw(self, key, seen, *, stl=False, paired=False):
        terms = super().draw(key, seen, stl=stl, paired=paired)
        return terms._replace(log_px=terms.log_px[:, None])


def test_training_checks_what_an_architecture_returns(tiny_config):
    model = OneColumn(SHAPE, tiny_config.model.latent_dim, tiny_config.model.latent_dim, 5, 5, "bernoulli")
    batch = Batch(jnp.arange(2), store=jnp.zeros((10, *SHAPE), jnp.uint8))

    def terms(key):
        return training_terms(key, tiny_config, model, init_params(tiny_config, model), batch)

    message = r"the architecture gave Terms.log_px of shape \(2, 1\), it must be \(2,\)"
    with pytest.raises(AssertionError, match=message):
        jax.eval_shape(terms, jax.random.key(0))


def test_wrong_log_prob_of_a_prior_is_named():
    assert elbo_of(TERMS, jnp.ones(ROWS)).elbo.tolist() == [1.0] * ROWS
    with pytest.raises(AssertionError, match=r"the prior gave log p\(z\) of shape \(7,\)"):
        elbo_of(TERMS, jnp.zeros(ROWS + 1))


class FixedSearch:
    """A search that always returns the same candidates."""

    def __init__(self, candidates):
        self.candidates = candidates

    def search(self, index):
        return self.candidates


@pytest.mark.parametrize(
    "candidates, message",
    [
        (np.zeros((3, 5), np.int32), r"candidates of shape \(3, 5\), it must be \(2, number of candidates\)"),
        (np.zeros(2, np.int32), r"candidates of shape \(2,\)"),
        (np.zeros((2, 5), np.float32), "candidates of dtype float32, it must be an integer"),
        (np.full((2, 5), 20, np.int32), r"candidates from -1 to 20, they must lie in -1\.\.19"),
        (np.full((2, 5), -2, np.int32), r"candidates from -2 to -1, they must lie in -1\.\.19"),
    ],
)
def test_wrong_candidates_of_a_search_are_named(tiny_config, candidates, message):
    draw = draw_exemplars(np.array([0, 1], np.uint32), 0, num_train=20, num_exemplars=20)
    index = np.array([0, 1], np.int32)
    right = FixedSearch(np.array([[0, 1, 19], [-1, 3, 1]], np.int32))
    tiny_config.retrieval.num_neighbours = 2
    assert choose_on_host(tiny_config, draw, index, right).tolist() == [1, 19, 3, -1]
    with pytest.raises(AssertionError, match=f"the search gave {message}"):
        choose_on_host(tiny_config, draw, index, FixedSearch(candidates))
