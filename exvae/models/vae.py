"""VAE: one latent layer; encoder and decoder have two gated dense layers each (supplement, architecture a)."""

from __future__ import annotations

import math

from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.distributions import Normal, log_posterior, sample_normal
from exvae.models.architecture import BaseArchitecture
from exvae.models.layers import Dense, GatedDense, NormalHead
from exvae.models.terms import Observed, Terms


class VAE(BaseArchitecture):
    """q(z|x) = N(mu(x), Lambda(x)), and p(x|z) with mean mu_x(z). Subclasses change the networks."""

    def setup_networks(self) -> None:
        """Create the encoder and the decoder."""
        self.encoder = nn.Sequential([GatedDense(self.hidden_dim), GatedDense(self.hidden_dim)])
        self.q_z = NormalHead(self.latent_dim)
        self.decoder = nn.Sequential(
            [GatedDense(self.hidden_dim), GatedDense(self.hidden_dim), Dense(math.prod(self.image_shape))]
        )

    def read(self, x: Float[Array, "B H W C"]) -> Float[Array, "B ..."]:
        """Return the images in the shape that the encoder expects."""
        return x.reshape(x.shape[0], -1)

    def encode(self, x: Float[Array, "B H W C"]) -> Normal:
        """Return q(z|x)."""
        return Normal(*self.q_z(self.encoder(self.read(x))))

    def logits(self, z: Float[Array, "B D"]) -> Float[Array, "B H W C"]:
        """Return the logits of p(x|z)."""
        return self.decoder(z).reshape(-1, *self.image_shape)

    def observe(self, x: Float[Array, "B H W C"]) -> Observed:
        """Run the encoder."""
        return Observed(x, self.encode(x), features=None)

    def draw(self, key: Array, seen: Observed, *, stl: bool = False, paired: bool = False) -> Terms:
        """Draw z for each row, and compute the terms of the ELBO."""
        z = sample_normal(key, seen.q, paired=paired)
        return Terms(z, seen.q, self.log_px(seen.x, z), 0.0, log_posterior(z, seen.q, stl=stl))

    def complete(self, key: Array, z: Float[Array, "B D"]) -> tuple[Float[Array, "B D"]]:
        """Return z: there is no other latent."""
        del key
        return (z,)

    def latents(self, x: Float[Array, "B H W C"]) -> tuple[Float[Array, "B D"]]:
        """Return the mean of q(z|x)."""
        return (self.encode(x).mean,)
