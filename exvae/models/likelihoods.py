"""p(x|z) of a pixel, given the decoder's logits. To add a family, write a class and add it to `LIKELIHOODS`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.distributions import log_bernoulli, log_discretized_logistic, logistic_level

Pixels = Float[Array, "B H W C"]
# The initial log-scale. It is close to the final value for photographs, because a step with normalised gradients
# changes it by about the learning rate at most.
FIRST_LOG_SCALE = math.log(0.03)


class Bernoulli(nn.Module):
    """Pixels are 0 or 1."""

    channels: int

    def log_prob(self, x: Pixels, logits: Pixels) -> Float[Array, " B"]:
        """log p(x|z), summed over pixels."""
        return log_bernoulli(x, logits)

    def mean(self, logits: Pixels) -> Pixels:
        """The mean of p(x|z)."""
        return jax.nn.sigmoid(logits)

    def quantile(self, u: Float[Array, "#B H W C"], logits: Pixels) -> Pixels:
        """The u-quantile of each pixel. A draw from p(x|z) if u is uniform in [0, 1]."""
        return (u < jax.nn.sigmoid(logits)).astype(jnp.float32)


class DiscretizedLogistic(nn.Module):
    """Pixels have 256 levels. The logistic has location sigmoid(logits) and a learned scale for each channel."""

    channels: int

    def setup(self) -> None:
        """Create the log-scale of each channel."""
        self.log_scale = self.param("log_scale", nn.initializers.constant(FIRST_LOG_SCALE), (self.channels,))

    def log_prob(self, x: Pixels, logits: Pixels) -> Float[Array, " B"]:
        """log p(x|z), summed over pixels."""
        return log_discretized_logistic(x, jax.nn.sigmoid(logits), self.log_scale)

    def mean(self, logits: Pixels) -> Pixels:
        """The location of the logistic: an approximation, because the outer levels collect the tails."""
        return jax.nn.sigmoid(logits)

    def quantile(self, u: Float[Array, "#B H W C"], logits: Pixels) -> Pixels:
        """The u-quantile of each pixel. A draw from p(x|z) if u is uniform in [0, 1]."""
        return logistic_level(u, jax.nn.sigmoid(logits), self.log_scale)


LIKELIHOODS = {"bernoulli": Bernoulli, "discretized_logistic": DiscretizedLogistic}
