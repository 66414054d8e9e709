"""Log densities and sampling. A log density sums over all axes but the first: one number for each image."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from exvae.arrays import Array

LOG_2PI = math.log(2.0 * math.pi)
HALVINGS = 4  # number of times that `log_bernoulli` halves a row of pixels
LEVELS = 256  # number of values of a pixel
# Range of a logistic's log-scale. At the low end one level has all the mass, at the high end the two outer levels.
LOG_SCALE_RANGE = (-10.0, 10.0)


class Normal(NamedTuple):
    """N(mean, diag(exp(log_var)))."""

    mean: Float[Array, "B D"]
    log_var: Float[Array, "B D"]


def sample_normal(
    key: Array, q: Normal, temperature: Float[Array, ""] | float = 1.0, *, paired: bool = False
) -> Float[Array, "B D"]:
    """Draw z = mean + temperature * exp(log_var / 2) * eps, eps ~ N(0, I), differentiable in mean and log_var.

    Args:
      paired: rows 2i and 2i + 1 get opposite eps. If both rows belong to one image, terms linear in eps cancel in
        their mean.
    """
    rows, dim = q.mean.shape
    eps = jax.random.normal(key, (rows // 2 if paired else rows, dim), q.mean.dtype)
    eps = jnp.stack([eps, -eps], axis=1).reshape(rows, dim) if paired else eps
    return q.mean + temperature * jnp.exp(0.5 * q.log_var) * eps


def log_normal(z: Float[Array, "B D"], p: Normal) -> Float[Array, " B"]:
    """log N(z | mean, diag(exp(log_var))) = -1/2 sum_d [log 2 pi + log_var_d + (z_d - mean_d)^2 / exp(log_var_d)]."""
    squares = jnp.square(z - p.mean) * jnp.exp(-p.log_var)
    return -0.5 * jnp.sum(LOG_2PI + p.log_var + squares, axis=-1)


def log_posterior(z: Float[Array, "B D"], q: Normal, *, stl: bool = False) -> Float[Array, " B"]:
    """log q(z) of a sample z ~ q.

    Args:
      stl: sticking the landing (Roeder et al., 2017). The gradient flows through z but not through the parameters of
        q. The omitted term is the score of q at its own sample. Its mean is zero, so the gradient of the ELBO stays
        unbiased, and its variance vanishes when q is the exact posterior. Use this for the top latent only. The
        parameters of a lower latent's posterior depend on the sample above it, and that gradient must be kept.
    """
    return log_normal(z, jax.lax.stop_gradient(q) if stl else q)


@jax.custom_jvp
def log_bernoulli(x: Float[Array, "B ..."], logits: Float[Array, "B ..."]) -> Float[Array, " B"]:
    """log Bernoulli(x | sigmoid(logits)) = sum [x * logits - log(1 + exp(logits))], stable for any logit.

    The second term is log(1 + exp(l)) = max(l, 0) + log(1 + e) with e = exp(-|l|). Logarithms are slower than the
    decoder's matrix products, so the code takes one logarithm of each product of 2^HALVINGS factors 1 + e. A factor is
    at most 2, so the product cannot overflow. The code tracks the product minus one, (1 + a)(1 + b) - 1 = a + b + ab,
    because adding a small e to 1 would round it away.
    """
    # Differs from the authors' code: probabilities are not clipped to [1e-5, 1 - 1e-5]. Logits need no clipping.
    x, logits = (a.reshape(a.shape[0], -1) for a in (x, logits))
    rest = jnp.exp(-jnp.abs(logits))
    rest = jnp.pad(rest, ((0, 0), (0, -rest.shape[1] % 2**HALVINGS)))  # factors 1 + 0
    for _ in range(HALVINGS):
        a, b = jnp.split(rest, 2, axis=1)
        rest = a + b + a * b
    return jnp.sum(x * logits - jnp.maximum(logits, 0.0), axis=-1) - jnp.sum(jnp.log1p(rest), axis=-1)


@log_bernoulli.defjvp
def _log_bernoulli_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, logits), (dx, dlogits) = primals, tangents
    terms = (x - jax.nn.sigmoid(logits)) * dlogits + logits * dx
    return log_bernoulli(x, logits), jnp.sum(terms.reshape(terms.shape[0], -1), axis=-1)


def log_discretized_logistic(
    x: Float[Array, "B ... C"], mean: Float[Array, "B ... C"], log_scale: Float[Array, " C"]
) -> Float[Array, " B"]:
    """log P(x): the mass of a logistic distribution in the bin of x.

    A value x = l / 255 is level l. Its bin is [l / 256, (l + 1) / 256]; the first and the last bin are open to the
    outside. Let a and b be the ends of the bin, relative to the mean and in units of the scale. The mass is
    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)). The product form is stable in the tails, where
    the difference would cancel.
    """
    log_scale = jnp.clip(log_scale, *LOG_SCALE_RANGE)
    level = jnp.round(x * (LEVELS - 1))
    low, high = ((edge / LEVELS - mean) * jnp.exp(-log_scale) for edge in (level, level + 1))
    first, last = level == 0, level == LEVELS - 1
    log_width = jnp.log(-jnp.expm1(-jnp.exp(-log_scale) / LEVELS))
    terms = (
        jnp.where(last, 0.0, jax.nn.log_sigmoid(high))
        + jnp.where(first, 0.0, jax.nn.log_sigmoid(-low))
        + jnp.where(first | last, 0.0, log_width)
    )
    return jnp.sum(terms.reshape(terms.shape[0], -1), axis=-1)


def logistic_level(
    u: Float[Array, "#B ... C"], mean: Float[Array, "B ... C"], log_scale: Float[Array, " C"]
) -> Float[Array, "B ... C"]:
    """Return the pixel value whose bin contains the u-quantile of the logistic."""
    value = mean + jnp.exp(jnp.clip(log_scale, *LOG_SCALE_RANGE)) * jax.scipy.special.logit(u)
    return jnp.clip(jnp.floor(LEVELS * value), 0, LEVELS - 1) / (LEVELS - 1)


def to_unit(images: UInt8[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Convert bytes 0..255 to float32 0..1."""
    return images.astype(jnp.float32) * (1.0 / 255.0)


def binarize(key: Array, images: UInt8[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Draw each pixel from Bernoulli(value / 255)."""
    return jax.random.bernoulli(key, to_unit(images)).astype(jnp.float32)
