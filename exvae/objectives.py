"""The ELBO of a batch, in training (O1, O2, O3 of the paper: the prior's choice) and in evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt8

from exvae import models
from exvae.distributions import binarize, to_unit
from exvae.models import Terms
from exvae.priors import PRIORS
from exvae.priors.types import Batch, Means


class Elbo(NamedTuple):
    """elbo = reconstruction - kl, for each code, in nats."""

    elbo: Float[Array, " B"]
    reconstruction: Float[Array, " B"]
    kl: Float[Array, " B"]


def elbo_of(terms: Terms, log_pz: Float[Array, " B"]) -> Elbo:
    """log p(x|z) - [log q - log p] at the samples of the latents, Eq. (5)."""
    kl = terms.log_q - terms.log_ratio - log_pz
    return Elbo(terms.log_px - kl, terms.log_px, kl)  # Eq. (5)


def training_terms(key: Array, config: Any, model: nn.Module, params: dict, batch: Batch) -> tuple[Terms, dict]:
    """What the networks say of a batch, its pixels drawn anew, and the new running statistics.

    `objective.samples` codes are drawn for each image, those of an image one after another.
    """
    key_x, key_z, key_dropout = jax.random.split(key, 3)
    images = batch.own_images()
    x = binarize(key_x, images) if config.model.likelihood == "bernoulli" else to_unit(images)
    options = {"stl": config.optim.estimator == "stl", "samples": config.objective.samples}
    return models.training_terms(key_z, key_dropout, model, params, x, **options)


def training_elbo(
    key: Array, config: Any, model: nn.Module, mesh: Mesh, params: dict, batch: Batch, table: Float[Array, "R D"] | None
) -> tuple[Elbo, list[Means], dict]:
    """ELBO of a batch under the training prior, the means for the table, and the new running statistics."""
    terms, statistics = training_terms(key, config, model, params, batch)
    prior = PRIORS[config.prior.name]
    log_pz, means = prior.training_log_prob(config, model, mesh, params, batch, terms, table)
    return elbo_of(terms, log_pz), means, statistics


def evaluation_elbo(
    key: Array,
    config: Any,
    model: nn.Module,
    mesh: Mesh,
    params: dict,
    images: UInt8[Array, "B H W C"],
    components: Any,
) -> Elbo:
    """ELBO of images (binary ones for a Bernoulli model), one sample each, under the whole prior.

    Args:
      components: those of the prior (`priors`).
    """
    terms = models.apply(model, params, key, to_unit(images), method="terms")
    return elbo_of(terms, PRIORS[config.prior.name].log_prob(components, terms.z, mesh))
