"""HVAE: two latent layers, dense networks (supplement, architecture b). Other modules call the top latent z2 just z."""

from __future__ import annotations

import math
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.distributions import Normal, log_normal, log_posterior, sample_normal
from exvae.models.architecture import BaseArchitecture
from exvae.models.layers import Dense, GatedDense, NormalHead
from exvae.models.terms import Observed, Terms


class HVAE(BaseArchitecture):
    """q(z2|x) q(z1|x,z2) and p(z2) p(z1|z2) p(x|z1,z2). Subclasses change the networks that read and draw images."""

    def setup_networks(self) -> None:
        """Create the networks of all posteriors, of p(z1|z2) and of p(x|z1,z2)."""
        self.setup_encoder()
        self.q_z2 = NormalHead(self.latent_dim)
        self.q_z1_joint = GatedDense(self.hidden_dim)
        self.q_z1 = NormalHead(self.lower_latent_dim)
        self.p_z1_body = nn.Sequential([GatedDense(self.hidden_dim), GatedDense(self.hidden_dim)])
        self.p_z1 = NormalHead(self.lower_latent_dim)
        self.setup_decoder()

    def setup_encoder(self) -> None:
        """Create the networks that read the image, and the one that reads z2."""
        self.z2_from_x: nn.Module = nn.Sequential([GatedDense(self.hidden_dim), GatedDense(self.hidden_dim)])
        self.z1_from_x: nn.Module = GatedDense(self.hidden_dim)
        self.z1_from_z2 = GatedDense(self.hidden_dim)

    def setup_decoder(self) -> None:
        """Create the networks of p(x|z1,z2)."""
        self.p_x_z1 = GatedDense(self.hidden_dim)
        self.p_x_z2 = GatedDense(self.hidden_dim)
        self.p_x: nn.Module = nn.Sequential([GatedDense(self.hidden_dim), Dense(math.prod(self.image_shape))])

    def read(self, x: Float[Array, "B H W C"]) -> Float[Array, "B ..."]:
        """Return the images in the shape that `z2_from_x` and `z1_from_x` expect."""
        return x.reshape(x.shape[0], -1)

    def encode(self, x: Float[Array, "B H W C"]) -> Normal:
        """Return q(z2|x)."""
        return Normal(*self.q_z2(self.z2_from_x(self.read(x))))

    def observe(self, x: Float[Array, "B H W C"]) -> Observed:
        """Run the encoder of z2 and the image part of the encoder of z1."""
        return Observed(x, self.encode(x), features=self.z1_from_x(self.read(x)))

    def posterior_z1(self, features: Float[Array, "I F"], z2: Float[Array, "B D"]) -> Normal:
        """Return q(z1|x,z2). Each of the I images has B / I codes z2 in adjacent rows."""
        return Normal(*self.q_z1(self.q_z1_joint(features, self.z1_from_z2(z2))))

    def fixed_posterior_z1(self, features: Float[Array, "I F"], z2: Float[Array, "B D"]) -> Normal:
        """Return `posterior_z1` with a gradient through z2 only, not through the networks (optim.estimator = stl).

        Without the gradient through z2 the estimate would still be unbiased, but its variance would not vanish at the
        exact posterior.
        """
        networks = {"params": jax.lax.stop_gradient(self.variables["params"])}
        q = self.clone().apply(networks, jax.lax.stop_gradient(features), z2, method="posterior_z1")
        return cast(Normal, q)

    def prior_z1(self, z2: Float[Array, "B D"]) -> Normal:
        """Return p(z1|z2)."""
        return Normal(*self.p_z1(self.p_z1_body(z2)))

    def logits(self, z2: Float[Array, "B D"], z1: Float[Array, "B D1"]) -> Float[Array, "B H W C"]:
        """Return the logits of p(x|z1,z2)."""
        joint = jnp.concatenate([self.p_x_z1(z1), self.p_x_z2(z2)], axis=-1)
        return self.p_x(joint).reshape(-1, *self.image_shape)

    def draw(self, key: Array, seen: Observed, *, stl: bool = False, paired: bool = False) -> Terms:
        """Draw z2 and z1 for each row, and compute the terms of the ELBO."""
        assert seen.features is not None, "observe of this architecture returns features"
        key_z2, key_z1 = jax.random.split(key)
        z2 = sample_normal(key_z2, seen.q, paired=paired)
        q_z1, p_z1 = self.posterior_z1(seen.features, z2), self.prior_z1(z2)
        z1 = sample_normal(key_z1, q_z1, paired=paired)
        log_q_z1 = log_normal(z1, self.fixed_posterior_z1(seen.features, z2) if stl else q_z1)
        log_ratio = log_normal(z1, p_z1) - log_q_z1
        return Terms(z2, seen.q, self.log_px(seen.x, z2, z1), log_ratio, log_posterior(z2, seen.q, stl=stl))

    def complete(self, key: Array, z: Float[Array, "B D"]) -> tuple[Float[Array, "B D"], Float[Array, "B D1"]]:
        """Return z2 = z and a draw of z1 ~ p(z1|z2)."""
        return z, sample_normal(key, self.prior_z1(z))

    def latents(self, x: Float[Array, "B H W C"]) -> tuple[Float[Array, "B D"], Float[Array, "B D1"]]:
        """Return the means of q(z2|x) and of q(z1|x,z2) at that z2."""
        z2 = self.encode(x).mean
        return z2, self.posterior_z1(self.z1_from_x(self.read(x)), z2).mean
