"""The exemplars of a step: the one place that chooses them, for every search.

none   all M drawn ones                              on the host, in `choose_on_host`
scann  the K nearest of each image, from an index    on the host, in `choose_on_host`
exact  the K nearest of each image, from the table   in the compiled step, in `choose`

Each exemplar has a slot, and each slot a device.

Differs from the paper: the K nearest *among the drawn* (as in the authors' code), where Algorithm 1 takes the K nearest
and then those of them that are drawn, which may be none.
Differs from the authors' code: the image itself is removed before the K nearest are taken. There it takes one of the K
places and is masked afterwards.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from exvae.retrieval import NOBODY, exact
from exvae.retrieval.draw import Draw
from exvae.scale import sharding


class Slots(NamedTuple):
    """The exemplars of a step, and which of them each image may see."""

    index: Int[Array, " U"]  # number of the exemplar in each slot; NOBODY: the slot is empty
    count: Int[Array, " B"] | int  # number of components that the prior of each image is divided by
    leave_out: Int[Array, " B"] | None  # numbers of the images themselves; None without leave-one-out
    neighbours: Int[Array, "B K"] | None  # the only exemplars that each image sees; None: it sees all

    def repeat(self, times: int) -> Slots:
        """A row for each of several codes of an image, one after another."""
        each = lambda leaf: jnp.repeat(leaf, times, axis=0) if isinstance(leaf, jax.Array) else leaf  # noqa: E731
        return Slots(self.index, each(self.count), each(self.leave_out), each(self.neighbours))


class Lookup(Protocol):
    """What a search on the host offers: an index of the table (`exvae/retrieval/index.py`)."""

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Candidates for each of these rows of the table, nearest first; NOBODY where there are fewer."""
        ...


def choose_on_host(
    config: ConfigDict, draw: Draw, index: Int[np.ndarray, " B"], lookup: Lookup | None
) -> Int[np.ndarray, " U"] | None:
    """The slots that the host can choose before the step; None: the step chooses them itself.

    Args:
      index: numbers of the batch's images.
    """
    if config.retrieval.search == "none":
        return draw.members()
    if lookup is None:
        return None
    leave_out = index if config.prior.leave_one_out else None
    return cut(lookup.search(index), config.retrieval.num_neighbours, draw=draw, leave_out=leave_out).reshape(-1)


def nearest(
    config: ConfigDict,
    mesh: Mesh,
    draw: Draw,
    index: Int[Array, " B"],
    *,
    queries: Float[Array, "B D"],
    table: Float[Array, "R D"],
) -> Int[Array, " U"]:
    """search = exact: K slots for each image, of the rows of the table that are nearest to its mean."""
    leave_out = index if config.prior.leave_one_out else None
    k = config.retrieval.num_neighbours
    return exact.nearest(mesh, jax.lax.stop_gradient(queries), table, k, draw=draw, leave_out=leave_out).reshape(-1)


def choose(
    config: ConfigDict,
    mesh: Mesh,
    draw: Draw,
    index: Int[Array, " B"],
    *,
    chosen: Int[Array, " U"] | None,
    queries: Float[Array, "B D"],
    table: Float[Array, "R D"] | None,
) -> Slots:
    """What each image of the batch sees: O1, O2 and O3 of the paper.

    Args:
      index: numbers of the batch's images.
      chosen: what `choose_on_host` chose.
      queries: the images' latent means.

    Differs from the paper: with retrieval.scored = union (the default) an image sees the neighbours of the whole batch,
    as in the authors' code, and not only its own K: a tighter bound for the same work.
    Differs from the paper: one draw of M serves the whole batch (as in the authors' code), instead of a draw from the
    other N - 1 for each image. An image that is in the draw sees, and is divided by, the M - 1 others.
    """
    if chosen is None:
        chosen = nearest(config, mesh, draw, index, queries=queries, table=table)
    neighbours = None
    if config.retrieval.search != "none":  # O3, Eq. (12)
        if config.retrieval.scored == "own":
            neighbours = chosen.reshape(len(index), -1)
        chosen = each_once(chosen)
    if not config.prior.leave_one_out:
        return Slots(chosen, draw.num_exemplars, None, neighbours)
    return Slots(chosen, draw.num_exemplars - _contains(mesh, draw, index), index, neighbours)  # O1, Eq. (10)


def cut(
    candidates: Int[np.ndarray, "B C"], k: int, *, draw: Draw, leave_out: Int[np.ndarray, " B"] | None
) -> Int[np.ndarray, "B K"]:
    """The first k candidates of each row that are drawn and not the row's own image; NOBODY where there are fewer."""
    valid = (candidates != NOBODY) & draw.contains(np.maximum(candidates, 0))
    if leave_out is not None:
        valid &= candidates != leave_out[:, None]
    first = np.argsort(~valid, axis=1, kind="stable")[:, :k]  # nearest first, invalid last
    return np.take_along_axis(np.where(valid, candidates, NOBODY), first, axis=1)


def each_once(slots: Int[Array, " U"]) -> Int[Array, " U"]:
    """The same exemplars, each in one slot, with NOBODY in place of duplicates. No exemplar changes its slot."""
    order = jnp.argsort(slots, stable=True)
    ascending = slots[order]
    again = jnp.append(False, ascending[1:] == ascending[:-1])
    return slots.at[order].set(jnp.where(again, NOBODY, ascending))


def _contains(mesh: Mesh, draw: Draw, index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether images are drawn. Each device answers for its own images: the answer is a loop, and a loop over arrays
    that are split would make the devices exchange data in every round."""
    local = lambda keys, index: draw.replace(keys=keys).contains(index)  # noqa: E731
    return sharding.per_device(mesh, local, (sharding.WHOLE, sharding.PART), sharding.PART)(draw.keys, index)
