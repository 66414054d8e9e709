"""Exact nearest neighbours in the table of latent means, inside the jitted step."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from exvae.retrieval import NOBODY

BLOCK = 25_600  # table rows scored at a time
FAR = 1e30  # score of an empty slot; finite, because accelerators split the factors of an exact product: inf - inf
SEGMENT = 32  # values whose minimum stands for them in the first stage of top-k


def smallest_k(values: Float[Array, "B N"], k: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The k smallest values of each row, ascending, and where they stand. N must be a multiple of SEGMENT.

    Exact in two stages: the k smallest lie in the (at most) k segments with the smallest minima. A segment takes every
    (N / SEGMENT)-th value, so that the minima are taken across rows of SIMD lanes.
    """
    batch, n = values.shape
    columns = n // SEGMENT
    minima = jnp.min(values.reshape(batch, SEGMENT, columns), axis=1)
    _, column = lax.top_k(-minima, min(k, columns))  # (B, k)
    position = column[:, None, :] + columns * jnp.arange(SEGMENT)[None, :, None]
    position = position.reshape(batch, -1)  # (B, SEGMENT * k)
    value, best = lax.top_k(-jnp.take_along_axis(values, position, axis=1), k)
    return -value, jnp.take_along_axis(position, best, axis=1)


def nearest(
    queries: Float[Array, "B D"],
    table: Float[Array, "N D"],
    k: int,
    *,
    allowed: Bool[Array, " N"],
    leave_out: Int[Array, " B"] | None,
    num_allowed: int | None = None,
) -> Int[Array, "B K"]:
    """The k allowed rows of the table nearest to each query, without the row `leave_out`; NOBODY where there are fewer.

    ||q - c||^2 / 2 - ||q||^2 / 2 = ||c||^2 / 2 - q.c orders the rows as the distance does; the half norm rides along as
    one more column of the matrix product. Streams over blocks of the table.

    Args:
      num_allowed: how many rows are allowed, if that is known: the others are then not even scored.
    """
    rows, block = _blocks(jnp.nonzero(allowed, size=num_allowed or len(table), fill_value=NOBODY)[0], k + 1)
    found = table[rows]
    half_norms = jnp.where(rows == NOBODY, FAR, 0.5 * jnp.sum(jnp.square(found), -1))
    found = jnp.concatenate([found, half_norms[:, None]], axis=-1)
    queries = jnp.concatenate([-queries, jnp.ones_like(queries[:, :1])], axis=-1)

    def search_block(args):
        block_table, block_rows = args
        scores = jnp.matmul(queries, block_table.T, precision=lax.Precision.HIGHEST)  # (B, block)
        values, position = smallest_k(scores, k + 1)  # one more, should the query itself be among them
        return values, block_rows[position]

    blocks = (found.reshape(-1, block, found.shape[1]), rows.reshape(-1, block))
    values, rows = (jnp.moveaxis(x, 0, 1).reshape(len(queries), -1) for x in lax.map(search_block, blocks))
    if leave_out is not None:
        values = jnp.where(rows == leave_out[:, None], FAR, values)
    value, best = lax.top_k(-values, k)
    return jnp.where(-value > 0.5 * FAR, NOBODY, jnp.take_along_axis(rows, best, axis=1))


def _blocks(rows: Int[Array, " M"], least: int) -> tuple[Int[Array, " P"], int]:
    """Row numbers padded with NOBODY to whole blocks of equal size, and that size: a multiple of SEGMENT."""
    num_blocks = -(-len(rows) // BLOCK)
    size = max(-(-len(rows) // num_blocks), least)
    size = -(-size // SEGMENT) * SEGMENT
    return jnp.pad(rows, (0, num_blocks * size - len(rows)), constant_values=NOBODY), size
