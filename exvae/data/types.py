"""The records that every data source speaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Source:
    """Encoded images in files: how they are read one after another, and how one is decoded."""

    where: str  # what messages call it
    image_shape: tuple[int, ...]  # height, width, channels of a decoded image
    read: Callable[[np.ndarray], Iterator[tuple[str, bytes]]]  # numbers of images -> name and contents of each
    decode: Callable[[str, bytes], np.ndarray]  # name and contents -> image; runs in threads
    state: Callable[[], list]  # differs as soon as the decoded images may differ: files, their times, settings


@dataclasses.dataclass(frozen=True)
class Undecoded:
    """Images of a source that can be chosen and put in order, before `storage.decode` makes them one array."""

    source: Source
    index: np.ndarray  # (n,) int

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: np.ndarray | slice) -> Undecoded:
        return Undecoded(self.source, self.index[index])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.source.image_shape


@dataclasses.dataclass(frozen=True)
class Split:
    """Images, one byte a value, and labels where the source has them."""

    images: np.ndarray | Undecoded  # (n, height, width, channels) uint8; binarized images hold 0 and 255
    labels: np.ndarray | None = None  # (n,) int32

    def __len__(self) -> int:
        return len(self.images)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What `exvae.data.load` returns; its images are arrays."""

    train: Split
    valid: Split
    test: Split


class NotHere(Exception):
    """A source does not hold the data set that was asked for; the text says why. The next source is tried."""
