"""The device mesh. Everything is jit over the mesh; one device is a mesh of one.

Parameters are on every device. The batch, the exemplars of a step and the table of means are split along their first
axis. A process hands over only the rows of its own devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from exvae.errors import UserError

AXIS = "batch"
STEPS_AHEAD = 2  # the host may queue so many steps before it looks at the result of the oldest
WHOLE, PART = PartitionSpec(), PartitionSpec(AXIS)


def is_main() -> bool:
    """Whether this process is the one that prints and writes files; orbax writes from all of them."""
    return jax.process_index() == 0


def make_mesh(batch_size: int = 0) -> Mesh:
    """All devices of all processes along one axis, those of a process next to each other."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) != jax.local_device_count() * jax.process_count():
        raise UserError(f"every process must have as many devices; this one has {jax.local_device_count()}")
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    if batch_size % mesh.size:
        raise UserError(f"config.train.batch_size={batch_size} must be a multiple of the {mesh.size} devices")
    return mesh


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of what is on every device."""
    return NamedSharding(mesh, WHOLE)


def part(mesh: Mesh) -> NamedSharding:
    """The sharding of what is split over the devices."""
    return NamedSharding(mesh, PART)


def shapes(mesh: Mesh, tree: Any) -> Any:
    """What `tree` looks like on every device, without its values."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole(mesh)), tree)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A copy of every leaf on every device; all processes must have the same."""
    return _put(whole(mesh), tree)


def split(mesh: Mesh, tree: Any) -> Any:
    """The first axis of every leaf split over the devices; all processes must have the same."""
    return _put(part(mesh), tree)


def _put(sharding: NamedSharding, tree: Any) -> Any:
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # device_put would compare all processes' values first.
    put = lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda rows: leaf[rows])  # noqa: E731
    return jax.tree.map(lambda leaf: put(np.asarray(fetch(leaf))), tree)


def own_rows(mesh: Mesh, num_rows: int) -> slice:
    """Which rows of a split axis are this process's. Its devices stand next to each other in the mesh."""
    rows = [
        index[0].indices(num_rows)[:2] for index in part(mesh).addressable_devices_indices_map((num_rows,)).values()
    ]
    return slice(min(start for start, _ in rows), max(stop for _, stop in rows))


def join_rows(mesh: Mesh, rows: Shaped[np.ndarray, "n ..."], num_rows: int) -> jax.Array:
    """An array of `num_rows` rows split over the devices, from each process's `own_rows` of it."""
    return jax.make_array_from_process_local_data(part(mesh), rows, (num_rows, *rows.shape[1:]))


def zeros(mesh: Mesh, shape: tuple[int, ...]) -> jax.Array:
    """Split over the devices."""
    return jax.jit(lambda: jnp.zeros(shape), out_shardings=part(mesh))()


def resize(mesh: Mesh, table: jax.Array, num_rows: int) -> jax.Array:
    """With rows of zeros at the end, or without some of them, and split over the devices."""
    grow = lambda table: jnp.pad(table[:num_rows], ((0, max(0, num_rows - len(table))), (0, 0)))  # noqa: E731
    return jax.jit(grow, out_shardings=part(mesh))(table)


def round_up(number: int, mesh: Mesh) -> int:
    """The next multiple of the number of devices."""
    return -(-number // mesh.size) * mesh.size


def fetch(tree: Any) -> Any:
    """numpy arrays of the whole values, in every process."""

    def get(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return leaf

    return jax.device_get(jax.tree.map(get, tree))


def agree(value: Any) -> Any:
    """What the main process says, in every process."""
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)


def anywhere(flag: bool) -> bool:
    """Whether it is so in any process."""
    return flag if jax.process_count() == 1 else bool(np.max(multihost_utils.process_allgather(np.int32(flag))))


def over_images(mesh: Mesh, score: Callable) -> Callable:
    """score(params, components, key, images, index) on each device for its own part of images and index."""
    return per_device(mesh, score, (WHOLE, WHOLE, WHOLE, PART, PART), PART)


def per_device(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on each device, for its part of the arguments that are split."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
