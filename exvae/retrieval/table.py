"""The table of latent means that RAT searches: a row for each exemplar, as of when it was last encoded.

Its rows are split over the devices. There are R of them: N rounded up to a multiple of the number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from exvae.retrieval import NOBODY
from exvae.scale import sharding

Table = Float[Array, "R D"]


def fill(encode_all: Callable[[], Table], *, indexed: bool) -> tuple[Table, tuple[Table, Table] | None]:
    """The table before the first step (Algorithm 1), and the tables of the two first indices if the search has them."""
    table = encode_all()
    return table, (jnp.copy(table), jnp.copy(table)) if indexed else None


def update(mesh: Mesh, table: Table, index: Int[Array, " U"], means: Float[Array, "U D"]) -> Table:
    """Write means into rows `index`, on the device that has the row. Slots with NOBODY are skipped."""

    def local(table, index, means):
        row = index - lax.axis_index(sharding.AXIS) * len(table)
        here = (index != NOBODY) & (row >= 0) & (row < len(table))
        return table.at[jnp.where(here, row, len(table))].set(means, mode="drop")

    whole, part = sharding.WHOLE, sharding.PART
    return sharding.per_device(mesh, local, (part, whole, whole), part)(table, index, means)


def refresh(table: Table | None, encode_all: Callable[[], Table], *, epoch: int, every: int) -> Table | None:
    """The whole table encoded anew after every so many epochs; 0: never, as in Algorithm 1."""
    return encode_all() if table is not None and every and epoch % every == 0 else table


def like(mesh: Mesh, num_rows: int, latent_dim: int) -> jax.ShapeDtypeStruct:
    """What a saved table looks like. It may have been made on another number of devices."""
    place = sharding.part(mesh) if num_rows % mesh.size == 0 else sharding.whole(mesh)
    return jax.ShapeDtypeStruct((num_rows, latent_dim), jnp.float32, sharding=place)


def resize(mesh: Mesh, tables: Table | tuple[Table, ...] | None, num_train: int) -> Table | tuple[Table, ...] | None:
    """Restored tables with as many rows of padding as these devices need, split over them."""
    num_rows = sharding.round_up(num_train, mesh)

    @functools.partial(jax.jit, out_shardings=sharding.part(mesh))
    def pad(table: Float[Array, "_ D"]) -> Table:
        return jnp.pad(table[:num_rows], ((0, max(0, num_rows - len(table))), (0, 0)))

    return jax.tree.map(pad, tables)


def on_host(table: Table, num_train: int) -> Float[np.ndarray, "N D"]:
    """A copy without the padding. The next step reuses the memory of the table itself."""
    return np.array(sharding.fetch(table)[:num_train])
