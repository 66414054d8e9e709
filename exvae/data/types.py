"""The records that every data source speaks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """Images in memory, one byte a value, and labels where the source has them."""

    images: np.ndarray  # (n, height, width, channels) uint8; binarized images hold 0 and 255
    labels: np.ndarray | None  # (n,) int32

    def __len__(self) -> int:
        # A NamedTuple would count its fields; users of a split count its images.
        return len(self.images)


class Dataset(NamedTuple):
    """What `exvae.data.load` returns."""

    train: Split
    valid: Split
    test: Split


class NotHere(Exception):
    """A source does not hold the data set that was asked for; the text says why. The next source is tried."""
