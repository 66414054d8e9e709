"""Algorithm 1 of the paper's supplement: one training step. Start reading here.

Sizes: B images in a batch, S codes (one or more for each image), N exemplars, M drawn exemplars, K neighbours of an
image, U exemplar slots in a step, D latent dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8
from ml_collections import ConfigDict

from exvae import models
from exvae.arrays import Array, Record
from exvae.distributions import binarize, to_unit
from exvae.encoding import encode_split
from exvae.models import Terms
from exvae.models.terms import check
from exvae.objectives import Elbo, elbo_of, encoder, kl_weight
from exvae.priors import PRIORS, Exemplars
from exvae.retrieval.draw import draw_exemplars
from exvae.retrieval.slots import choose
from exvae.retrieval.table import update as update_table
from exvae.state import TrainState, learned, step_key


class Problem(NamedTuple):
    """The settings and objects that all steps of a run share."""

    config: ConfigDict
    model: nn.Module
    mesh: Mesh
    optimizer: optax.GradientTransformation
    num_train: int  # N
    steps_per_epoch: int


class Batch(Record):
    """The input of one step. Everything but `store` is split over the devices.

    If the training images fit on the devices, `store` holds them. Otherwise `images` and `chosen_images` hold the
    images of this step.
    """

    index: Int[Array, " B"]  # indices of the batch's images in the training set
    chosen: Int[Array, " U"] | None = None  # indices of exemplars that the host chose (`choose_on_host`)
    store: UInt8[Array, "N H W C"] | None = None  # all training images
    images: UInt8[Array, "B H W C"] | None = None  # the images of the batch
    chosen_images: UInt8[Array, "U H W C"] | None = None  # the images of the chosen exemplars

    def own_images(self) -> UInt8[Array, "B H W C"]:
        """Return the images of the batch."""
        if self.store is not None:
            return self.store[self.index]
        assert self.images is not None, "a batch without a store needs its images"
        return self.images

    def exemplars(self, slots: Int[Array, " U"]) -> tuple[UInt8[Array, "_ H W C"], Int[Array, " U"] | None]:
        """Return images, and for each slot the row of its image. None means that slot u has row u."""
        if self.store is not None:
            return self.store, slots
        assert self.chosen_images is not None, "a batch without a store needs the images of its exemplars"
        return self.chosen_images, None


class Info(NamedTuple):
    """The results of a step besides the new state."""

    elbo: Elbo
    loss: Float[Array, ""]
    grads: dict
    exemplars: Exemplars | None


def algorithm_1(problem: Problem, state: TrainState, batch: Batch) -> tuple[TrainState, Info]:
    """Take one training step: the loop body of Algorithm 1, line by line, for a batch of images.

    With retrieval.search = none, all M drawn exemplars replace the neighbours, and there is no table for line 9. A
    prior without exemplars skips lines 1, 4, 5 and 9.
    """
    config, model, mesh = problem.config, problem.model, problem.mesh
    prior, samples, draw = PRIORS[config.prior.name], config.objective.samples, None

    # 1. Draw M of the N exemplars (O2, Eq. (11)).
    if prior.USES_EXEMPLARS:
        draw = draw_exemplars(state.key, state.step, problem.num_train, config.prior.num_exemplars)

    def loss_fn(params: dict) -> tuple[Float[Array, ""], tuple[Terms, Elbo, Exemplars | None, dict]]:
        params = {**state.params, **params}
        # 2. Encode the images, mu(x) and Lambda(x).  3. Draw z = mu(x) + Lambda(x)^(1/2) eps.
        terms, statistics = training_terms(step_key(state), config, model, params, batch)
        exemplars = None
        if draw is not None:
            # 4. Find the neighbours of mu(x) in the table: the K nearest drawn exemplars, without x itself (O1, O3).
            # Differs from the paper: Eq. (12) asks for the neighbours of z, Algorithm 1 for those of mu(x), as here.
            queries = terms.q.mean[::samples]
            slots = choose(config, mesh, draw, batch.index, chosen=batch.chosen, queries=queries, table=state.table)
            # 5. Encode them to mu(x_j), with gradients: the prior shares the encoder, Eq. (7).
            kept = config.prior.activation_mib * 2**20
            means = encode_split(mesh, model, params, *batch.exemplars(slots.index), activation_bytes=kept)
            rows = slots.repeat(samples)
            exemplars = Exemplars(means, rows.index, rows.count, rows.leave_out, rows.neighbours)
        # 6. Compute log p(z) with these exemplars, Eq. (10), (11) and (12), or under another prior.
        log_pz = prior.training_log_prob(params["prior"], encoder(model, params), terms.z, exemplars, mesh)
        # 7. Compute the ELBO, Eq. (5). During the warm-up the objective weights the KL by beta < 1.
        elbo = elbo_of(terms, log_pz)
        beta = kl_weight(state.step, problem.steps_per_epoch, config.optim.kl_warmup_epochs)
        return -jnp.mean(elbo.reconstruction - beta * elbo.kl), (terms, elbo, exemplars, statistics)

    # 8. Update phi, theta and sigma^2 with the gradient.
    old = learned(state.params)
    (loss, (terms, elbo, exemplars, statistics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(old)
    updates, opt_state = problem.optimizer.update(grads, state.opt_state, old)
    params = {**optax.apply_updates(old, updates), **statistics}

    # 9. Write mu(x) to the table, then mu(x_j). If an image is in both, mu(x_j) stays.
    # Differs from the paper: mu(x) is that of line 2, from binarized pixels and with the batch's own statistics. It
    # costs nothing, and the table only serves the search.
    # Differs from the authors' code: the batch's means are written after the search. The code writes them before it.
    table = state.table
    if table is not None and exemplars is not None:
        table = update_table(mesh, table, batch.index, terms.q.mean[::samples])
        table = update_table(mesh, table, exemplars.index, exemplars.means)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, table=table)
    return state, Info(elbo, loss, grads, exemplars)


def training_terms(key: Array, config: ConfigDict, model: nn.Module, params: dict, batch: Batch) -> tuple[Terms, dict]:
    """Compute the networks' terms of the ELBO, and the new running statistics.

    For a Bernoulli model, each step binarizes the pixels anew. Image i has the rows i * samples to
    (i + 1) * samples - 1, where `samples` is objective.samples.
    """
    key_x, key_z, key_dropout = jax.random.split(key, 3)
    images = batch.own_images()
    x = binarize(key_x, images) if config.model.likelihood == "bernoulli" else to_unit(images)
    samples, stl = config.objective.samples, config.optim.estimator == "stl"
    terms, statistics = models.training_terms(key_z, key_dropout, model, params, x, stl=stl, samples=samples)
    check(terms, num_rows=len(x) * samples, latent_dim=config.model.latent_dim)
    return terms, statistics
