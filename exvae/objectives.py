"""The objective: the ELBO of the paper, Eq. (5), the weight of its KL during warm-up, and the ELBO in evaluation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8

from exvae import models
from exvae.arrays import Array
from exvae.distributions import to_unit
from exvae.models import Terms
from exvae.priors import Encoder, Prior


class Elbo(NamedTuple):
    """elbo = reconstruction - kl for each code, in nats."""

    elbo: Float[Array, " S"]
    reconstruction: Float[Array, " S"]
    kl: Float[Array, " S"]


def elbo_of(terms: Terms, log_pz: Float[Array, " S"]) -> Elbo:
    """Compute the ELBO log p(x|z) - [log q - log p] at the samples of the latents, Eq. (5)."""
    message = f"the prior gave log p(z) of shape {log_pz.shape}, it must be {terms.log_px.shape}"
    chex.assert_shape(log_pz, terms.log_px.shape, custom_message=message)
    kl = terms.log_q - terms.log_ratio - log_pz
    return Elbo(terms.log_px - kl, terms.log_px, kl)


def kl_weight(step: Int[Array, ""], steps_per_epoch: int, warmup_epochs: int) -> Float[Array, ""]:
    """beta = min(1, epoch / warmup_epochs), the weight of the KL. The first epoch is 1."""
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
    """Compute the ELBO of images under the whole prior, with one sample of z for each image.

    Args:
      images: binarized if the model is Bernoulli.
      components: result of `Prior.components`.
    """
    terms = models.apply(model, params, key, to_unit(images), method="terms")
    return elbo_of(terms, prior.log_prob(components, terms.z, mesh))


def encoder(model: nn.Module, params: dict) -> Encoder:
    """Return the function x -> q(z|x), for priors that encode inputs of their own."""
    return functools.partial(models.apply, model, params, method="encode")
