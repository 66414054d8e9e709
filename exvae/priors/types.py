"""What a prior is given for a training step, and what it gives back for the table."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt8


class Batch(NamedTuple):
    """What one training step is given."""

    images: UInt8[Array, "N H W C"]  # the whole training set: every image is an exemplar
    index: Int[Array, " B"]  # the batch
    candidates: Int[Array, "B C"] | None  # neighbours found on the host, nearest first (search = scann)


class Means(NamedTuple):
    """Latent means that a step computed, to be written into the table."""

    index: Int[Array, " U"]
    means: Float[Array, "U D"]
