"""The VampPrior: a mixture of the posteriors of learned pseudo-inputs (Tomczak & Welling, 2018)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from exvae import models
from exvae.distributions import LOG_2PI, Normal, sample_normal
from exvae.models import Terms
from exvae.priors.types import Batch, Means

USES_EXEMPLARS = False


def vamp_log_prob(z: Float[Array, "B D"], q: Normal) -> Float[Array, " B"]:
    """log 1/P sum_p N(z | mu_p, diag(v_p)), the VampPrior, with q the posteriors of the P pseudo-inputs.

    The square is expanded, so that all (B, P) exponents are two matrix products.
    """
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    precision = jnp.exp(-q.log_var)  # (P, D)
    squares = product(jnp.square(z), precision.T) - 2.0 * product(z, (q.mean * precision).T)  # (B, P)
    constant = jnp.sum(jnp.square(q.mean) * precision + q.log_var + LOG_2PI, axis=-1)  # (P,)
    return jax.nn.logsumexp(-0.5 * (squares + constant), axis=-1) - np.log(q.mean.shape[0])


def init(key: Array, config: Any, image_shape: tuple[int, int, int]) -> dict:
    """Pseudo-inputs ~ N(0.05, 0.01^2)."""
    shape = (config.prior.num_pseudo_inputs, *image_shape)
    return {"pseudo_inputs": 0.05 + 0.01 * jax.random.normal(key, shape)}


def pseudo_posteriors(model: nn.Module, params: dict) -> Normal:
    """q(z|u_p) of the pseudo-inputs, which stay in [0, 1] as images do."""
    inputs = jnp.clip(params["prior"]["pseudo_inputs"], 0.0, 1.0)
    return models.apply(model, params, inputs, method="encode")


def training_log_prob(
    config: Any, model: nn.Module, mesh: Mesh, params: dict, batch: Batch, terms: Terms, table: Array | None
) -> tuple[Float[Array, " B"], list[Means]]:
    del config, mesh, batch, table
    return vamp_log_prob(terms.z, pseudo_posteriors(model, params)), []


def components(model: nn.Module, params: dict, means: Array | None, count: int | None = None) -> Normal:
    del means, count
    return pseudo_posteriors(model, params)


def log_prob(posteriors: Normal, z: Float[Array, "B D"], mesh: Mesh | None = None) -> Float[Array, " B"]:
    del mesh
    origin = jnp.mean(z, axis=0)  # codes of one image lie close together: from here the expanded squares are small
    return vamp_log_prob(z - origin, posteriors._replace(mean=posteriors.mean - origin))


def transition(params: dict, q: Normal) -> Normal:
    """q(z|x) itself, as in the paper's data augmentation."""
    del params
    return q


def sample(key: Array, model: nn.Module, params: dict, count: int, temperature: float) -> Float[Array, "n D"]:
    """A component is drawn uniformly for each code."""
    key_pick, key_z = jax.random.split(key)
    q = pseudo_posteriors(model, params)
    pick = jax.random.randint(key_pick, (count,), 0, len(q.mean))
    return sample_normal(key_z, Normal(q.mean[pick], q.log_var[pick]), temperature)
