"""`images:PATH`: a folder or a zip file of the user's images."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, ImageOps

from exvae.data.sources import files
from exvae.data.types import Split, Undecoded
from exvae.errors import UserError

PARTS = ("train", "valid", "test")


def find(path: Path, *, image_size: int, colour: bool) -> dict[str, Split[Undecoded]]:
    """List all images in `path` and its subfolders, sorted by name. They are decoded later, after the split.

    If the top folders are `train` and `test` (and `valid`), they are the splits. If all images are in subfolders, and
    there are at least two of them, labels number the subfolders in sorted order.

    Args:
      path: a folder or a zip file.
      image_size: the centre square of each image is resized to this height and width, antialiased. 0: images keep their
        size, which must be the same for all.
      colour: whether to keep three channels.
    """
    if image_size < 0:
        raise UserError(f"config.data.image_size={image_size} must be positive, or 0 to keep the images' own size")
    names = files.list_names(path)
    if not names:
        raise UserError(f"{path}: holds no images ({', '.join(sorted(files.SUFFIXES))})")

    def resize(where: str, image: Image.Image) -> Image.Image:
        return ImageOps.fit(image, (image_size, image_size), Image.Resampling.BICUBIC) if image_size else image

    images = files.undecoded(
        path,
        names,
        mode="RGB" if colour else "L",
        transform=resize,
        settings=("centre square", image_size),
        image_shape=(image_size, image_size, 3 if colour else 1) if image_size else None,
    )
    folders = _folders(names)
    tops = {folder[:1] for folder in folders}
    if tops <= {(part,) for part in PARTS} and {("train",), ("test",)} <= tops:
        return _by_part(images, folders)
    return {"all": Split(images, _labels(folders))}


def _folders(names: list[str]) -> list[tuple[str, ...]]:
    """The folder of each image, without the leading folders that all images share."""
    folders = [PurePosixPath(name).parts[:-1] for name in names]
    while all(folders) and len({folder[0] for folder in folders}) == 1:
        folders = [folder[1:] for folder in folders]
    return folders


def _labels(folders: list[tuple[str, ...]]) -> np.ndarray | None:
    classes = sorted(set(folders))
    if () in classes or len(classes) < 2:
        return None
    number = {folder: i for i, folder in enumerate(classes)}
    return np.array([number[folder] for folder in folders], np.int32)


def _by_part(images: Undecoded, folders: list[tuple[str, ...]]) -> dict[str, Split[Undecoded]]:
    labels = _labels([folder[1:] for folder in folders])  # over all parts, so a class has the same number in each
    parts = {}
    for part in PARTS:
        chosen = np.array([folder[0] == part for folder in folders])
        if chosen.any():
            parts[part] = Split(images[chosen], None if labels is None else labels[chosen])
    return parts
