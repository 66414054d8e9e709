"""The choice of a step's exemplars, for every search.

none   all M drawn exemplars                         on the host, in `choose_on_host`
scann  the K nearest of each image, from an index    on the host, in `choose_on_host`
exact  the K nearest of each image, from the table   in the compiled step, in `choose`

A chosen exemplar occupies a slot, and each slot belongs to a device.

Differs from the paper: neighbours are the K nearest *among the drawn* exemplars, as in the authors' code. Algorithm 1
takes the K nearest of all exemplars and keeps those that are drawn. There may be none.
Differs from the authors' code: the image itself is removed before the K nearest are selected. There, it is one of the K
and is masked afterwards.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from exvae.arrays import Array, Record
from exvae.retrieval import NOBODY, exact
from exvae.retrieval.draw import Draw
from exvae.scale import sharding


class Slots(Record):
    """The exemplars of a step, and which of them each image may see."""

    index: Int[Array, " U"]  # index of the exemplar in each slot; NOBODY marks an empty slot
    count: Int[Array, " B"] | int  # number of mixture components, for each image
    leave_out: Int[Array, " B"] | None  # index of each image itself; None without leave-one-out
    neighbours: Int[Array, "B K"] | None  # indices of the only exemplars that each image may see; None: all

    def repeat(self, times: int) -> Slots:
        """Repeat the row of each image `times` times, once for each of its codes."""

        def each(leaf: Any) -> Any:
            return jnp.repeat(leaf, times, axis=0) if isinstance(leaf, jax.Array) else leaf

        return Slots(self.index, each(self.count), each(self.leave_out), each(self.neighbours))


@runtime_checkable
class Lookup(Protocol):
    """A search on the host, for example in an index of the table (`exvae/retrieval/index.py`)."""

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Find candidates for each of these table rows, nearest first; NOBODY if there are fewer."""
        ...


def choose_on_host(
    config: ConfigDict, draw: Draw, index: Int[np.ndarray, " B"], lookup: Lookup | None
) -> Int[np.ndarray, " U"] | None:
    """Choose the slots on the host. Return None if the compiled step chooses them.

    Args:
      index: indices of the batch's images.
      lookup: the search of the host; None if it has none.
    """
    if config.retrieval.search == "none":
        return draw.members()
    if lookup is None:
        return None
    leave_out = index if config.prior.leave_one_out else None
    candidates = lookup.search(index)
    check_candidates(candidates, num_queries=len(index), num_train=draw.num_train)
    return cut(candidates, config.retrieval.num_neighbours, draw=draw, leave_out=leave_out).reshape(-1)


def check_candidates(candidates: np.ndarray, *, num_queries: int, num_train: int) -> None:
    """Check what a `Lookup` returned.

    Raises:
      AssertionError: names what is wrong.
    """
    what = "the search gave candidates"
    shape, dtype = np.shape(candidates), np.result_type(candidates)
    message = f"{what} of shape {shape}, it must be ({num_queries}, number of candidates)"
    chex.assert_shape(candidates, (num_queries, None), custom_message=message)
    chex.assert_type(candidates, int, custom_message=f"{what} of dtype {dtype}, it must be an integer")
    low, high = np.min(candidates, initial=NOBODY), np.max(candidates, initial=NOBODY)
    if low < NOBODY or high >= num_train:
        raise AssertionError(f"{what} from {low} to {high}, they must lie in {NOBODY}..{num_train - 1}")


def nearest(
    config: ConfigDict,
    mesh: Mesh,
    draw: Draw,
    index: Int[Array, " B"],
    *,
    queries: Float[Array, "B D"],
    table: Float[Array, "R D"],
) -> Int[Array, " U"]:
    """Choose K slots for each image: the table rows nearest to its latent mean (search = exact)."""
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
    """Choose the exemplars that each image of the batch may see: O1, O2 and O3 of the paper.

    Differs from the paper: with retrieval.scored = union (the default) an image sees the neighbours of the whole batch,
    as in the authors' code, and not only its own K. This gives a tighter bound for the same work.
    Differs from the paper: the images of a batch share one draw of M exemplars, as in the authors' code. In the
    paper, each image has its own draw from the other N - 1 images. Here, a drawn image sees the M - 1 others and
    divides by M - 1.

    Args:
      index: indices of the batch's images.
      chosen: the result of `choose_on_host`.
      queries: the images' latent means.
    """
    if chosen is None:
        assert table is not None, "search = exact needs the table of latent means"
        chosen = nearest(config, mesh, draw, index, queries=queries, table=table)
    neighbours = None
    if config.retrieval.search != "none":  # O3, Eq. (12)
        if config.retrieval.scored == "own":
            neighbours = chosen.reshape(len(index), -1)
        chosen = each_once(chosen)
    if not config.prior.leave_one_out:
        return Slots(chosen, draw.num_exemplars, None, neighbours)
    return Slots(chosen, draw.num_exemplars - _contains(mesh, draw, index), index, neighbours)  # O1, Eq. (10)


def num_candidates(k: int, num_exemplars: int, num_train: int) -> int:
    """Return the number C of neighbours to search for, so that K remain without the query and undrawn exemplars.

    On average C M / N of them are drawn. Three standard deviations below this mean there are still K + 1, and at
    least 11: for small K the normal approximation is poor, and an image without neighbours would have a prior of zero.
    """
    p, wanted = num_exemplars / num_train, max(k, 10) + 1
    root = (3 * math.sqrt(1 - p) + math.sqrt(9 * (1 - p) + 4 * wanted)) / 2  # of C p - 3 sqrt(C p (1-p)) = wanted
    return min(num_train, math.ceil(root**2 / p))


def cut(
    candidates: Int[np.ndarray, "B C"], k: int, *, draw: Draw, leave_out: Int[np.ndarray, " B"] | None
) -> Int[np.ndarray, "B K"]:
    """Keep the first k candidates of each row that are drawn and not the image itself; NOBODY if there are fewer."""
    valid = (candidates != NOBODY) & draw.contains(np.maximum(candidates, 0))
    if leave_out is not None:
        valid &= candidates != leave_out[:, None]
    first = np.argsort(~valid, axis=1, kind="stable")[:, :k]  # nearest first, invalid last
    return np.take_along_axis(np.where(valid, candidates, NOBODY), first, axis=1)


def each_once(slots: Int[Array, " U"]) -> Int[Array, " U"]:
    """Replace duplicates by NOBODY, so that each exemplar is in one slot. The others stay in their slots."""
    order = jnp.argsort(slots, stable=True)
    ascending = slots[order]
    again = jnp.append(False, ascending[1:] == ascending[:-1])
    return slots.at[order].set(jnp.where(again, NOBODY, ascending))


def _contains(mesh: Mesh, draw: Draw, index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Return whether each image is drawn.

    Each device computes this for its own images. Otherwise the loop in `contains` would exchange data between devices
    in each iteration.
    """

    def local(keys: Array, index: Array) -> jax.Array | np.ndarray:
        return draw.replace(keys=keys).contains(index)

    return sharding.per_device(mesh, local, (sharding.WHOLE, sharding.PART), sharding.PART)(draw.keys, index)
