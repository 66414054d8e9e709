"""Exact nearest neighbours in the table of latent means, inside the jitted step."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from exvae.priors import NOBODY

BLOCK = 16384  # table rows scored at a time
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
) -> Int[Array, "B K"]:
    """The k allowed rows of the table nearest to each query, without the row `leave_out`; NOBODY where there are fewer.

    ||q - c||^2 / 2 - ||q||^2 / 2 = ||c||^2 / 2 - q.c orders the rows as the distance does; the half norm rides along as
    one more column of the matrix product. Streams over blocks of the table.
    """
    rows = table.shape[0]
    block = min(BLOCK, -(-max(rows, k) // SEGMENT) * SEGMENT)
    pad = -rows % block
    half_norms = jnp.where(allowed, 0.5 * jnp.sum(jnp.square(table), -1), jnp.inf)
    half_norms = jnp.pad(half_norms, (0, pad), constant_values=jnp.inf)
    table = jnp.concatenate([jnp.pad(table, ((0, pad), (0, 0))), half_norms[:, None]], axis=-1)
    queries = jnp.concatenate([-queries, jnp.ones_like(queries[:, :1])], axis=-1)

    def search_block(args):
        start, rows_of_block = args
        scores = jnp.matmul(queries, rows_of_block.T, precision=lax.Precision.HIGHEST)  # (B, BLOCK)
        if leave_out is not None:
            own = leave_out - start  # outside 0..BLOCK for queries of another block: dropped
            own = jnp.where(own < 0, block, own)
            scores = scores.at[jnp.arange(len(own)), own].set(jnp.inf, mode="drop")
        values, position = smallest_k(scores, k)
        return values, position + start

    starts = jnp.arange(0, rows + pad, block)
    values, position = lax.map(search_block, (starts, table.reshape(len(starts), block, -1)))
    values = jnp.moveaxis(values, 0, 1).reshape(len(queries), -1)
    position = jnp.moveaxis(position, 0, 1).reshape(len(queries), -1)
    value, best = lax.top_k(-values, k)
    return jnp.where(jnp.isneginf(value), NOBODY, jnp.take_along_axis(position, best, axis=1))
