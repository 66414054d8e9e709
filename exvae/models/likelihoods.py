"""p(x|z) of a pixel, given the logits that a decoder has for it. A new family is a class and a line at the end."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from exvae.distributions import log_bernoulli, log_discretized_logistic, logistic_level

Pixels = Float[Array, "B H W C"]
# About where photographs end: a normalised gradient moves it by no more than the learning rate in a step.
FIRST_LOG_SCALE = math.log(0.03)


class Bernoulli(nn.Module):
    """Pixels are 0 or 1."""

    channels: int

    def log_prob(self, x: Pixels, logits: Pixels) -> Float[Array, " B"]:
        return log_bernoulli(x, logits)

    def mean(self, logits: Pixels) -> Pixels:
        return jax.nn.sigmoid(logits)

    def quantile(self, u: Pixels, logits: Pixels) -> Pixels:
        """A pixel for each uniform number: if those are random, a draw."""
        return (u < jax.nn.sigmoid(logits)).astype(jnp.float32)


class DiscretizedLogistic(nn.Module):
    """Pixels have 256 levels; sigmoid(logits) is where the logistic lies, its scale is learned for each channel."""

    channels: int

    def setup(self):
        self.log_scale = self.param("log_scale", nn.initializers.constant(FIRST_LOG_SCALE), (self.channels,))

    def log_prob(self, x: Pixels, logits: Pixels) -> Float[Array, " B"]:
        return log_discretized_logistic(x, jax.nn.sigmoid(logits), self.log_scale)

    def mean(self, logits: Pixels) -> Pixels:
        """Of the logistic: the levels at the ends, which take its tails, are not reckoned with."""
        return jax.nn.sigmoid(logits)

    def quantile(self, u: Pixels, logits: Pixels) -> Pixels:
        """A pixel for each uniform number: if those are random, a draw."""
        return logistic_level(u, jax.nn.sigmoid(logits), self.log_scale)


LIKELIHOODS = {"bernoulli": Bernoulli, "discretized_logistic": DiscretizedLogistic}
