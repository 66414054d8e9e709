"""From candidates to the exemplars of a step, and back into the table of latent means."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from exvae.retrieval import NOBODY
from exvae.retrieval.draw import Draw
from exvae.scale import sharding


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
    """The same exemplars, each in one slot; NOBODY in the slots of duplicates. None moves: a slot has its device."""
    order = jnp.argsort(slots, stable=True)
    ascending = slots[order]
    again = jnp.append(False, ascending[1:] == ascending[:-1])
    return slots.at[order].set(jnp.where(again, NOBODY, ascending))


def update(
    mesh: Mesh, table: Float[Array, "R D"], index: Int[Array, " U"], means: Float[Array, "U D"]
) -> Float[Array, "R D"]:
    """Write means into rows `index` of the table, on the device that has the row; slots with NOBODY are dropped."""

    def local(table, index, means):
        row = index - lax.axis_index(sharding.AXIS) * len(table)
        here = (index != NOBODY) & (row >= 0) & (row < len(table))
        return table.at[jnp.where(here, row, len(table))].set(means, mode="drop")

    whole, part = sharding.WHOLE, sharding.PART
    return sharding.per_device(mesh, local, (part, whole, whole), part)(table, index, means)
