"""The standard normal prior."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from exvae.distributions import Normal, log_normal
from exvae.priors.prior import Encoder, Exemplars

USES_EXEMPLARS = False


def gaussian_log_prob(z: Float[Array, "S D"]) -> Float[Array, " S"]:
    """log N(z | 0, I)."""
    return log_normal(z, Normal(jnp.zeros_like(z), jnp.zeros_like(z)))


def init(key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
    """There is nothing to learn."""
    del key, options, input_shape
    return {}


def training_log_prob(
    params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
) -> Float[Array, " S"]:
    del params, encode, exemplars, mesh
    return gaussian_log_prob(z)


def components(
    params: dict, encode: Encoder, means: Float[Array, "N D"] | None, count: int | Int[Array, ""] | None = None
) -> None:
    del params, encode, means, count


def log_prob(components: None, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
    del components, mesh
    return gaussian_log_prob(z)


def transition(params: dict, q: Normal) -> Normal:
    """q(z|x) itself, as in the paper's data augmentation."""
    del params
    return q


def sample(key: Array, components: None, shape: tuple[int, int], temperature: float) -> Float[Array, "n D"]:
    del components
    return temperature * jax.random.normal(key, shape)
