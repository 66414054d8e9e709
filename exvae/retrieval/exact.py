"""Exact nearest neighbours in the table of latent means, inside the compiled step.

Differs from the paper: it searches approximately. This search is exact, as in the authors' code.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int

from exvae.arrays import Array
from exvae.retrieval import NOBODY
from exvae.retrieval.draw import Draw
from exvae.scale import sharding

BLOCK = 25_600  # largest number of table rows scored at a time
CPU_SCORES = 640_000  # pairs that a CPU scores at a time: the scores fit into a core's cache
FAR = 1e30  # score of an empty slot. Not inf: accelerators split factors into parts, which would give inf - inf
SEGMENT = 32  # number of values in a segment of `smallest_k`


def smallest_k(values: Float[Array, "B N"], k: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the k smallest values of each row in ascending order, and their places. N must be a multiple of SEGMENT.

    The result is exact. The search has two stages: the k smallest values are in the k segments with the smallest
    minima. A segment consists of every (N / SEGMENT)-th value, which suits SIMD instructions.
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
    mesh: Mesh,
    queries: Float[Array, "B D"],
    table: Float[Array, "R D"],
    k: int,
    *,
    draw: Draw,
    leave_out: Int[Array, " B"] | None,
) -> Int[Array, "B K"]:
    """Find the k drawn table rows nearest to each query, without the row `leave_out`; NOBODY if there are fewer.

    Each device searches its own rows. Then the candidates of all devices are merged.
    """
    bound = _most_drawn(draw, len(table) // mesh.size)

    def local(queries: Array, table: Array, draw_keys: Array, leave_out: Array | None) -> Array:
        rows = lax.axis_index(sharding.AXIS) * len(table) + jnp.arange(len(table))
        real = jnp.minimum(rows, draw.num_train - 1)  # `contains` may not terminate for padding
        allowed = draw.replace(keys=draw_keys).contains(real) & (rows < draw.num_train)
        rows = jnp.nonzero(allowed, size=bound, fill_value=NOBODY)[0]
        values, found = nearest_of(queries, table, rows, k + 1)  # one more, because the query itself may be among them
        found = jnp.where(found == NOBODY, NOBODY, found + lax.axis_index(sharding.AXIS) * len(table))
        values, found = (lax.all_gather(x, sharding.AXIS, axis=1, tiled=True) for x in (values, found))
        # Differs from the authors' code: the query is removed before the top-k. There it takes one of the K places.
        if leave_out is not None:
            values = jnp.where(found == leave_out[:, None], FAR, values)
        return best_of(values, found, k)

    whole, part = sharding.WHOLE, sharding.PART
    search = sharding.per_device(mesh, local, (whole, part, whole, whole), whole)
    return search(queries, table, draw.keys, leave_out)


def _most_drawn(draw: Draw, num_rows: int) -> int:
    """Return an upper bound on the number of drawn rows of a device. On a single device it is M.

    On several devices the number is hypergeometric. Let s be the device's share of the N rows. By Hoeffding's
    inequality, less than one in 10^15 draws exceeds M s + sqrt(18 M). Rows beyond the bound would not be found, and the
    objective would still be a lower bound.
    """
    m = draw.num_exemplars
    share = min(1.0, num_rows / draw.num_train)
    spread = 0.0 if num_rows >= draw.num_train else math.sqrt(18 * m)
    return min(num_rows, m, math.ceil(m * share + spread))


def best_of(values: Float[Array, "B C"], rows: Int[Array, "B C"], k: int) -> Int[Array, "B K"]:
    """Return the k rows with the smallest scores in ascending order; NOBODY if there are fewer."""
    value, best = lax.top_k(-values, k)
    return jnp.where(-value > 0.5 * FAR, NOBODY, jnp.take_along_axis(rows, best, axis=1))


def nearest_of(
    queries: Float[Array, "B D"], table: Float[Array, "R D"], rows: Int[Array, " M"], k: int
) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """Find the k nearest rows of each block of `rows`, and their scores. The score of NOBODY is FAR.

    The score is ||q - c||^2 / 2 - ||q||^2 / 2 = ||c||^2 / 2 - q.c, which has the same order as the distance. The half
    norm is an extra column of the matrix product.
    """
    rows, block = _blocks(rows, k, len(queries))
    found = table[rows]
    half_norms = jnp.where(rows == NOBODY, FAR, 0.5 * jnp.sum(jnp.square(found), -1))
    found = jnp.concatenate([found, half_norms[:, None]], axis=-1)
    queries = jnp.concatenate([-queries, jnp.ones_like(queries[:, :1])], axis=-1)

    def search_block(args: tuple[Array, Array]) -> tuple[Array, Array]:
        block_table, block_rows = args
        scores = jnp.matmul(queries, block_table.T, precision=lax.Precision.HIGHEST)  # (B, block)
        values, position = smallest_k(scores, k)
        return values, block_rows[position]

    blocks = (found.reshape(-1, block, found.shape[1]), rows.reshape(-1, block))
    values, found_rows = (jnp.moveaxis(x, 0, 1).reshape(len(queries), -1) for x in lax.map(search_block, blocks))
    return values, found_rows


def _blocks(rows: Int[Array, " M"], least: int, num_queries: int) -> tuple[Int[Array, " P"], int]:
    """Pad row numbers with NOBODY to blocks of equal size. Also return the size, a multiple of SEGMENT."""
    on_cpu = jax.default_backend() == "cpu"
    most = min(BLOCK, max(1024, CPU_SCORES // num_queries)) if on_cpu else BLOCK
    num_blocks = -(-len(rows) // most)
    size = max(-(-len(rows) // num_blocks), least)
    size = -(-size // SEGMENT) * SEGMENT
    return jnp.pad(rows, (0, num_blocks * size - len(rows)), constant_values=NOBODY), size
