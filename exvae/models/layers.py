"""Dense layers with the authors' initialisation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
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
    """W x + b.

    Inputs that stand side by side, x = [x1, x2], have products of their own, W1 x1 + W2 x2: one with fewer rows, each
    for as many rows of the others, is multiplied only once, and one without a gradient costs nothing backwards.
    """

    features: int

    @nn.compact
    def __call__(self, *inputs: Float[Array, "_ _"]) -> Float[Array, "B O"]:
        widths, rows = [x.shape[-1] for x in inputs], max(map(len, inputs))
        kernel = self.param("kernel", KERNEL_INIT, (sum(widths), self.features))
        bias = self.param("bias", uniform_bias(sum(widths)), (self.features,))
        kernels = jnp.split(kernel, np.cumsum(widths)[:-1])
        return sum(_repeat(x @ part, rows // len(x)) for x, part in zip(inputs, kernels, strict=True)) + bias


def _repeat(x: Float[Array, "B O"], times: int) -> Float[Array, "B*times O"]:
    return x if times == 1 else jnp.repeat(x, times, axis=0)


class GatedDense(nn.Module):
    """(W x + b) * sigmoid(V x + c). W and V stay separate tensors: the optimizer normalises each one's gradient."""

    features: int

    @nn.compact
    def __call__(self, *inputs: Float[Array, "_ _"]) -> Float[Array, "B O"]:
        return Dense(self.features, name="linear")(*inputs) * nn.sigmoid(Dense(self.features, name="gate")(*inputs))


class NormalHead(nn.Module):
    """Mean and clipped log-variance of a diagonal normal."""

    features: int

    @nn.compact
    def __call__(self, h: Float[Array, "B I"]) -> tuple[Float[Array, "B O"], Float[Array, "B O"]]:
        log_var = Dense(self.features, name="log_var")(h)
        return Dense(self.features, name="mean")(h), jnp.clip(log_var, *LOG_VAR_RANGE)
