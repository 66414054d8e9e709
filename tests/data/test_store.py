"""Training images are kept on the devices or on the host."""

import jax
import numpy as np
import pytest

from exvae.data import store
from exvae.data.store import Store
from exvae.scale import sharding

MIB = np.zeros((1024, 32, 32, 1), np.uint8)  # exactly 1 MiB


@pytest.mark.parametrize(
    ("device_mib", "memory_mib", "device_memory", "on_host"),
    [
        (1.0, 0, None, False),
        (0.99, 1024, None, True),
        (0.0, 1, None, False),  # a CPU does not report its memory
        (0.0, 0.5, None, True),
        (0.0, 0, 4 * 2**20, False),  # a quarter of the device's memory
        (0.0, 1024, 4 * 2**20 - 4, True),
    ],
)
def test_images_are_on_the_devices_if_they_fit(monkeypatch, device_mib, memory_mib, device_memory, on_host):
    monkeypatch.setattr(store, "_device_bytes", lambda: device_memory or 0)
    images = Store(sharding.make_mesh(), MIB, device_mib, memory_mib)
    assert images.on_host == on_host and len(images) == 1024
    assert ("on the host" in images.describe()) == on_host and "(1 MiB)" in images.describe()


def test_take_gives_the_images_in_order(rng):
    images = rng.integers(0, 256, (20, 3, 2, 1), dtype=np.uint8)
    taken = Store(sharding.make_mesh(), images, 1e-9, 0).take(np.array([7, 0, 7, 19]))
    assert isinstance(taken, jax.Array) and taken.dtype == np.uint8
    np.testing.assert_array_equal(taken, images[[7, 0, 7, 19]])
