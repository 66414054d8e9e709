"""The ELBO of the paper, and Algorithm 1 of its supplement: one step of training. Start reading here.

Sizes: B images in a batch, S codes (one or several of each image), N exemplars, M of them drawn, K neighbours of an
image, U exemplar slots in a step, D latent dimensions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt8
from ml_collections import ConfigDict

from exvae import models
from exvae.distributions import binarize, to_unit
from exvae.encoding import encode_split
from exvae.models import Terms
from exvae.priors import PRIORS, Encoder, Exemplars, Prior
from exvae.retrieval.draw import draw_exemplars
from exvae.retrieval.slots import choose
from exvae.retrieval.table import update as update_table
from exvae.state import TrainState, learned, step_key


class Problem(NamedTuple):
    """What stays the same in all steps of a run."""

    config: ConfigDict
    model: nn.Module
    mesh: Mesh
    optimizer: optax.GradientTransformation
    num_train: int  # N
    steps_per_epoch: int


class Batch(NamedTuple):
    """What one step is given. All but `store` is split over the devices."""

    index: Int[Array, " B"]  # numbers of the batch's images
    chosen: Int[Array, " U"] | None = None  # exemplars, as far as the host has chosen them (`choose_on_host`)
    store: UInt8[Array, "N H W C"] | None = None  # all training images, if they fit the devices,
    images: UInt8[Array, "B H W C"] | None = None  # else those of the batch
    chosen_images: UInt8[Array, "U H W C"] | None = None  # and those of the exemplars

    def own_images(self) -> UInt8[Array, "B H W C"]:
        return self.images if self.store is None else self.store[self.index]

    def exemplars(self, slots: Int[Array, " U"]) -> tuple[UInt8[Array, "_ H W C"], Int[Array, " U"] | None]:
        """Images, and which of them the slots hold; None: one after the other."""
        return (self.chosen_images, None) if self.store is None else (self.store, slots)


class Elbo(NamedTuple):
    """elbo = reconstruction - kl, for each code, in nats."""

    elbo: Float[Array, " S"]
    reconstruction: Float[Array, " S"]
    kl: Float[Array, " S"]


class Info(NamedTuple):
    """What a step computed besides the new state."""

    elbo: Elbo
    loss: Float[Array, ""]
    grads: dict
    exemplars: Exemplars | None


def algorithm_1(problem: Problem, state: TrainState, batch: Batch) -> tuple[TrainState, Info]:
    """One step of training: the body of the loop of Algorithm 1, line by line, for a batch of images.

    With retrieval.search = none all M drawn exemplars count instead of the neighbours, and there is no table. A prior
    without exemplars skips lines 1, 4, 5 and 9.
    """
    config, model, mesh = problem.config, problem.model, problem.mesh
    prior, samples, draw = PRIORS[config.prior.name], config.objective.samples, None

    # 1. Draw M of the N exemplars (O2, Eq. 11).
    if prior.USES_EXEMPLARS:
        draw = draw_exemplars(state.key, state.step, problem.num_train, config.prior.num_exemplars)

    def loss_fn(params: dict) -> tuple[Float[Array, ""], tuple[Terms, Elbo, Exemplars | None, dict]]:
        params = {**state.params, **params}
        # 2. Encode the images, mu(x) and Lambda(x).  3. Draw z = mu(x) + Lambda(x)^(1/2) eps.
        terms, statistics = training_terms(step_key(state), config, model, params, batch)
        exemplars = None
        if draw is not None:
            # 4. Find the neighbours of mu(x) in the table: the K nearest that are drawn, without x itself (O1, O3).
            queries = terms.q.mean[::samples]
            slots = choose(config, mesh, draw, batch.index, chosen=batch.chosen, queries=queries, table=state.table)
            # 5. Encode them, mu(x_j), with gradient: the prior shares the encoder (Eq. 7).
            kept = config.prior.activation_mib * 2**20
            means = encode_split(mesh, model, params, *batch.exemplars(slots.index), activation_bytes=kept)
            exemplars = Exemplars(means, *slots.repeat(samples))
        # 6. Score z against them: log m(z) of Eq. 10, 11 and 12, or the log p(z) of another prior.
        log_pz = prior.training_log_prob(params["prior"], encoder(model, params), terms.z, exemplars, mesh)
        # 7. The ELBO (Eq. 5). While the KL is warmed up, beta < 1 is its weight in what is optimized.
        elbo = elbo_of(terms, log_pz)
        beta = kl_weight(state.step, problem.steps_per_epoch, config.optim.kl_warmup_epochs)
        return -jnp.mean(elbo.reconstruction - beta * elbo.kl), (terms, elbo, exemplars, statistics)

    # 8. Update phi, theta and sigma^2 along the gradient.
    old = learned(state.params)
    (loss, (terms, elbo, exemplars, statistics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(old)
    updates, opt_state = problem.optimizer.update(grads, state.opt_state, old)
    params = {**optax.apply_updates(old, updates), **statistics}

    # 9. Write mu(x) back into the table, then mu(x_j), which may be of the same images and then is what stays.
    table = state.table
    if table is not None and exemplars is not None:
        table = update_table(mesh, table, batch.index, terms.q.mean[::samples])
        table = update_table(mesh, table, exemplars.index, exemplars.means)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, table=table)
    return state, Info(elbo, loss, grads, exemplars)


def training_terms(key: Array, config: ConfigDict, model: nn.Module, params: dict, batch: Batch) -> tuple[Terms, dict]:
    """What the networks say of a batch, and the new running statistics. Binary pixels are drawn anew in every step.

    `objective.samples` codes are drawn for each image, one after another.
    """
    key_x, key_z, key_dropout = jax.random.split(key, 3)
    images = batch.own_images()
    x = binarize(key_x, images) if config.model.likelihood == "bernoulli" else to_unit(images)
    options = {"stl": config.optim.estimator == "stl", "samples": config.objective.samples}
    return models.training_terms(key_z, key_dropout, model, params, x, **options)


def elbo_of(terms: Terms, log_pz: Float[Array, " S"]) -> Elbo:
    """log p(x|z) - [log q - log p] at the samples of the latents, Eq. (5)."""
    chex.assert_equal_shape([log_pz, terms.log_px])  # what a prior hands over
    kl = terms.log_q - terms.log_ratio - log_pz
    return Elbo(terms.log_px - kl, terms.log_px, kl)


def kl_weight(step: Int[Array, ""], steps_per_epoch: int, warmup_epochs: int) -> Float[Array, ""]:
    """beta = min(1, epoch / warm-up epochs). The first epoch is number 1."""
    epoch = step // steps_per_epoch + 1
    return jnp.minimum(1.0, epoch / max(warmup_epochs, 1))


def evaluation_elbo(
    key: Array,
    model: nn.Module,
    params: dict,
    images: UInt8[Array, "B H W C"],
    components: Any,
    *,
    prior: Prior,
    mesh: Mesh | None = None,
) -> Elbo:
    """ELBO of images (binary ones for a Bernoulli model), one sample each, under the whole prior.

    Args:
      components: what the prior is made of (`Prior.components`).
    """
    terms = models.apply(model, params, key, to_unit(images), method="terms")
    return elbo_of(terms, prior.log_prob(components, terms.z, mesh))


def encoder(model: nn.Module, params: dict) -> Encoder:
    """The function x -> q(z|x), for a prior that encodes inputs of its own."""
    return functools.partial(models.apply, model, params, method="encode")
