"""Figures of a trained model on held-out images."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, UInt8

from exvae.models.encoding import encode_means
from exvae.objectives import Elbo, evaluation_elbo

BATCH = 500
ACTIVE_VARIANCE = 0.01  # a latent is active if its mean varies more than this (Burda et al., 2015)


class Evaluator(NamedTuple):
    """The two compiled functions that evaluation consists of."""

    encode_all: Any  # (params, images) -> latent means
    elbo_batch: Any  # (params, key, images, means) -> Elbo


def make_evaluator(config: Any, model: nn.Module) -> Evaluator:
    @jax.jit
    def encode_all(params: dict, images: UInt8[Array, "N H W C"]) -> Float[Array, "N D"]:
        return encode_means(model, params["model"], images, jnp.arange(len(images)))

    @jax.jit
    def elbo_batch(params: dict, key: Array, images: UInt8[Array, "B H W C"], means: Array | None) -> Elbo:
        return evaluation_elbo(key, config, model, params, images, means)

    return Evaluator(encode_all, elbo_batch)


def mean_elbo(
    evaluator: Evaluator, params: dict, key: Array, images: UInt8[np.ndarray, "n H W C"], means: Array | None
) -> dict[str, float]:
    """ELBO, reconstruction and KL with one sample an image, averaged over the images."""
    size = min(BATCH, len(images))
    parts = []
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        padding = [(0, size - len(batch))] + [(0, 0)] * (images.ndim - 1)  # one shape, one compilation
        parts.append(evaluator.elbo_batch(params, jax.random.fold_in(key, start), np.pad(batch, padding), means))
    whole = jax.tree.map(lambda *values: np.concatenate(values)[: len(images)], *jax.device_get(parts))
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in whole._asdict().items()}


def active_units(means: Float[Array, "n D"]) -> int:
    """Latent dimensions whose posterior mean varies over the images."""
    return int(np.sum(np.var(np.asarray(means, np.float64), axis=0) > ACTIVE_VARIANCE))
