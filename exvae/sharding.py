"""The device mesh. Everything is jit over it; one device is a mesh of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from exvae.errors import UserError


def make_mesh(batch_size: int = 0) -> Mesh:
    """All devices along one axis, over which the batch is split."""
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    if batch_size % mesh.size:
        raise UserError(f"config.train.batch_size={batch_size} must be a multiple of the {mesh.size} devices")
    return mesh


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A copy of every leaf on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def over_images(mesh: Mesh, score: Callable) -> Callable:
    """score(params, components, key, images, index) on each device for its own part of images and index."""
    whole, part = PartitionSpec(), PartitionSpec("batch")
    return jax.shard_map(score, mesh=mesh, in_specs=(whole, whole, whole, part, part), out_specs=part, check_vma=False)


def split_batch(mesh: Mesh, tree: Any) -> Any:
    """The leading axis of every leaf split over the devices."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("batch")))
