"""The VampPrior: a mixture of the posteriors of learned pseudo-inputs (Tomczak & Welling, 2018)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.distributions import LOG_2PI, Normal, sample_normal
from exvae.priors.prior import Encoder, Exemplars

USES_EXEMPLARS = False


def vamp_log_prob(z: Float[Array, "S D"], q: Normal) -> Float[Array, " S"]:
    """log 1/P sum_p N(z | mu_p, diag(v_p)), where q holds the posteriors of the P pseudo-inputs.

    The square is expanded, so the (S, P) exponents are a sum of two matrix products.
    """
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    precision = jnp.exp(-q.log_var)  # (P, D)
    squares = product(jnp.square(z), precision.T) - 2.0 * product(z, (q.mean * precision).T)  # (S, P)
    constant = jnp.sum(jnp.square(q.mean) * precision + q.log_var + LOG_2PI, axis=-1)  # (P,)
    return jax.nn.logsumexp(-0.5 * (squares + constant), axis=-1) - np.log(q.mean.shape[0])


def init(key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
    """Draw pseudo-inputs ~ N(0.05, 0.01^2)."""
    # Differs from the authors' code: training starts from these values. There, the initialisation of the weights runs
    # later and overwrites them.
    return {"pseudo_inputs": 0.05 + 0.01 * jax.random.normal(key, (options.num_pseudo_inputs, *input_shape))}


def pseudo_posteriors(params: dict, encode: Encoder) -> Normal:
    """Return q(z|u_p) of the pseudo-inputs u_p, which are clipped to [0, 1] like pixels."""
    return encode(jnp.clip(params["pseudo_inputs"], 0.0, 1.0))


def training_log_prob(
    params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
) -> Float[Array, " S"]:
    """Compute log p(z) of the mixture of the posteriors of the pseudo-inputs."""
    del exemplars, mesh
    return vamp_log_prob(z, pseudo_posteriors(params, encode))


def components(
    params: dict, encode: Encoder, means: Float[Array, "N D"] | None, count: int | Int[Array, ""] | None = None
) -> Normal:
    """Return the posteriors of the pseudo-inputs."""
    del means, count
    return pseudo_posteriors(params, encode)


def log_prob(components: Normal, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
    """Compute `vamp_log_prob` relative to the mean of z. Squares are then small if all codes are of one image."""
    del mesh
    origin = jnp.mean(z, axis=0)
    return vamp_log_prob(z - origin, components._replace(mean=components.mean - origin))


def transition(params: dict, q: Normal) -> Normal:
    """Return q(z|x), as in the paper's data augmentation."""
    del params
    return q


def sample(
    key: Array, components: Normal, shape: tuple[int, int], temperature: float | Float[Array, ""]
) -> Float[Array, "n D"]:
    """Draw a component uniformly for each code, then the code."""
    key_pick, key_z = jax.random.split(key)
    pick = jax.random.randint(key_pick, shape[:1], 0, len(components.mean))
    return sample_normal(key_z, Normal(components.mean[pick], components.log_var[pick]), temperature)
