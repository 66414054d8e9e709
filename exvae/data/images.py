"""`images:PATH`: a folder or a zip file of the user's images."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, ImageOps

from exvae.data.types import Split
from exvae.errors import UserError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
PARTS = ("train", "valid", "test")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
_BROKEN_ZIP = (zipfile.BadZipFile, OSError, EOFError, zlib.error, NotImplementedError, RuntimeError)


def read(path: Path, *, image_size: int, colour: bool) -> dict[str, Split]:
    """Reads all images below `path`, in the order of their names.

    With image_size > 0 the centre square of each image is resized to that side, antialiased, so sizes may differ. With
    image_size = 0 images are kept as they are and must have one size. Labels number the subfolders in sorted order,
    where all images lie in subfolders and there are at least two. Top folders `train`, `test` (and `valid`) are splits.
    """
    if image_size < 0:
        raise UserError(f"config.data.image_size={image_size} must be positive, or 0 to keep the images' own size")
    with _open(path) as (names, read_bytes):
        if not names:
            raise UserError(f"{path}: holds no images ({', '.join(sorted(SUFFIXES))})")
        images = _read_all(path, names, read_bytes, image_size, "RGB" if colour else "L")
    folders = _folders(names)
    tops = {folder[:1] for folder in folders}
    if tops <= {(part,) for part in PARTS} and {("train",), ("test",)} <= tops:
        return _by_part(images, folders)
    return {"all": Split(images, _labels(folders))}


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[list[str], Callable[[str], bytes]]]:
    """The sorted names of the images in a folder or zip file, and a function that reads one."""
    if path.is_dir():
        files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield sorted(filter(_is_image, files)), lambda name: (path / name).read_bytes()
        return
    if not path.exists():
        raise UserError(f"{path}: no such folder or zip file")
    try:
        archive = zipfile.ZipFile(path)
    except _BROKEN_ZIP as error:
        raise UserError(f"{path}: truncated or not a zip file: {error}") from error
    with archive:
        yield sorted(filter(_is_image, archive.namelist())), archive.read


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    # Archives made on a Mac hold a shadow "._x.jpg" of every "x.jpg".
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def _read_all(
    path: Path, names: list[str], read_bytes: Callable[[str], bytes], image_size: int, mode: str
) -> np.ndarray:
    images = np.empty(0, np.uint8)
    for i, name in enumerate(names):
        image = _decode(f"{path}/{name}", lambda name=name: read_bytes(name), image_size, mode)
        if i == 0:
            images = np.empty((len(names), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            first, this = (f"{shape[1]}x{shape[0]}" for shape in (images.shape[1:], image.shape))
            raise UserError(
                f"{path}: images of mixed size: {names[0]} is {first}, {name} is {this} (width x height); "
                f"set config.data.image_size to resize them"
            )
        images[i] = image
    return images


def _decode(where: str, read_bytes: Callable[[], bytes], image_size: int, mode: str) -> np.ndarray:
    """One image as (H, W, C) bytes."""
    try:
        with Image.open(io.BytesIO(read_bytes())) as image:
            if image.mode[0] in "IF":  # PIL would clip these to 0..255 instead of scaling them
                raise UserError(f"{where}: more than 8 bits a pixel (mode {image.mode}); convert it to 8 bits")
            image = ImageOps.exif_transpose(image).convert(mode)  # photographs store which side is up
            if image_size:
                image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BICUBIC)
            return np.asarray(image).reshape(image.height, image.width, -1)
    except UserError:
        raise
    except (*_BROKEN, *_BROKEN_ZIP) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{where}: broken image: {reason}") from error


def _folders(names: list[str]) -> list[tuple[str, ...]]:
    """The folder of each image, without the folders that all of them share."""
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


def _by_part(images: np.ndarray, folders: list[tuple[str, ...]]) -> dict[str, Split]:
    labels = _labels([folder[1:] for folder in folders])  # over all parts, so that a class has one number
    parts = {}
    for part in PARTS:
        chosen = np.array([folder[0] == part for folder in folders])
        if chosen.any():
            parts[part] = Split(images[chosen], None if labels is None else labels[chosen])
    return parts
