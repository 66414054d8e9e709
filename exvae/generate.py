"""New images from a trained model."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, UInt8

from exvae.priors import PRIORS


def sample_plates(
    key: Array, config: Any, model: nn.Module, params: dict, images: UInt8[Array, "N H W C"], rows: int, columns: int
) -> Float[Array, "R C H W c"]:
    """Decoder means of codes drawn from the prior; with the exemplar prior each row starts with its exemplar."""
    key_z, key_x = jax.random.split(key)
    z, sources = PRIORS[config.prior.name].sample(key_z, model, params, images, rows, columns)
    flat = z.reshape(-1, model.latent_dim)
    plates = model.apply({"params": params["model"]}, key_x, flat, method="decode")
    plates = plates.reshape(rows, columns, *model.image_shape)
    return plates if sources is None else plates.at[:, 0].set(sources)
