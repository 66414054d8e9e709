"""The table of latent means that RAT searches. Row n is mu(x_n), computed when exemplar n was last encoded.

The rows are split over the devices. Their number R is N rounded up to a multiple of the number of devices.

Differs from the authors' code: the table is filled once and then only updated, as in Algorithm 1 of the paper. The code
refreshes it in every epoch, as does retrieval.refresh_epochs = 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int

from exvae.arrays import Array
from exvae.retrieval import NOBODY
from exvae.scale import sharding

Table = Float[Array, "R D"]
Tables = TypeVar("Tables")  # a table, two of them, or None. Their number of rows may change, so it is not checked


def fill(encode_all: Callable[[], Table], *, indexed: bool) -> tuple[Table, tuple[Table, Table] | None]:
    """Encode all exemplars before the first step (Algorithm 1). If `indexed`, copy the table for both indices."""
    table = encode_all()
    return table, (jnp.copy(table), jnp.copy(table)) if indexed else None


def update(mesh: Mesh, table: Table, index: Int[Array, " U"], means: Float[Array, "U D"]) -> Table:
    """Write means into rows `index`. Slots with NOBODY are skipped."""

    def local(table: Array, index: Array, means: Array) -> Array:
        row = index - lax.axis_index(sharding.AXIS) * len(table)
        here = (index != NOBODY) & (row >= 0) & (row < len(table))
        return table.at[jnp.where(here, row, len(table))].set(means, mode="drop")

    whole, part = sharding.WHOLE, sharding.PART
    return sharding.per_device(mesh, local, (part, whole, whole), part)(table, index, means)


def refresh(table: Table | None, encode_all: Callable[[], Table], *, epoch: int, every: int) -> Table | None:
    """Encode the whole table again after every `every` epochs. 0 means never, as in Algorithm 1."""
    return encode_all() if table is not None and every and epoch % every == 0 else table


def like(mesh: Mesh, num_rows: int, latent_dim: int) -> jax.ShapeDtypeStruct:
    """Return the shape and sharding of a saved table. The number of devices may have changed since then."""
    place = sharding.part(mesh) if num_rows % mesh.size == 0 else sharding.whole(mesh)
    return jax.ShapeDtypeStruct((num_rows, latent_dim), jnp.float32, sharding=place)


def resize(mesh: Mesh, tables: Tables, num_train: int) -> Tables:
    """Pad restored tables for the current number of devices, and split them over the devices."""
    num_rows = sharding.round_up(num_train, mesh)

    @functools.partial(jax.jit, out_shardings=sharding.part(mesh))
    def pad(table: Float[Array, "_ D"]) -> Table:
        return jnp.pad(table[:num_rows], ((0, max(0, num_rows - len(table))), (0, 0)))

    return jax.tree.map(lambda table: table if len(table) == num_rows else pad(table), tables)


def on_host(table: Table, num_train: int) -> Float[np.ndarray, "N D"]:
    """Copy the table to the host, without padding. It must be a copy: the next step reuses the table's memory."""
    return np.array(sharding.fetch(table)[:num_train])
