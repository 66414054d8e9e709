"""Architectures (`architecture.Architecture`). A new one is a file and a line here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.models.architecture import Architecture, BaseArchitecture
from exvae.models.celeba import CelebA
from exvae.models.convhvae import ConvHVAE
from exvae.models.hvae import HVAE
from exvae.models.likelihoods import LIKELIHOODS
from exvae.models.pixelsnail import PixelSNAIL
from exvae.models.terms import Observed, Terms
from exvae.models.vae import VAE

ARCHITECTURES: dict[str, type[BaseArchitecture]] = {
    "vae": VAE,
    "hvae": HVAE,
    "convhvae": ConvHVAE,
    "pixelsnail": PixelSNAIL,
    "celeba": CelebA,
}
STATISTICS = "batch_stats"  # Flax's name for the running statistics of batch norm

__all__ = [
    "ARCHITECTURES",
    "LIKELIHOODS",
    "Architecture",
    "BaseArchitecture",
    "Observed",
    "Terms",
    "apply",
    "build",
    "init",
    "training_terms",
]


def build(config: ConfigDict, image_shape: tuple[int, int, int]) -> nn.Module:
    """The module that `config.model` describes, for images of this shape."""
    return ARCHITECTURES[config.architecture](
        image_shape=tuple(image_shape),
        latent_dim=config.latent_dim,
        lower_latent_dim=config.lower_latent_dim or config.latent_dim,
        hidden_dim=config.hidden_dim,
        channels=config.channels,
        likelihood=config.likelihood,
    )


def init(key: Array, model: nn.Module) -> tuple[dict, dict]:
    """Fresh parameters, and running statistics: {"batch_stats": ...}, or {} in an architecture without batch norm."""
    key_params, key_sample = jax.random.split(key)
    x = jnp.zeros((1, *model.image_shape), jnp.float32)
    variables = model.init(key_params, key_sample, x, method="terms")
    return variables["params"], {name: variables[name] for name in variables if name == STATISTICS}


def apply(model: nn.Module, params: dict, *args: Any, method: str) -> Any:
    """A method of the architecture as it is after training: running statistics, no dropout.

    Args:
      params: {"model": parameters, and, where there is batch norm, "batch_stats": running statistics}.
    """
    return model.apply(_variables(params), *args, method=method)


def training_terms(
    key: Array, key_dropout: Array, model: nn.Module, params: dict, x: Float[Array, "B H W C"], **options: Any
) -> tuple[Terms, dict]:
    """`terms` as training has them, with dropout and the batch's own statistics, and the new running statistics."""
    rngs = {"dropout": key_dropout}
    return model.apply(_variables(params), key, x, **options, method="terms", rngs=rngs, mutable=[STATISTICS])


def _variables(params: dict) -> dict:
    return {"params": params["model"], **{name: params[name] for name in params if name == STATISTICS}}
