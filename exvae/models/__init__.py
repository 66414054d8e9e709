"""Architectures of the encoder and the decoder.

To add one, implement `architecture.Architecture` and add it to `ARCHITECTURES`.

architecture.py  the interface of an architecture, and a base class
vae.py, hvae.py, convhvae.py, pixelsnail.py, celeba.py  the architectures of the paper
layers.py        dense and gated dense layers, the head of a normal distribution
conv.py          convolutions
causal.py        masked convolutions and attention of PixelSNAIL
likelihoods.py   p(x|z): Bernoulli or discretized logistic
terms.py         the records that an architecture returns
"""

from __future__ import annotations

from typing import Any, cast

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
    """Build the module that `config.model` describes, for images of this shape."""
    return ARCHITECTURES[config.architecture](
        image_shape=image_shape,
        latent_dim=config.latent_dim,
        lower_latent_dim=config.lower_latent_dim or config.latent_dim,
        hidden_dim=config.hidden_dim,
        channels=config.channels,
        likelihood=config.likelihood,
    )


def init(key: Array, model: nn.Module) -> tuple[dict, dict]:
    """Initialise the parameters and the running statistics: {"batch_stats": ...}, or {} without batch norm."""
    key_params, key_sample = jax.random.split(key)
    x = jnp.zeros((1, *model.image_shape), jnp.float32)
    variables = model.init(key_params, key_sample, x, method="terms")
    return variables["params"], {name: variables[name] for name in variables if name == STATISTICS}


def apply(model: nn.Module, params: dict, *args: Any, method: str) -> Any:
    """Call a method of the architecture in evaluation mode: with running statistics, without dropout.

    Args:
      params: {"model": parameters}; with batch norm also "batch_stats", the running statistics.
    """
    return model.apply(_variables(params), *args, method=method)


def training_terms(
    key: Array, key_dropout: Array, model: nn.Module, params: dict, x: Float[Array, "B H W C"], **options: Any
) -> tuple[Terms, dict]:
    """Call `terms` in training mode, with dropout and batch statistics. Also return the new running statistics."""
    rngs = {"dropout": key_dropout}
    out = model.apply(_variables(params), key, x, **options, method="terms", rngs=rngs, mutable=[STATISTICS])
    terms, statistics = cast(tuple[Terms, dict], out)
    return terms, statistics


def _variables(params: dict) -> dict:
    return {"params": params["model"], **{name: params[name] for name in params if name == STATISTICS}}
