"""Image files in a folder or a zip file: list them, read them, decode them."""

from __future__ import annotations

import contextlib
import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, ImageOps

from exvae.data.types import Source, Undecoded
from exvae.errors import UserError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
_BROKEN_ZIP = (zipfile.BadZipFile, OSError, EOFError, zlib.error, RuntimeError)
_BROKEN = (*_BROKEN_ZIP, SyntaxError, ValueError, struct.error, Image.DecompressionBombError)


def list_names(path: Path) -> list[str]:
    """The sorted names of all images in a folder, its subfolders, or a zip file."""
    if path.is_dir():
        files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        return sorted(filter(_is_image, files))
    if not path.exists():
        raise UserError(f"{path}: no such folder or zip file")
    with _open_zip(path) as archive:
        return sorted(filter(_is_image, archive.namelist()))


def undecoded(
    path: Path,
    names: list[str],
    *,
    mode: str,
    transform: Callable[[str, Image.Image], Image.Image],
    settings: tuple[str | int, ...],
    image_shape: tuple[int, ...] | None = None,
) -> Undecoded:
    """Return the images with these names. They are decoded later.

    Args:
      path: the folder or zip file.
      names: names from `list_names`.
      mode: PIL's name for the channels, 'L' or 'RGB'.
      transform: a function (name for messages, image) -> image that crops and resizes.
      settings: everything that `transform` depends on.
      image_shape: shape of a decoded image; None: the shape of the first image, which is decoded to find out.
    """
    if image_shape is None:
        ((where, contents),) = _read(path, names[:1], np.arange(1))
        image_shape = decode(where, contents, mode, transform).shape

    def decode_checked(where: str, contents: bytes) -> np.ndarray:
        image = decode(where, contents, mode, transform)
        if image.shape != image_shape:
            first, this = (f"{shape[1]}x{shape[0]}" for shape in (image_shape, image.shape))
            name = where.removeprefix(f"{path}/")
            raise UserError(
                f"{path}: images of mixed size: {names[0]} is {first}, {name} is {this} (width x height); "
                f"set config.data.image_size to resize them"
            )
        return image

    source = Source(
        where=str(path),
        image_shape=image_shape,
        read=functools.partial(_read, path, names),
        decode=decode_checked,
        state=lambda: [mode, settings, names, file_states([path, *_members(path, names)])],
    )
    return Undecoded(source, np.arange(len(names)))


def decode(where: str, contents: bytes, mode: str, transform: Callable[[str, Image.Image], Image.Image]) -> np.ndarray:
    """Decode one image to (H, W, C) bytes."""
    with _named(where), Image.open(io.BytesIO(contents)) as opened:
        if opened.mode[0] in "IF":  # PIL would clip these to 0..255 instead of scaling them
            raise UserError(f"{where}: more than 8 bits a pixel (mode {opened.mode}); convert it to 8 bits")
        image = transform(where, ImageOps.exif_transpose(opened).convert(mode))  # photographs may store a rotation
        return np.asarray(image).reshape(image.height, image.width, -1)


def file_states(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Absolute path, size and modification time of each file; they change when the contents change."""
    states = []
    for path in paths:
        with _named(str(path)):
            status = path.stat()
        # The time of a folder is ignored, because it also changes with files that are not images.
        states.append((str(path.absolute()), *((0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns))))
    return states


def _members(path: Path, names: list[str]) -> list[Path]:
    return [path / name for name in names] if path.is_dir() else []


def _read(path: Path, names: list[str], index: np.ndarray) -> Iterator[tuple[str, bytes]]:
    with contextlib.ExitStack() as stack:
        archive = None if path.is_dir() else stack.enter_context(_open_zip(path))
        for i in index:
            where = f"{path}/{names[i]}"
            with _named(where):
                contents = (path / names[i]).read_bytes() if archive is None else archive.read(names[i])
            yield where, contents


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except _BROKEN_ZIP as error:
        raise UserError(f"{path}: truncated or not a zip file: {error}") from error


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    # Archives made on a Mac contain a file "._x.jpg" for every "x.jpg".
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn any error about a broken file into a one-line UserError with the name of the file."""
    try:
        yield
    except UserError:
        raise
    except _BROKEN as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{where}: broken image: {reason}") from error
