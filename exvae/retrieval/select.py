"""From candidates to the exemplars of a step, and back into the table of latent means."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from exvae.retrieval import NOBODY


def cut(
    candidates: Int[Array, "B C"], k: int, *, allowed: Bool[Array, " N"], leave_out: Int[Array, " B"] | None
) -> Int[Array, "B K"]:
    """The first k candidates of each row that are allowed and not the row's own image; NOBODY where there are fewer."""
    valid = (candidates != NOBODY) & allowed[candidates]
    if leave_out is not None:
        valid &= candidates != leave_out[:, None]
    order = jnp.where(valid, -jnp.arange(candidates.shape[1]), -candidates.shape[1])  # nearest first, invalid last
    value, first = lax.top_k(order, k)
    return jnp.where(value == -candidates.shape[1], NOBODY, jnp.take_along_axis(candidates, first, axis=1))


def union(neighbours: Int[Array, "B K"]) -> Int[Array, " U"]:
    """All neighbours of the batch in B * K slots, ascending, each once; NOBODY in the slots of duplicates."""
    index = jnp.sort(neighbours.reshape(-1))
    return jnp.where(index == jnp.roll(index, 1).at[0].set(NOBODY), NOBODY, index)


def update(table: Float[Array, "N D"], index: Int[Array, " U"], means: Float[Array, "U D"]) -> Float[Array, "N D"]:
    """Write means into rows `index` of the table; slots with NOBODY are dropped."""
    return table.at[jnp.where(index == NOBODY, len(table), index)].set(means, mode="drop")
