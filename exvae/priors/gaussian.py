"""The standard normal prior."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.distributions import Normal, log_normal
from exvae.priors.prior import Encoder, Exemplars

USES_EXEMPLARS = False


def gaussian_log_prob(z: Float[Array, "S D"]) -> Float[Array, " S"]:
    """log N(z | 0, I)."""
    return log_normal(z, Normal(jnp.zeros_like(z), jnp.zeros_like(z)))


def init(key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
    """Return {}: this prior has no parameters."""
    del key, options, input_shape
    return {}


def training_log_prob(
    params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
) -> Float[Array, " S"]:
    """log N(z | 0, I)."""
    del params, encode, exemplars, mesh
    return gaussian_log_prob(z)


def components(
    params: dict, encode: Encoder, means: Float[Array, "N D"] | None, count: int | Int[Array, ""] | None = None
) -> None:
    """Return None: this prior has no components."""
    del params, encode, means, count


def log_prob(components: None, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
    """log N(z | 0, I)."""
    del components, mesh
    return gaussian_log_prob(z)


def transition(params: dict, q: Normal) -> Normal:
    """Return q(z|x), as in the paper's data augmentation."""
    del params
    return q


def sample(
    key: Array, components: None, shape: tuple[int, int], temperature: float | Float[Array, ""]
) -> Float[Array, "n D"]:
    """Draw codes from N(0, temperature^2 I)."""
    del components
    return temperature * jax.random.normal(key, shape)
