"""The types that data sources, splits and storage have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import numpy as np
from jaxtyping import Int
from typing_extensions import TypeVar


@dataclasses.dataclass(frozen=True)
class Source:
    """Encoded images in files: how to read them one after another, and how to decode one."""

    where: str  # its name in messages
    image_shape: tuple[int, ...]  # height, width, channels of a decoded image
    read: Callable[[np.ndarray], Iterator[tuple[str, bytes]]]  # indices of images -> name and contents of each
    decode: Callable[[str, bytes], np.ndarray]  # name and contents -> image; called from several threads
    # Everything that the decoded images depend on: files with their times, and settings. A change means a new decoding.
    state: Callable[[], list[Any]]


@dataclasses.dataclass(frozen=True)
class Undecoded:
    """Images of a source by their indices. They can be selected and reordered before `storage.decode` decodes them."""

    source: Source
    index: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: np.ndarray | slice) -> Undecoded:
        return Undecoded(self.source, self.index[index])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.source.image_shape


# What a split holds: arrays, unless the type says otherwise, as in `Split[Undecoded]`.
Images = TypeVar("Images", bound=np.ndarray | Undecoded, covariant=True, default=np.ndarray)


@dataclasses.dataclass(frozen=True)
class Split(Generic[Images]):
    """Images with one byte per value, and their labels if the source has labels."""

    images: Images  # (n, height, width, channels) uint8; binarized images hold 0 and 255
    labels: Int[np.ndarray, " n"] | None = None  # int32

    def __len__(self) -> int:
        return len(self.images)


@dataclasses.dataclass(frozen=True)
class Dataset(Generic[Images]):
    """The three splits of a data set. `exvae.data.load` returns it with arrays of images."""

    train: Split[Images]
    valid: Split[Images]
    test: Split[Images]


# Before `storage.decode`: images may be arrays or undecoded.
RawSplit = Split[np.ndarray | Undecoded]
RawDataset = Dataset[np.ndarray | Undecoded]
Parts = Mapping[str, RawSplit]  # what a source returns: "train", "test" and perhaps "valid", or "all"


class NotHere(Exception):
    """A source does not have the requested data set; the text says why. The next source is tried."""
