"""The records that every data source speaks."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Split:
    """Images in memory, one byte a value, and labels where the source has them."""

    images: np.ndarray  # (n, height, width, channels) uint8; binarized images hold 0 and 255
    labels: np.ndarray | None = None  # (n,) int32

    def __len__(self) -> int:
        return len(self.images)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What `exvae.data.load` returns."""

    train: Split
    valid: Split
    test: Split


class NotHere(Exception):
    """A source does not hold the data set that was asked for; the text says why. The next source is tried."""
