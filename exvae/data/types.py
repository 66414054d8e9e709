"""The types that data sources, splits and decoding have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import numpy as np
from jaxtyping import Int
from typing_extensions import TypeVar


@dataclasses.dataclass(frozen=True)
class Source:
    """Encoded images in files: how to read them in turn, and how to decode one."""

    where: str  # its name in messages
    image_shape: tuple[int, ...]  # height, width, channels of a decoded image
    read: Callable[[np.ndarray], Iterator[tuple[str, bytes]]]  # indices of images -> name and contents of each
    decode: Callable[[str, bytes], np.ndarray]  # name and contents -> image; called from several threads
    # Everything that the decoded images depend on: settings, and files with their times. If it changes, decode again.
    state: Callable[[], list[Any]]


@dataclasses.dataclass(frozen=True)
class Undecoded:
    """Images of a source, given by indices. They can be selected and reordered before they are decoded."""

    source: Source
    index: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: np.ndarray | slice) -> Undecoded:
        return Undecoded(self.source, self.index[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of decoded images."""
        return len(self), *self.source.image_shape


# The images of a split: arrays by default. `Split[Undecoded]` is a split of undecoded images.
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


# Before `decoding.decode`: images may be arrays or undecoded.
RawSplit = Split[np.ndarray | Undecoded]
RawDataset = Dataset[np.ndarray | Undecoded]
Parts = Mapping[str, RawSplit]  # what a source returns: "train", "test" and perhaps "valid", or "all"


class NotHere(Exception):
    """A place does not have the requested data set, for the reason in the message. The next place is tried."""
