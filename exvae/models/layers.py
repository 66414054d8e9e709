"""Dense layers with the authors' initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jaxtyping import Float

from exvae.arrays import Array

KERNEL_INIT = initializers.variance_scaling(2.0, "fan_in", "normal")  # weights ~ N(0, 2 / fan_in)
# Differs from the paper: log-variances are clipped to this range, as in the authors' code.
LOG_VAR_RANGE = (-6.0, 2.0)
RESULT = "result"  # name of the results of linear layers, which a backward pass may keep (`jax.checkpoint_policies`)


def uniform_bias(fan_in: int) -> Callable[[Array, tuple[int, ...]], Array]:
    """Return the initialiser of biases ~ U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)


class Dense(nn.Module):
    """W x + b.

    Several inputs act as one concatenated input: W [x1, x2] = W1 x1 + W2 x2. The products are computed separately for
    speed: an input that needs no gradient costs nothing in the backward pass. An input may have fewer rows than the
    longest one, if their number divides that of the longest. The rows of its product are then repeated.
    """

    features: int

    @nn.compact
    def __call__(self, *inputs: Float[Array, "... _"]) -> Float[Array, "... {self.features}"]:
        widths, rows = [x.shape[-1] for x in inputs], max(map(len, inputs))
        kernel = self.param("kernel", KERNEL_INIT, (sum(widths), self.features))
        bias = self.param("bias", uniform_bias(sum(widths)), (self.features,))
        kernels = jnp.split(kernel, np.cumsum(widths)[:-1])
        y = sum(_repeat(x @ part, rows // len(x)) for x, part in zip(inputs, kernels, strict=True)) + bias
        return checkpoint_name(y, RESULT)


def _repeat(x: Float[Array, "B ..."], times: int) -> Float[Array, "B*{times} ..."]:
    return x if times == 1 else jnp.repeat(x, times, axis=0)


class GatedDense(nn.Module):
    """(W x + b) * sigmoid(V x + c). W and V are separate tensors: the optimizer normalises the gradient of each."""

    features: int

    @nn.compact
    def __call__(self, *inputs: Float[Array, "... _"]) -> Float[Array, "... {self.features}"]:
        return Dense(self.features, name="linear")(*inputs) * nn.sigmoid(Dense(self.features, name="gate")(*inputs))


class NormalHead(nn.Module):
    """Mean and clipped log-variance of a normal distribution with diagonal covariance."""

    features: int

    @nn.compact
    def __call__(self, h: Float[Array, "B I"]) -> tuple[Float[Array, "B O"], Float[Array, "B O"]]:
        log_var = Dense(self.features, name="log_var")(h)
        return Dense(self.features, name="mean")(h), jnp.clip(log_var, *LOG_VAR_RANGE)
