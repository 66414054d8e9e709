"""The exemplar prior: which exemplars a code may see in training, and all of them afterwards."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from exvae.distributions import Normal
from exvae.encoding import encode_split
from exvae.models import Terms
from exvae.priors.parzen import exemplar_log_prob
from exvae.priors.types import Batch, Means
from exvae.retrieval import NOBODY, exact, select
from exvae.retrieval.draw import Draw
from exvae.scale import sharding

USES_EXEMPLARS = True


def init(key: Array, config: Any, image_shape: tuple[int, int, int]) -> dict:
    """log sigma^2 ~ N(0, 1)."""
    del config, image_shape
    return {"log_var": jax.random.normal(key, ())}


def find_slots(
    config: Any, mesh: Mesh, batch: Batch, queries: Float[Array, "B D"], table: Float[Array, "R D"]
) -> Int[Array, " U"]:
    """search = exact: the K nearest in the table of means, one slot for each of each image's."""
    leave_out = batch.index if config.prior.leave_one_out else None
    k = config.retrieval.num_neighbours
    return exact.nearest(mesh, queries, table, k, draw=batch.draw, leave_out=leave_out).reshape(-1)


def _contains(mesh: Mesh, draw: Draw, index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether images are drawn, each asked for on its own device: the question is a loop, and no loop should talk."""
    local = lambda keys, index: draw.replace(keys=keys).contains(index)  # noqa: E731
    return sharding.per_device(mesh, local, (sharding.WHOLE, sharding.PART), sharding.PART)(draw.keys, index)


def training_log_prob(
    config: Any, model: nn.Module, mesh: Mesh, params: dict, batch: Batch, terms: Terms, table: Array | None
) -> tuple[Float[Array, " B"], list[Means]]:
    """Eq. (10), (11) or (12): all drawn exemplars, or the union of the batch's K nearest among them.

    Differs from the paper: with retrieval.scored = union (the default) a code sees all neighbours of the batch, as in
    the authors' code, and not only its own K: a tighter bound for the same work.
    Differs from the paper: one draw of M serves the whole batch (as in the authors' code), instead of a draw from the
    other N - 1 for each image; an image that is in the draw itself sees, and divides by, the M - 1 others.
    """
    draw, slots, neighbours = batch.draw, batch.slots, None  # O2, Eq. (11)
    samples = len(terms.z) // len(batch.index)  # of each image, one after another
    each = functools.partial(jnp.repeat, repeats=samples, axis=0)
    batch_means = terms.q.mean[::samples]
    if slots is None:
        slots = find_slots(config, mesh, batch, jax.lax.stop_gradient(batch_means), table)
    if config.retrieval.search != "none":
        if config.retrieval.scored == "own":
            neighbours = each(slots.reshape(len(batch.index), -1))
        slots = select.each_once(slots)  # O3, Eq. (12), with Eq. (9) for why it is a bound
    activation_bytes = config.prior.activation_mib * 2**20
    means = encode_split(mesh, model, params, *batch.exemplars(slots), activation_bytes=activation_bytes)
    leave_out, count = None, draw.num_exemplars
    if config.prior.leave_one_out:  # O1, Eq. (10)
        leave_out, count = each(batch.index), count - each(_contains(mesh, draw, batch.index))
    log_pz = exemplar_log_prob(
        terms.z,
        means,
        params["prior"]["log_var"],
        count=count,
        exemplar_index=slots,
        leave_out=leave_out,
        neighbours=neighbours,
        mesh=mesh,
    )
    # Algorithm 1: the batch's own means (of images as they come: binarized, with the batch's statistics), then the
    # exemplars', which may name the same rows. The table only serves the search.
    return log_pz, [Means(batch.index, batch_means), Means(slots, means)]


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


def components(model: nn.Module, params: dict, means: Float[Array, "N D"], count: int | None = None) -> Components:
    """The whole mixture; rows of `means` from the `count`th on are padding."""
    del model
    return Components(means, params["prior"]["log_var"], len(means) if count is None else count)


def log_prob(mixture: Components, z: Float[Array, "B D"], mesh: Mesh | None = None) -> Float[Array, " B"]:
    """Eq. (8) over all of the means, with no regularizer; over a mesh each device takes a part of them."""
    row = jnp.arange(len(mixture.means))
    index = jnp.where(row < mixture.count, row, NOBODY)
    return exemplar_log_prob(z, mixture.means, mixture.log_var, count=mixture.count, exemplar_index=index, mesh=mesh)


def transition(params: dict, q: Normal) -> Normal:
    """r(z|x) = N(z | mu(x), sigma^2 I), Eq. (7)."""
    return q._replace(log_var=jnp.broadcast_to(params["prior"]["log_var"], q.mean.shape))


sample = None  # p(z|X) is drawn from by drawing an exemplar and then from its transition
