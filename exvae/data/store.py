"""The training images during training: on every device, or on the host if they are too large."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt8

from exvae.scale import sharding

SHARE = 0.25  # fraction of a device's memory for images; the rest is for activations


class Store:
    """The training images, one byte per value."""

    def __init__(self, mesh: Mesh, images: UInt8[np.ndarray, "N H W C"], device_mib: float, memory_mib: float):
        """
        Args:
          device_mib: larger images stay on the host; 0: a quarter of a device's memory, or `memory_mib` if the device
            does not report its memory (a CPU).
          memory_mib: config.data.memory_mib.
        """
        self._mesh, self._images = mesh, images
        limit = device_mib * 2**20 or _device_bytes() * SHARE or memory_mib * 2**20
        too_many = sharding.anywhere(images.nbytes > limit)  # all processes must make the same choice
        self.whole: Array | None = None if too_many else sharding.replicate(mesh, images)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self._images.shape[1:]

    @property
    def on_host(self) -> bool:
        """Whether the images are on the host."""
        return self.whole is None

    def take(self, index: Int[np.ndarray, " n"]) -> Array:
        """Read images and split them over the devices. Each process passes only the indices for its own devices."""
        return sharding.join_rows(self._mesh, self._images[index], len(index) * jax.process_count())

    def describe(self) -> str:
        """The size and place of the images, for the log."""
        size = self._images.nbytes / 2**20
        where = "on the host; each step copies those it needs" if self.on_host else "on every device"
        return f"training images ({size:.0f} MiB) {where}"


def _device_bytes() -> int:
    """Memory of one device; 0 if it is unknown."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
