"""What a prior is given for a training step, and what it gives back for the table."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt8

from exvae.retrieval.draw import Draw


class Batch(NamedTuple):
    """What one training step is given. All but `draw` and `store` is split over the devices."""

    index: Int[Array, " B"]  # numbers of the batch's images
    draw: Draw | None = None  # the M exemplars; None where the prior has none
    # Exemplars that count, as far as the host knows them: with search = none the M drawn, with scann each image's K;
    # NOBODY in a slot without one. With search = exact the step finds them itself.
    slots: Int[Array, " U"] | None = None
    store: UInt8[Array, "N H W C"] | None = None  # all training images, where they fit the devices,
    images: UInt8[Array, "B H W C"] | None = None  # else those of the batch
    slot_images: UInt8[Array, "U H W C"] | None = None  # and those of the slots

    def own_images(self) -> UInt8[Array, "B H W C"]:
        return self.images if self.store is None else self.store[self.index]

    def exemplars(self, slots: Int[Array, " U"]) -> tuple[UInt8[Array, "_ H W C"], Int[Array, " U"] | None]:
        """Images, and which of them the slots hold; None: one after the other."""
        return (self.slot_images, None) if self.store is None else (self.store, slots)


class Means(NamedTuple):
    """Latent means that a step computed, to be written into the table."""

    index: Int[Array, " U"]
    means: Float[Array, "U D"]
