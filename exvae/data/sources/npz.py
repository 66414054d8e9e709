"""Numpy archives: `<name>*.npz` in the data folder, and the user's own `npz:PATH`."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from exvae.data.types import NotHere, Split
from exvae.errors import UserError

# Keys of the images and labels of each part: ours first, then those of Keras' mnist.npz and of Omniglot archives.
_IMAGE_KEYS = {
    "train": ("train", "x_train"),
    "valid": ("valid", "x_valid"),
    "test": ("test", "x_test"),
    "all": ("images",),
}
_LABEL_KEYS = {
    "train": ("train_labels", "y_train", "train_charid"),
    "valid": ("valid_labels", "y_valid", "valid_charid"),
    "test": ("test_labels", "y_test", "test_charid"),
    "all": ("labels",),
}
MAPPED_FROM = 2**30  # bytes; smaller arrays are read into memory, which also tests their checksums
_BROKEN = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


def find(folder: Path, name: str) -> Path:
    """The archive of data set `name` in `folder`: `<name>.npz`, or the only `<name>*.npz`."""
    exact = folder / f"{name}.npz"
    paths = [exact] if exact.is_file() else sorted(folder.glob(f"{name}*.npz"))
    if not paths:
        raise NotHere(f"no {name}*.npz in {folder}")
    if len(paths) > 1:
        raise UserError(f"{folder} holds {', '.join(p.name for p in paths)}: name the right one {name}.npz")
    return paths[0]


def read(path: Path) -> dict[str, Split]:
    """Read an archive with `train` and `test` (and `valid`), or with `images`, and the labels if it has them."""
    if not path.is_file():
        raise UserError(f"{path}: {'is a folder, not an npz file' if path.is_dir() else 'no such file'}")
    arrays = _read_arrays(path)
    parts = {key: _split(path, *pair) for key, pair in arrays.items()}
    if set(parts) == {"train"}:
        return {"all": parts["train"]}
    if "all" in parts and len(parts) > 1:
        raise UserError(
            f"{path}: holds both images and {', '.join(k for k in parts if k != 'all')}: keep one of the two"
        )
    if parts and "all" not in parts and not {"train", "test"} <= set(parts):
        raise UserError(f"{path}: holds {', '.join(parts)} but needs train and test (valid may be left out)")
    return parts


def to_uint8(images: np.ndarray, where: str) -> np.ndarray:
    """Convert images to (n, H, W, C) bytes.

    Args:
      images: bytes, booleans or floats in 0..1. The axis of channels may be missing, and square images may be flat.
      where: the beginning of error messages.
    """
    images = _with_channels(images, where)
    if images.dtype == bool:
        return images.astype(np.uint8) * np.uint8(255)
    if images.dtype == np.uint8:
        # Images with no levels except 0 and 1 are binary, not grey.
        return images * np.uint8(255) if images.max() <= 1 else images
    if images.dtype.kind != "f":
        raise UserError(f"{where}: dtype {images.dtype}; expected uint8 (0..255), bool or float (0..1)")
    if not np.isfinite(images).all():
        raise UserError(f"{where}: {int((~np.isfinite(images)).sum())} values are NaN or infinite")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise UserError(f"{where}: values in {low:g}..{high:g}; floats must lie in 0..1 (or store uint8 in 0..255)")
    return np.rint(images * 255).astype(np.uint8)


def to_labels(labels: np.ndarray, n: int, where: str) -> np.ndarray:
    """Convert labels to int32, and check that there are n of them."""
    if labels.dtype.kind not in "iu" or labels.shape != (n,):
        raise UserError(f"{where}: expected {n} integers, found shape {labels.shape} of {labels.dtype}")
    return labels.astype(np.int32)


def _read_arrays(path: Path) -> dict[str, tuple[str, np.ndarray, str | None, np.ndarray | None]]:
    """For each part: key and array of the images, key and array of the labels."""
    arrays = {}
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:  # np.load might not close the file
            for part, keys in _IMAGE_KEYS.items():
                images = next((key for key in keys if key in archive), None)
                labels = next((key for key in _LABEL_KEYS[part] if key in archive), None)
                if images:
                    array = _map(path, archive, images)
                    array = archive[images] if array is None else array
                    arrays[part] = images, array, labels, archive[labels] if labels else None
            names = list(archive)
    except _BROKEN as error:
        if "Object arrays" in str(error):
            raise UserError(f"{path}: holds an object array: images of mixed size? All must have one size") from error
        raise UserError(f"{path}: truncated or not an npz file: {str(error).splitlines()[0]}") from error
    except TypeError as error:  # a .npy file: np.load returns an array, which is not a context manager
        raise UserError(
            f"{path}: holds one array, not an npz archive: write it with np.savez(path, images=...)"
        ) from error
    if not arrays:
        raise UserError(f"{path}: holds {', '.join(names) or 'nothing'}; expected train and test, or images")
    return arrays


def _map(path: Path, archive: np.lib.npyio.NpzFile, key: str) -> np.ndarray | None:
    """Map the array from the file if it is large, of bytes and stored without compression; otherwise return None."""
    info = None if archive.zip is None else archive.zip.NameToInfo.get(f"{key}.npy")
    if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < MAPPED_FROM:
        return None
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # skip the name and the extra field
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            return None
        shape, fortran_order, dtype = read_header[version](file)
        if fortran_order or dtype != np.uint8:
            return None
        return np.asarray(np.memmap(path, dtype, mode="r", offset=file.tell(), shape=shape))


def _split(path: Path, key: str, images: np.ndarray, label_key: str | None, labels: np.ndarray | None) -> Split:
    images = to_uint8(images, f"{path}: {key}")
    if label_key is None or labels is None:
        return Split(images)
    if label_key.endswith("_charid"):
        labels = labels - 1  # Omniglot numbers its characters from 1; all sources here number them from 0
    return Split(images, to_labels(labels, len(images), f"{path}: {label_key}"))


def _with_channels(images: np.ndarray, where: str) -> np.ndarray:
    shape = images.shape
    if images.size == 0:
        raise UserError(f"{where}: holds no images (shape {shape})")
    if images.ndim == 2 and math.isqrt(shape[1]) ** 2 == shape[1]:
        side = math.isqrt(shape[1])
        return images.reshape(shape[0], side, side, 1)
    if images.ndim == 3:
        return images[..., None]
    if images.ndim == 4 and shape[3] in (1, 3):
        return images
    raise UserError(f"{where}: shape {shape}; expected (n, H, W), (n, H, W, 1), (n, H, W, 3) or (n, side * side)")
