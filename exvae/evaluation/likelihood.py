"""log p(x) of an image by importance sampling (IWAE), over all exemplars or over the nearest ones with an audit."""

from __future__ import annotations

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
from exvae.once import for_equal_configs
from exvae.priors import PRIORS
from exvae.priors.exemplar import Components
from exvae.priors.parzen import exemplar_log_prob
from exvae.retrieval import NOBODY
from exvae.scale import sharding


class Scores(NamedTuple):
    """What importance sampling says of a batch of images."""

    log_likelihood: Float[Array, " B"]  # IWAE; a lower bound of its own exact value where exemplars were left out
    excess: Float[Array, " B"]  # audit: estimate of exact - pruned; decides whether candidates are doubled
    loss: Float[Array, " B"]  # the same from draws that decided nothing, so that choosing does not bias it: to report


@for_equal_configs
def make_scorer(config: ConfigDict, model: nn.Module, mesh: Mesh, *, candidates: int | None):
    """The compiled function (params, components, key, images, index) -> Scores.

    One image per device at a time: its S samples are batch enough, and the result cannot depend on its neighbours.

    Args:
      candidates: how many exemplars count, nearest to the posterior mean first; None: all. Ignored by other priors.
    """
    prior = PRIORS[config.prior.name]

    @jax.default_matmul_precision("highest")  # an accelerator would round the factors of the networks' products
    def score(params, components, key, images: UInt8[Array, "1 H W C"], index: Int[Array, " 1"]) -> Scores:
        key_samples, key_audit = jax.random.split(jax.random.fold_in(key, index[0]))
        seen = models.apply(model, params, to_unit(images), method="observe")
        if not prior.USES_EXEMPLARS:
            samples = draw_samples(key_samples, config, model, params, seen, lambda z: prior.log_prob(components, z))
            return Scores(log_mean_exp(samples.log_w)[None], jnp.zeros(1), jnp.zeros(1))
        origin = seen.q.mean[0]
        chosen = None
        if candidates is not None and candidates < len(components.means):
            chosen = nearest(origin, components.means, candidates)
        counted = components.at(chosen).centred(origin)
        samples = draw_samples(key_samples, config, model, params, seen, lambda z: prior.log_prob(counted, z - origin))
        excess = jnp.zeros(2)
        if chosen is not None:
            added = audit(key_audit, samples, components, chosen, (2, config.eval.audit))
            excess = jnp.log1p(jnp.mean(added, axis=-1))  # nats
        return Scores(log_mean_exp(samples.log_w)[None], excess[:1], excess[1:])

    return jax.jit(sharding.over_images(mesh, score))


class Samples(NamedTuple):
    """S draws of the latents of one image."""

    z: Float[Array, "S D"]
    log_pz: Float[Array, " S"]  # under the exemplars that count
    log_w: Float[Array, " S"]  # log importance weight


def draw_samples(key: Array, config: Any, model: nn.Module, params: dict, seen: Observed, log_prob: Any) -> Samples:
    """z_s ~ q(z|x) and log w_s = log p(x, z_s) - log q(z_s|x), in blocks whose activations stay in the cache."""
    num_samples = config.eval.iwae_samples
    num_blocks = -(-num_samples // model.block_rows)
    block = -(-num_samples // num_blocks)
    copies = seen.repeat(block)

    def draw_block(key: Array) -> Samples:
        terms = models.apply(model, params, key, copies, method="draw")
        log_pz = log_prob(terms.z)
        return Samples(terms.z, log_pz, terms.log_px + terms.log_ratio - terms.log_q + log_pz)

    samples = lax.map(draw_block, jax.random.split(key, num_blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_samples], samples)


def log_mean_exp(log_w: Float[Array, " S"]) -> Float[Array, ""]:
    """log 1/S sum_s w_s, the IWAE bound (Burda et al., 2015)."""
    return jax.nn.logsumexp(log_w) - jnp.log(len(log_w))


def nearest(origin: Float[Array, " D"], means: Float[Array, "N D"], count: int) -> Int[Array, " C"]:
    """The exemplars nearest to `origin`."""
    return lax.top_k(-jnp.sum(jnp.square(means - origin), axis=-1), count)[1]


def audit(
    key: Array, samples: Samples, everything: Components, chosen: Int[Array, " C"], shape: tuple[int, int]
) -> Float[Array, "2 A"]:
    """What all other exemplars add to samples drawn in proportion to their weight, relative to what was counted.

    With w_s the normalised weights under the chosen exemplars, sum_s w_s (all_s / chosen_s) = exp(exact - pruned): the
    mean over draws from w is an unbiased estimate of that less one. The terms that were left out are summed by
    themselves, so that the smallest loss is not rounded away and none is negative.
    """
    pick = jax.random.choice(key, len(samples.log_w), shape, p=jax.nn.softmax(samples.log_w)).reshape(-1)
    others = jnp.arange(len(everything.means)).at[chosen].set(NOBODY)
    log_others = exemplar_log_prob(
        samples.z[pick], everything.means, everything.log_var, count=everything.count, exemplar_index=others
    )
    return jnp.exp(log_others - samples.log_pz[pick]).reshape(shape)
