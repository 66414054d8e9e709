"""The device mesh. All compiled functions run over the mesh; a single device is a mesh of one.

Every device has all parameters. The batch, the exemplars of a step and the table of means are split along their first
axis. A process provides only the rows of its own devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree, Shaped

from exvae.errors import UserError

AXIS = "batch"
STEPS_AHEAD = 2  # steps that the host may queue before it reads the result of the oldest
WHOLE, PART = PartitionSpec(), PartitionSpec(AXIS)


def is_main() -> bool:
    """Whether this is the process that prints and writes files. Orbax writes from all processes."""
    return jax.process_index() == 0


def make_mesh(batch_size: int = 0) -> Mesh:
    """A mesh of all devices of all processes along one axis. The devices of a process are neighbours.

    Args:
      batch_size: must be a multiple of the number of devices; 0: not checked.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) != jax.local_device_count() * jax.process_count():
        raise UserError(f"all processes must have the same number of devices; this one has {jax.local_device_count()}")
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    if batch_size % mesh.size:
        raise UserError(f"config.train.batch_size={batch_size} must be a multiple of the {mesh.size} devices")
    return mesh


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of an array of which every device has a whole copy."""
    return NamedSharding(mesh, WHOLE)


def part(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is split over the devices along its first axis."""
    return NamedSharding(mesh, PART)


def shapes(mesh: Mesh, tree: PyTree) -> PyTree:
    """The shapes and types of `tree` on every device, without its values."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole(mesh)), tree)


def replicate(mesh: Mesh, tree: PyTree) -> PyTree:
    """Copy every leaf to every device. All processes must pass the same values."""
    return _put(whole(mesh), tree)


def split(mesh: Mesh, tree: PyTree) -> PyTree:
    """Split the first axis of every leaf over the devices. All processes must pass the same values."""
    return _put(part(mesh), tree)


def _put(sharding: NamedSharding, tree: PyTree) -> PyTree:
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # Not device_put, which would first compare the values of all processes.
    put = lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda rows: leaf[rows])  # noqa: E731
    return jax.tree.map(lambda leaf: put(np.asarray(fetch(leaf))), tree)


def own_rows(mesh: Mesh, num_rows: int) -> slice:
    """The rows of a split axis that belong to this process. Its devices are neighbours in the mesh."""
    indices = part(mesh).addressable_devices_indices_map((num_rows,)).values()
    rows = [index[0].indices(num_rows)[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in rows), max(stop for _, stop in rows))


def join_rows(mesh: Mesh, rows: Shaped[np.ndarray, "n ..."], num_rows: int) -> jax.Array:
    """Make an array of `num_rows` rows, split over the devices. Each process passes its `own_rows`."""
    return jax.make_array_from_process_local_data(part(mesh), rows, (num_rows, *rows.shape[1:]))


def zeros(mesh: Mesh, shape: tuple[int, ...]) -> jax.Array:
    """An array of zeros, split over the devices."""
    return jax.jit(lambda: jnp.zeros(shape), out_shardings=part(mesh))()


def round_up(number: int, mesh: Mesh) -> int:
    """The smallest multiple of the number of devices that is at least `number`."""
    return -(-number // mesh.size) * mesh.size


def fetch(tree: PyTree) -> PyTree:
    """Copy the tree to numpy arrays. Every process gets the whole arrays."""
    return jax.device_get(jax.tree.map(_gather, tree))


def _gather(leaf: Any) -> Any:
    """The whole array, also if other processes hold parts of it."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return multihost_utils.process_allgather(leaf, tiled=True)
    return leaf


def agree(value: PyTree) -> PyTree:
    """Return the value of the main process in every process."""
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)


def anywhere(flag: bool) -> bool:
    """Whether the flag is true in any process."""
    return flag if jax.process_count() == 1 else bool(np.max(multihost_utils.process_allgather(np.int32(flag))))


def context(mesh: Mesh) -> contextlib.AbstractContextManager:
    """While this is active, layers that need to know may find out about the mesh (`models.conv`)."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def over_images(mesh: Mesh, score: Callable) -> Callable:
    """Make score(params, components, key, images, index) run on each device with its part of images and index."""
    return per_device(mesh, score, (WHOLE, WHOLE, WHOLE, PART, PART), PART)


def per_device(mesh: Mesh, function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Make `function` run on each device, with the device's part of the split arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
