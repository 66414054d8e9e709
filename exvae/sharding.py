"""The device mesh. Everything is jit over it; one device is a mesh of one."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from exvae.errors import UserError


def make_mesh(batch_size: int) -> Mesh:
    """All devices along one axis, over which the batch is split."""
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    if batch_size % mesh.size:
        raise UserError(f"config.train.batch_size={batch_size} must be a multiple of the {mesh.size} devices")
    return mesh


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A copy of every leaf on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split_batch(mesh: Mesh, tree: Any) -> Any:
    """The leading axis of every leaf split over the devices."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("batch")))
