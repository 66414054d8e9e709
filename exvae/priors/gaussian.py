"""The standard normal prior."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float

from exvae.distributions import Normal, log_normal
from exvae.models import Terms
from exvae.priors.types import Batch, Means

USES_EXEMPLARS = False


def gaussian_log_prob(z: Float[Array, "B D"]) -> Float[Array, " B"]:
    """log N(z | 0, I)."""
    return log_normal(z, Normal(jnp.zeros_like(z), jnp.zeros_like(z)))


def init(key: Array, config: Any, image_shape: tuple[int, int, int]) -> dict:
    del key, config, image_shape
    return {}


def training_log_prob(
    config: Any, model: nn.Module, mesh: Mesh, params: dict, batch: Batch, terms: Terms, table: Array | None
) -> tuple[Float[Array, " B"], list[Means]]:
    del config, model, mesh, params, batch, table
    return gaussian_log_prob(terms.z), []


def components(model: nn.Module, params: dict, means: Array | None, count: int | None = None) -> None:
    del model, params, means, count


def log_prob(nothing: None, z: Float[Array, "B D"], mesh: Mesh | None = None) -> Float[Array, " B"]:
    del nothing, mesh
    return gaussian_log_prob(z)


def transition(params: dict, q: Normal) -> Normal:
    """q(z|x) itself, as in the paper's data augmentation."""
    del params
    return q


def sample(key: Array, model: nn.Module, params: dict, count: int, temperature: float) -> Float[Array, "n D"]:
    del params
    return temperature * jax.random.normal(key, (count, model.latent_dim))
