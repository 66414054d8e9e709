"""New images from a trained model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, UInt8

from exvae.distributions import to_unit
from exvae.models.encoding import encode_means
from exvae.objectives import pseudo_posteriors


def sample_plates(
    config: Any, model: nn.Module, params: dict, key: Array, images: UInt8[Array, "N H W C"], rows: int, columns: int
) -> Float[Array, "R C H W c"]:
    """Decoder means in rows. Exemplar prior: a row starts with its source x_n, the rest is drawn from r(z|x_n).

    Vamp: a component is drawn uniformly for each image; Gaussian: z ~ N(0, I).
    """
    key_pick, key_z, key_x = jax.random.split(key, 3)
    noise = jax.random.normal(key_z, (rows, columns, model.latent_dim))
    if config.prior.name == "exemplar":
        index = jax.random.choice(key_pick, len(images), (rows,), replace=False)
        means = encode_means(model, params["model"], images, index)[:, None]
        z = means + jnp.exp(0.5 * params["prior"]["log_var"]) * noise
    elif config.prior.name == "vamp":
        q = pseudo_posteriors(model, params)
        pick = jax.random.randint(key_pick, (rows, columns), 0, len(q.mean))
        z = q.mean[pick] + jnp.exp(0.5 * q.log_var[pick]) * noise
    else:
        z = noise
    flat = z.reshape(-1, model.latent_dim)
    plates = model.apply({"params": params["model"]}, key_x, flat, method="decode")
    plates = plates.reshape(rows, columns, *model.image_shape)
    if config.prior.name == "exemplar":
        plates = plates.at[:, 0].set(to_unit(images[index]))
    return plates
