"""Architectures. Each is a Flax module with the same seven methods; a new one is a file and a line here.

encode   images -> q(z|x), the posterior of the top latent
observe  images -> all that the encoders say of them
draw     what was observed -> Terms of one sample of every latent for each row
terms    draw of observe
decode   codes of the top latent -> mean images, whatever lies below it drawn
latents  images -> posterior means of every latent, the top one first
render   every latent -> mean images
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from exvae.models.convhvae import ConvHVAE
from exvae.models.hvae import HVAE
from exvae.models.terms import Observed, Terms
from exvae.models.vae import VAE

ARCHITECTURES = {"vae": VAE, "hvae": HVAE, "convhvae": ConvHVAE}

__all__ = ["ARCHITECTURES", "Observed", "Terms", "build", "init"]


def build(config: Any, image_shape: tuple[int, int, int]) -> nn.Module:
    """The module that `config.model` describes, for images of this shape."""
    return ARCHITECTURES[config.architecture](
        image_shape=tuple(image_shape),
        latent_dim=config.latent_dim,
        lower_latent_dim=config.lower_latent_dim or config.latent_dim,
        hidden_dim=config.hidden_dim,
    )


def init(key: Array, model: nn.Module) -> dict:
    """Fresh parameters."""
    key_params, key_sample = jax.random.split(key)
    x = jnp.zeros((1, *model.image_shape), jnp.float32)
    return model.init(key_params, key_sample, x, method="terms")["params"]
