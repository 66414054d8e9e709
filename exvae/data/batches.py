"""Images in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Shaped

from exvae.scale import sharding


def epoch_order(seed: int, epoch: int, num_train: int, batch_size: int) -> Int[np.ndarray, "T B"]:
    """The image indices of each batch of an epoch, a function of (seed, epoch) only. An incomplete batch is dropped."""
    # Differs from the paper: Algorithm 1 visits all N images. Here the images of an incomplete last batch wait.
    order = np.random.default_rng((seed, epoch)).permutation(num_train).astype(np.int32)
    return order[: num_train // batch_size * batch_size].reshape(-1, batch_size)


def padded_batches(
    images: Shaped[np.ndarray, "n ..."], size: int, multiple: int = 1
) -> Iterator[tuple[int, np.ndarray]]:
    """The start index and the images of each batch. The last batch is padded: one shape, one compilation.

    Args:
      multiple: the batch size is rounded up to a multiple of this.
    """
    size = -(-min(size, len(images)) // multiple) * multiple
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        yield start, np.pad(batch, [(0, size - len(batch))] + [(0, 0)] * (images.ndim - 1))


def map_batches(
    function: Callable[[int, Any], Any], images: Shaped[np.ndarray, "n ..."], size: int, mesh: Mesh | None = None
) -> Any:
    """Apply function(start, batch) to every batch and join the results on the host.

    Only one batch at a time is on the devices.

    Args:
      function: returns a tree of arrays with one row per image of the batch.
      mesh: batches are split over its devices; None: `function` gets them as numpy arrays.

    Returns:
      The same tree, of numpy arrays with one row per image.
    """
    parts = []
    for start, batch in padded_batches(images, size, 1 if mesh is None else mesh.size):
        parts.append(sharding.fetch(function(start, batch if mesh is None else sharding.split(mesh, batch))))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(images)], *parts)
