"""The ELBO of held-out images under the whole prior, and the number of active units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.data.batches import map_batches
from exvae.data.store import Store
from exvae.encoding import make_encode_all
from exvae.objectives import Elbo, encoder, evaluation_elbo
from exvae.once import for_equal_configs
from exvae.priors import PRIORS
from exvae.scale import sharding

BATCH = 500  # images at a time; fewer if feature maps are large
ACTIVE_VARIANCE = 0.01  # a latent is active if the variance of its mean is larger (Burda et al., 2015)


class Evaluator(NamedTuple):
    """The compiled functions of an evaluation."""

    mesh: Mesh
    batch: int  # images per call of `elbo_batch`; constant, because the draws of z depend on it
    # (params, store) -> latent means, split over the devices; rows beyond the images are padding
    encode_all: Callable[[dict, Store], Float[Array, "R D"]]
    # (params, latent means or None, number of exemplars) -> components of the prior
    components: Callable[[dict, Float[Array, "R D"] | None, int], Any]
    elbo_batch: Callable[[Array, dict, UInt8[Array, "B H W C"], Any], Elbo]  # (key, params, images, components)


@for_equal_configs("prior.name")
def make_evaluator(config: ConfigDict, model: nn.Module, mesh: Mesh) -> Evaluator:
    """Compile the functions of an evaluation."""
    batch, prior = min(BATCH, 5 * model.block_rows), PRIORS[config.prior.name]
    exactly = jax.default_matmul_precision("highest")  # accelerators round the factors of products by default

    @jax.jit
    @exactly
    def components(params: dict, means: Float[Array, "R D"] | None, count: int | Int[Array, ""]) -> Any:
        return prior.components(params["prior"], encoder(model, params), means, count)

    @jax.jit
    @exactly
    def elbo_batch(key: Array, params: dict, images: UInt8[Array, "B H W C"], components: Any) -> Elbo:
        with sharding.context(mesh):
            return evaluation_elbo(key, model, params, images, components, prior=prior, mesh=mesh)

    return Evaluator(mesh, batch, make_encode_all(model, mesh, 2 * batch), components, elbo_batch)


def mean_elbo(
    key: Array, evaluator: Evaluator, params: dict, images: UInt8[np.ndarray, "n H W C"], components: Any
) -> dict[str, float]:
    """Compute the mean ELBO, reconstruction and KL of the images, with one sample of z for each."""
    # A key that is on one device only would need another compilation.
    key = jax.random.wrap_key_data(sharding.replicate(evaluator.mesh, jax.random.key_data(key)))
    whole = map_batches(
        lambda start, batch: evaluator.elbo_batch(jax.random.fold_in(key, start), params, batch, components),
        images,
        evaluator.batch,
        evaluator.mesh,
    )
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in whole._asdict().items()}


def active_units(means: Float[Array, "n D"] | Float[np.ndarray, "n D"]) -> int:
    """Count the latent dimensions whose posterior mean varies over the images."""
    return int(np.sum(np.var(np.asarray(means, np.float64), axis=0) > ACTIVE_VARIANCE))
