"""log p(x) of an image by importance sampling (IWAE), with all exemplars or with the nearest ones and an audit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8
from ml_collections import ConfigDict

from exvae import models
from exvae.arrays import Array
from exvae.distributions import to_unit
from exvae.models import Observed
from exvae.models.terms import check, check_observed
from exvae.once import for_equal_configs
from exvae.priors import PRIORS
from exvae.priors.exemplar import Components
from exvae.priors.parzen import exemplar_log_prob
from exvae.retrieval import NOBODY
from exvae.scale import sharding


class Scores(NamedTuple):
    """The result of importance sampling for a batch of images."""

    log_likelihood: Float[Array, " B"]  # IWAE; a lower bound on the value with all exemplars if some are left out
    excess: Float[Array, " B"]  # audit: estimate of exact - pruned that decides whether to double the candidates
    loss: Float[Array, " B"]  # a second, independent estimate to report, which the decision does not bias


Scorer = Callable[[dict, Any, Array, UInt8[Array, "B H W C"], Int[Array, " B"]], Scores]


@for_equal_configs("prior.name", "eval.iwae_samples", "eval.audit")
def make_scorer(config: ConfigDict, model: nn.Module, mesh: Mesh, *, candidates: int | None) -> Scorer:
    """Compile the function (params, components, key, images, index) -> Scores.

    Each device scores one image at a time. The S samples are a large enough batch, and the result cannot depend on
    other images.

    Args:
      candidates: number of exemplars to use, those nearest to the posterior mean. None means all. Priors without
        exemplars ignore it.
    """
    prior = PRIORS[config.prior.name]

    @jax.default_matmul_precision("highest")  # accelerators round the factors of products by default
    def score(
        params: dict, components: Any, key: Array, images: UInt8[Array, "1 H W C"], index: Int[Array, " 1"]
    ) -> Scores:
        key_samples, key_audit = jax.random.split(jax.random.fold_in(key, index[0]))
        seen = models.apply(model, params, to_unit(images), method="observe")
        check_observed(seen, image_shape=model.image_shape, num_images=1, latent_dim=model.latent_dim)
        draw = functools.partial(draw_samples, key_samples, config, model, params, seen)
        if not prior.USES_EXEMPLARS:
            samples = draw(log_prob=lambda z: prior.log_prob(components, z))
            return Scores(log_mean_exp(samples.log_w)[None], jnp.zeros(1), jnp.zeros(1))
        origin = seen.q.mean[0]
        chosen = None
        # Differs from the paper: by default only the nearest exemplars are counted. eval.method = exact counts all.
        # Differs from the authors' code: everything is computed in float32. The code uses float64.
        if candidates is not None and candidates < len(components.means):
            chosen = nearest(origin, components.means, candidates)
        counted = components.at(chosen).centred(origin)
        samples = draw(log_prob=lambda z: prior.log_prob(counted, z - origin))
        excess = jnp.zeros(2)
        if chosen is not None:
            added = audit(key_audit, samples, components, chosen, (2, config.eval.audit))
            excess = jnp.log1p(jnp.mean(added, axis=-1))  # nats
        return Scores(log_mean_exp(samples.log_w)[None], excess[:1], excess[1:])

    return jax.jit(sharding.over_images(mesh, score))


class Samples(NamedTuple):
    """S samples of the latents of one image."""

    z: Float[Array, "S D"]
    log_pz: Float[Array, " S"]  # with the exemplars in use
    log_w: Float[Array, " S"]  # log importance weight


def draw_samples(
    key: Array,
    config: ConfigDict,
    model: nn.Module,
    params: dict,
    seen: Observed,
    *,
    log_prob: Callable[[Float[Array, "S D"]], Float[Array, " S"]],
) -> Samples:
    """Draw z_s ~ q(z|x) and compute log w_s = log p(x, z_s) - log q(z_s|x), in blocks that fit into the cache."""
    num_samples = config.eval.iwae_samples
    num_blocks = -(-num_samples // model.block_rows)
    block = -(-num_samples // num_blocks)
    copies = seen.repeat(block)

    def draw_block(key: Array) -> Samples:
        terms = models.apply(model, params, key, copies, method="draw")
        check(terms, num_rows=block, latent_dim=model.latent_dim)
        log_pz = log_prob(terms.z)
        return Samples(terms.z, log_pz, terms.log_px + terms.log_ratio - terms.log_q + log_pz)

    samples = lax.map(draw_block, jax.random.split(key, num_blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_samples], samples)


def log_mean_exp(log_w: Float[Array, " S"]) -> Float[Array, ""]:
    """log 1/S sum_s w_s, the IWAE bound (Burda et al., 2015)."""
    return jax.nn.logsumexp(log_w) - jnp.log(len(log_w))


def nearest(origin: Float[Array, " D"], means: Float[Array, "N D"], count: int) -> Int[Array, " C"]:
    """Return the indices of the `count` exemplars nearest to `origin`."""
    return lax.top_k(-jnp.sum(jnp.square(means - origin), axis=-1), count)[1]


def audit(
    key: Array, samples: Samples, everything: Components, chosen: Int[Array, " C"], shape: tuple[int, int]
) -> Float[Array, "2 A"]:
    """Compute the density of all other exemplars relative to the chosen ones, at samples drawn by their weights.

    Let w_s be the normalised weights with the chosen exemplars. Then sum_s w_s all_s / chosen_s = exp(exact - pruned),
    and the mean of the result is an unbiased estimate of this minus one. The other exemplars are summed separately, so
    that rounding neither hides a small loss nor makes it negative.

    Args:
      shape: shape of the result.
    """
    pick = jax.random.choice(key, len(samples.log_w), shape, p=jax.nn.softmax(samples.log_w)).reshape(-1)
    others = jnp.arange(len(everything.means)).at[chosen].set(NOBODY)
    log_others = exemplar_log_prob(
        samples.z[pick], everything.means, everything.log_var, count=everything.count, exemplar_index=others
    )
    return jnp.exp(log_others - samples.log_pz[pick]).reshape(shape)
