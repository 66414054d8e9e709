"""CelebA at 64x64: the middle 140x140 of the aligned 178x218 images, or of copies at half that size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from exvae.data.sources import files
from exvae.data.types import NotHere, Source, Split, Undecoded
from exvae.errors import UserError

COUNTS = {"train": 162_770, "valid": 19_867, "test": 19_962}  # the official splits, by number and in this order
SHAPE = (64, 64, 3)
_CROPS = {(178, 218): 140, (89, 109): 70}  # size of the image -> side of its middle square
_NUMBERED = re.compile(r"\d{6}\.jpg")
_MODE, _SETTINGS = "RGB", ("middle", 140, 178, 218)


def read(folder: Path, name: str) -> dict[str, Split[Undecoded]]:
    """Find the numbered jpgs in `folder`, as files, in a subfolder or in a zip file. They are decoded later.

    If there are several such places, the one with the most jpgs is used: a zip file often lies beside its contents.

    Returns:
      The official splits if all jpgs are there, else `{"all"}`.
    """
    found, broken = _candidates(folder)
    if not found:
        if broken:
            raise broken[0]
        zips = "".join(f", {path} has no such images" for path in sorted(folder.glob("*.zip")))
        raise NotHere(f"no folder or zip file with 000001.jpg and so on in {folder}{zips}")
    path, names = max(found.items(), key=lambda entry: len(entry[1]))
    names = sorted(names, key=_number)
    numbers = np.array([_number(jpg) for jpg in names])
    if len(twice := numbers[1:][np.diff(numbers) == 0]):
        raise UserError(f"{path}: holds {twice[0]:06d}.jpg more than once: keep one of them")
    images = files.undecoded(path, names, mode=_MODE, transform=crop, settings=_SETTINGS, image_shape=SHAPE)
    if np.array_equal(numbers, np.arange(1, sum(COUNTS.values()) + 1)):
        return _consecutive(images, COUNTS)
    return {"all": Split(images)}


def from_shards(
    where: Path, shards: dict[str, list[tuple[Path, int]]], read_shard: Callable[[Path], list[bytes]]
) -> dict[str, Split[Undecoded]]:
    """Make the splits from files that hold many jpgs each, in the stored order. The jpgs are decoded later.

    Args:
      where: the folder, for messages.
      shards: the files of each split, and the number of images in each.
      read_shard: returns the encoded images of a file.
    """
    paths, counts = zip(*(shard for part in shards.values() for shard in part), strict=True)
    starts = np.cumsum([0, *counts])

    def read_jpgs(index: np.ndarray) -> Iterator[tuple[str, bytes]]:
        opened, jpgs = -1, list[bytes]()
        for i in index:
            shard = int(np.searchsorted(starts, i, side="right")) - 1
            if shard != opened:  # only one file at a time is in memory
                opened, jpgs = shard, read_shard(paths[shard])
                if len(jpgs) != counts[shard]:
                    raise UserError(f"{paths[shard]}: holds {len(jpgs)} images instead of {counts[shard]}")
            place = i - starts[shard]
            yield f"{paths[shard]}, image {place}", jpgs[place]

    source = Source(
        where=str(where),
        image_shape=SHAPE,
        read=read_jpgs,
        decode=lambda name, jpg: files.decode(name, jpg, _MODE, crop),
        state=lambda: [{"mode": _MODE, "settings": _SETTINGS}, files.file_states(paths)],
    )
    images = Undecoded(source, np.arange(starts[-1]))
    return _consecutive(images, {part: sum(count for _, count in stored) for part, stored in shards.items()})


def crop(where: str, image: Image.Image) -> Image.Image:
    """Resize the middle square to 64x64, antialiased. It may start at half a pixel: both sizes show the same part."""
    side = _CROPS.get(image.size)
    if side is None:
        sizes = " or ".join(f"{width}x{height}" for width, height in _CROPS)
        raise UserError(f"{where}: {image.width}x{image.height} pixels, but aligned images of CelebA have {sizes}")
    left, top = (image.width - side) / 2, (image.height - side) / 2
    x, y = math.floor(left), math.floor(top)
    image = image.crop((x, y, math.ceil(left + side), math.ceil(top + side)))  # the filter must not use pixels outside
    box = (left - x, top - y, left - x + side, top - y + side)
    return image.resize(SHAPE[:2], Image.Resampling.BICUBIC, box=box)


def _consecutive(images: Undecoded, counts: dict[str, int]) -> dict[str, Split[Undecoded]]:
    ends = np.cumsum(list(counts.values()))
    return {part: Split(images[end - counts[part] : end]) for part, end in zip(counts, ends, strict=True)}


def _candidates(folder: Path) -> tuple[dict[Path, list[str]], list[UserError]]:
    """The numbered jpgs of every zip file and folder that has some, and the errors of broken zip files."""
    found: dict[Path, list[str]] = {}
    broken: list[UserError] = []
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    for path in [*folders, *sorted(folder.glob("*/img_align_celeba/")), *sorted(folder.glob("*.zip"))]:
        try:
            listed = [file.name for file in path.iterdir()] if path.is_dir() else files.list_names(path)
        except UserError as error:
            broken.append(error)
            continue
        except OSError:  # a folder without permission to read
            continue
        if names := [jpg for jpg in listed if _NUMBERED.fullmatch(PurePosixPath(jpg).name)]:
            found[path] = names
    return found, broken


def _number(jpg: str) -> int:
    return int(PurePosixPath(jpg).stem)
