"""The exemplar prior: which exemplars a code may see in training, and all of them afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from exvae.distributions import Normal
from exvae.models import Terms
from exvae.models.encoding import encode_means
from exvae.priors.parzen import exemplar_log_prob
from exvae.priors.types import Batch, Means
from exvae.retrieval import exact, select
from exvae.retrieval.draw import draw_exemplars

USES_EXEMPLARS = True


def init(key: Array, config: Any, image_shape: tuple[int, int, int]) -> dict:
    """log sigma^2 ~ N(0, 1)."""
    del config, image_shape
    return {"log_var": jax.random.normal(key, ())}


def training_log_prob(
    key: Array, config: Any, model: nn.Module, params: dict, batch: Batch, terms: Terms, table: Array | None
) -> tuple[Float[Array, " B"], list[Means]]:
    """Eq. (10), (11) or (12): all drawn exemplars, or the union of the batch's K nearest among them.

    Differs from the paper: with retrieval.scored = union (the default) a code sees all neighbours of the batch, as in
    the authors' code, and not only its own K: a tighter bound for the same work.
    Differs from the paper: one draw of M serves the whole batch (as in the authors' code), instead of a draw from the
    other N - 1 for each image; an image that is in the draw itself sees, and divides by, the M - 1 others.
    """
    num_train, num_exemplars = len(batch.images), config.prior.num_exemplars
    leave_out = batch.index if config.prior.leave_one_out else None  # O1, Eq. (10)
    drawn = draw_exemplars(key, num_train, num_exemplars)  # O2, Eq. (11)
    neighbours = None
    if config.retrieval.search == "none":
        index = jnp.nonzero(drawn, size=num_exemplars)[0]
    else:
        k = config.retrieval.num_neighbours
        if config.retrieval.search == "exact":
            queries = jax.lax.stop_gradient(terms.q.mean)
            nearest = exact.nearest(queries, table, k, allowed=drawn, leave_out=leave_out, num_allowed=num_exemplars)
        else:
            nearest = select.cut(batch.candidates, k, allowed=drawn, leave_out=leave_out)
        index = select.union(nearest)  # O3, Eq. (12), with Eq. (9) for why it is a bound
        neighbours = nearest if config.retrieval.scored == "own" else None
    means = encode_means(model, params, batch.images, index, activation_bytes=config.prior.activation_mib * 2**20)
    log_pz = exemplar_log_prob(
        terms.z,
        means,
        params["prior"]["log_var"],
        count=num_exemplars - (drawn[batch.index] if config.prior.leave_one_out else 0.0),
        exemplar_index=index,
        leave_out=leave_out,
        neighbours=neighbours,
    )
    # Algorithm 1: the batch's own means (of images as they come: binarized, with the batch's statistics), then the
    # exemplars', which may name the same rows. The table only serves the search.
    return log_pz, [Means(batch.index, terms.q.mean), Means(index, means)]


class Components(NamedTuple):
    """The mixture of Eq. (8), or some of its components: `count` stays the number of all."""

    means: Float[Array, "N D"]
    log_var: Float[Array, ""]  # log sigma^2
    count: int

    def at(self, index: Int[Array, " C"] | None) -> Components:
        """Only the components of these exemplars; None: all."""
        return self if index is None else self._replace(means=self.means[index])

    def centred(self, origin: Float[Array, " D"]) -> Components:
        """The same mixture as seen from `origin`: distances of codes near it are then sums of small squares."""
        return self._replace(means=self.means - origin)


def components(model: nn.Module, params: dict, means: Float[Array, "N D"]) -> Components:
    del model
    return Components(means, params["prior"]["log_var"], len(means))


def log_prob(mixture: Components, z: Float[Array, "B D"]) -> Float[Array, " B"]:
    """Eq. (8) over all of the means, with no regularizer."""
    return exemplar_log_prob(z, mixture.means, mixture.log_var, count=mixture.count)


def transition(params: dict, q: Normal) -> Normal:
    """r(z|x) = N(z | mu(x), sigma^2 I), Eq. (7)."""
    return q._replace(log_var=jnp.broadcast_to(params["prior"]["log_var"], q.mean.shape))


sample = None  # p(z|X) is drawn from by drawing an exemplar and then from its transition
