"""What an architecture says about a batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from exvae.distributions import Normal


class Terms(NamedTuple):
    """The parts of the ELBO that do not involve the prior of the top latent, a row for each sample of z.

    elbo = log_px + log_ratio - log_q + log p(z), the last from `exvae.priors`.
    """

    z: Float[Array, "B D"]  # sample of the top latent
    q: Normal  # q(z|x), the top latent's posterior
    log_px: Float[Array, " B"]  # log p(x | all latents)
    log_ratio: Float[Array, " B"] | float  # log p(z1|z) - log q(z1|x,z) of the lower latent; 0 without one
    log_q: Float[Array, " B"]  # log q(z|x)


class Observed(NamedTuple):
    """A batch as the encoder has read it, once: latents can be drawn for it any number of times."""

    x: Float[Array, "B H W C"]
    q: Normal  # q(z|x), the top latent's posterior
    features: Float[Array, "I F"] | None  # of x for the lower latent's posterior, once an image; None without one

    def repeat(self, times: int) -> Observed:
        """A row for each of `times` codes an image, those of an image one after another."""
        if times == 1:
            return self
        x, q = jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), (self.x, self.q))
        return Observed(x, q, self.features)
