"""The ELBO of a batch under each prior.

Training (O1, O2, O3 of the paper) and evaluation differ only in which exemplars a code may see and what their number
is: `priors.exemplar_log_prob` takes both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, UInt8

from exvae import priors
from exvae.distributions import Normal, binarize, to_unit
from exvae.models import Terms
from exvae.models.encoding import encode_means
from exvae.retrieval import exact, select
from exvae.retrieval.draw import draw_exemplars


class Elbo(NamedTuple):
    """elbo = reconstruction - kl, per image, in nats."""

    elbo: Float[Array, " B"]
    reconstruction: Float[Array, " B"]
    kl: Float[Array, " B"]


class Batch(NamedTuple):
    """What one training step is given."""

    images: UInt8[Array, "N H W C"]  # the whole training set: every image is an exemplar
    index: Int[Array, " B"]  # the batch
    candidates: Int[Array, "B C"] | None  # neighbours found on the host, nearest first (search = scann)


class Means(NamedTuple):
    """Latent means that a step computed, to be written into the table."""

    index: Int[Array, " U"]
    means: Float[Array, "U D"]


def elbo_of(terms: Terms, log_pz: Float[Array, " B"]) -> Elbo:
    """log p(x|z) - [log q - log p] with one sample of every latent, Eq. (5)."""
    kl = terms.log_q - terms.log_ratio - log_pz
    return Elbo(terms.log_px - kl, terms.log_px, kl)


def init_prior(key: Array, config: Any, image_shape: tuple[int, int, int]) -> dict:
    """Learned parameters of the prior `config.prior.name`."""
    if config.name == "exemplar":
        return {"log_var": jax.random.normal(key, ())}  # log sigma^2 ~ N(0, 1)
    if config.name == "vamp":
        shape = (config.num_pseudo_inputs, *image_shape)
        return {"pseudo_inputs": 0.05 + 0.01 * jax.random.normal(key, shape)}
    return {}


def pseudo_posteriors(model: nn.Module, params: dict) -> Normal:
    """q(z|u_p) of the VampPrior's pseudo-inputs, which stay in [0, 1] as images do."""
    inputs = jnp.clip(params["prior"]["pseudo_inputs"], 0.0, 1.0)
    return model.apply({"params": params["model"]}, inputs, method="encode")


def training_elbo(
    config: Any, model: nn.Module, params: dict, key: Array, batch: Batch, table: Float[Array, "N D"]
) -> tuple[Elbo, list[Means]]:
    """ELBO of a freshly binarized batch under the training prior, and the means for the table."""
    key_x, key_z, key_draw = jax.random.split(key, 3)
    x = binarize(key_x, batch.images[batch.index])
    terms = model.apply({"params": params["model"]}, key_z, x, method="terms")
    if config.prior.name == "exemplar":
        log_pz, exemplars = _exemplar_training_prior(config, model, params, key_draw, batch, terms, table)
        # Algorithm 1: the batch's own means (of the binarized images, as they come), then the neighbours' (of grey
        # ones), which may name the same rows. The table only serves the search.
        return elbo_of(terms, log_pz), [Means(batch.index, terms.q.mean), exemplars]
    return elbo_of(terms, log_prior(config, model, params, terms.z, None)), []


def _exemplar_training_prior(config, model, params, key, batch: Batch, terms: Terms, table) -> tuple[Array, Means]:
    """Eq. (10), (11) or (12): all drawn exemplars, or the union of the batch's K nearest among them.

    Differs from the paper: with retrieval.scored = union (the default) a code sees all neighbours of the batch, as in
    the authors' code, and not only its own K: a tighter bound for the same work.
    Differs from the paper: one draw of M serves the whole batch (as in the authors' code), instead of a draw from the
    other N - 1 for each image; an image that is in the draw itself sees, and divides by, the M - 1 others.
    """
    num_train, num_exemplars = len(batch.images), config.prior.num_exemplars
    leave_out = batch.index if config.prior.leave_one_out else None
    drawn = draw_exemplars(key, num_train, num_exemplars)
    neighbours = None
    if config.retrieval.search == "none":
        index = jnp.nonzero(drawn, size=num_exemplars)[0]
    else:
        k = config.retrieval.num_neighbours
        if config.retrieval.search == "exact":
            queries = jax.lax.stop_gradient(terms.q.mean)
            nearest = exact.nearest(queries, table, k, allowed=drawn, leave_out=leave_out, num_allowed=num_exemplars)
        else:
            nearest = select.cut(batch.candidates, k, allowed=drawn, leave_out=leave_out)
        index = select.union(nearest)
        neighbours = nearest if config.retrieval.scored == "own" else None
    means = encode_means(
        model, params["model"], batch.images, index, activation_bytes=config.prior.activation_mib * 2**20
    )
    log_pz = priors.exemplar_log_prob(
        terms.z,
        means,
        params["prior"]["log_var"],
        count=num_exemplars - (drawn[batch.index] if config.prior.leave_one_out else 0.0),
        exemplar_index=index,
        leave_out=leave_out,
        neighbours=neighbours,
    )
    return log_pz, Means(index, means)


def log_prior(
    config: Any, model: nn.Module, params: dict, z: Float[Array, "B D"], means: Float[Array, "N D"] | None
) -> Float[Array, " B"]:
    """log p(z) as used after training: the exemplar prior sees all of `means`, with no regularizer."""
    if config.prior.name == "exemplar":
        return priors.exemplar_log_prob(z, means, params["prior"]["log_var"], count=float(len(means)))
    if config.prior.name == "vamp":
        return priors.vamp_log_prob(z, pseudo_posteriors(model, params))
    return priors.gaussian_log_prob(z)


def evaluation_elbo(
    config: Any, model: nn.Module, params: dict, key: Array, images: UInt8[Array, "B H W C"], means: Array | None
) -> Elbo:
    """ELBO of images that are binary already, one sample each."""
    terms = model.apply({"params": params["model"]}, key, to_unit(images), method="terms")
    return elbo_of(terms, log_prior(config, model, params, terms.z, means))
