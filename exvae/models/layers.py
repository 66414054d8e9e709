"""Dense layers with the authors' initialisation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jaxtyping import Array, Float

# Weights ~ N(0, 2 / fan_in); the log-variance heads are clipped to this range.
KERNEL_INIT = initializers.variance_scaling(2.0, "fan_in", "normal")
LOG_VAR_RANGE = (-6.0, 2.0)


def uniform_bias(fan_in: int) -> initializers.Initializer:
    """Biases ~ U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Dense(nn.Module):
    """W x + b."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", KERNEL_INIT, (fan_in, self.features))
        bias = self.param("bias", uniform_bias(fan_in), (self.features,))
        return x @ kernel + bias


class GatedDense(nn.Module):
    """(W x + b) * sigmoid(V x + c). W and V stay separate tensors: the optimizer normalises each one's gradient."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        return Dense(self.features, name="linear")(x) * nn.sigmoid(Dense(self.features, name="gate")(x))


class NormalHead(nn.Module):
    """Mean and clipped log-variance of a diagonal normal."""

    features: int

    @nn.compact
    def __call__(self, h: Float[Array, "B I"]) -> tuple[Float[Array, "B O"], Float[Array, "B O"]]:
        log_var = Dense(self.features, name="log_var")(h)
        return Dense(self.features, name="mean")(h), jnp.clip(log_var, *LOG_VAR_RANGE)
