"""VAE: one latent layer, two gated dense layers each way (supplement, architecture a)."""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from exvae.distributions import Normal, log_bernoulli, log_normal, sample_normal
from exvae.models.layers import Dense, GatedDense, NormalHead
from exvae.models.terms import Observed, Terms


class VAE(nn.Module):
    """q(z|x) = N(mu(x), Lambda(x)), p(x|z) = Bernoulli(mu_x(z))."""

    block_rows = 500  # codes that evaluation scores at a time: their activations stay in a CPU core's cache

    image_shape: tuple[int, int, int]
    latent_dim: int
    lower_latent_dim: int  # one latent layer: not used, every architecture is built with the same fields
    hidden_dim: int

    def setup(self):
        self.encoder = nn.Sequential([GatedDense(self.hidden_dim), GatedDense(self.hidden_dim)])
        self.q_z = NormalHead(self.latent_dim)
        self.decoder = nn.Sequential(
            [GatedDense(self.hidden_dim), GatedDense(self.hidden_dim), Dense(math.prod(self.image_shape))]
        )

    def encode(self, x: Float[Array, "B H W C"]) -> Normal:
        return Normal(*self.q_z(self.encoder(x.reshape(x.shape[0], -1))))

    def logits(self, z: Float[Array, "B D"]) -> Float[Array, "B H W C"]:
        return self.decoder(z).reshape(-1, *self.image_shape)

    def observe(self, x: Float[Array, "B H W C"]) -> Observed:
        return Observed(x, self.encode(x), features=None)

    def draw(self, key: Array, seen: Observed) -> Terms:
        z = sample_normal(key, seen.q)
        return Terms(z, seen.q, log_bernoulli(seen.x, self.logits(z)), 0.0, log_normal(z, seen.q))

    def terms(self, key: Array, x: Float[Array, "B H W C"]) -> Terms:
        return self.draw(key, self.observe(x))

    def decode(self, key: Array, z: Float[Array, "B D"]) -> Float[Array, "B H W C"]:
        del key  # nothing is drawn below z
        return self.render((z,))

    def latents(self, x: Float[Array, "B H W C"]) -> tuple[Float[Array, "B D"]]:
        return (self.encode(x).mean,)

    def render(self, latents: tuple[Float[Array, "B D"]]) -> Float[Array, "B H W C"]:
        return jax.nn.sigmoid(self.logits(*latents))
