"""Log densities and sampling. Sums run over the event axes, so a batch of images gives one number per image."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

LOG_2PI = math.log(2.0 * math.pi)


class Normal(NamedTuple):
    """N(mean, diag(exp(log_var)))."""

    mean: Float[Array, "B D"]
    log_var: Float[Array, "B D"]


def sample_normal(key: Array, q: Normal) -> Float[Array, "B D"]:
    """Draw z = mean + exp(log_var / 2) * eps with eps ~ N(0, I), differentiable in mean and log_var."""
    eps = jax.random.normal(key, q.mean.shape, q.mean.dtype)
    return q.mean + jnp.exp(0.5 * q.log_var) * eps


def log_normal(z: Float[Array, "B D"], p: Normal) -> Float[Array, " B"]:
    """log N(z | mean, diag(exp(log_var))) = -1/2 sum_d [log 2 pi + log_var_d + (z_d - mean_d)^2 / exp(log_var_d)]."""
    squares = jnp.square(z - p.mean) * jnp.exp(-p.log_var)
    return -0.5 * jnp.sum(LOG_2PI + p.log_var + squares, axis=-1)


def log_bernoulli(x: Float[Array, "B ..."], logits: Float[Array, "B ..."]) -> Float[Array, " B"]:
    """log Bernoulli(x | sigmoid(logits)) = sum [x * logits - log(1 + exp(logits))], stable for any logit."""
    terms = x * logits - jax.nn.softplus(logits)
    return jnp.sum(terms.reshape(terms.shape[0], -1), axis=-1)


def to_unit(images: UInt8[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Bytes 0..255 to float32 0..1."""
    return images.astype(jnp.float32) * (1.0 / 255.0)


def binarize(key: Array, images: UInt8[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Draw each pixel from Bernoulli(value / 255)."""
    return jax.random.bernoulli(key, to_unit(images)).astype(jnp.float32)
